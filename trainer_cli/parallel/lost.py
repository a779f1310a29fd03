"""What has happened when a collective failed: a rank that fails says why through the store, and the ranks that see the
collective fail say that they are here."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_HOST, _HERE, _FAILED = "trainer_cli/host/", "trainer_cli/here/", "trainer_cli/failed"
_COUNT, _ASKING = "trainer_cli/here", "trainer_cli/asking"
_LOOK_AFTER_S = 0.1
_RANK_0_COMES_IN_S = 1.0
"""How long another rank waits for rank 0 before it asks in its place."""
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """What one rank could find out after a collective failed."""

    failure: str | None = None
    """What a rank that failed has said of itself."""
    absent: tuple[str, ...] = ()
    """The ranks that did not answer, the first of them with their machines."""
    is_asked: bool = True
    """False if another rank asks, and reports, in place of this one."""
    store_answers: bool = True
    """False if the store did not answer, so that nothing could be found out."""


def introduce(store: Any, rank: int, host: str) -> None:
    """Write the name of a rank's machine into the store, for `what_happened`."""
    store.set(f"{_HOST}{rank}", host)


def late(store: Any, world_size: int, timeout: timedelta) -> list[int]:
    """Wait until every rank has called `introduce`. Returns the ranks that have not in time."""
    keys = [f"{_HOST}{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        return _lacking(store, _HOST, list(range(world_size)))
    return []


def report_failure(store: Any, rank: int, why: str) -> None:
    """Write into the store that a rank fails, and why, before it ends."""
    store.set(_FAILED, f"rank {rank} failed: {why}")


def what_happened(store: Any, rank: int, world_size: int, *, wait_s: float) -> Loss:
    """What a rank that failed has said of itself; if none has, the ranks that do not call this, too, within `wait_s`
    seconds.

    Rank 0 asks, or the first other rank, if rank 0 does not call this. All others return at once: the connections that
    a rank closes when it ends tell its neighbours, which may wait for it alone. So the requests grow with the number of
    ranks, and not with its square.

    A rank that has ended, is stopped, or hangs in something else does not call this.
    """
    found: list[Loss] = []

    def ask() -> None:
        if not store.check([f"{_HERE}{rank}"]):
            store.set(f"{_HERE}{rank}", "")
            store.add(_COUNT, 1)
        if rank != 0 and not _asks_for_rank_0(store):
            said = store.get(_FAILED).decode() if store.check([_FAILED]) else None
            found.append(Loss(said, is_asked=False))
            return
        until = time.monotonic() + wait_s
        while store.add(_COUNT, 0) < world_size and time.monotonic() < until:
            if store.check([_FAILED]):
                break
            time.sleep(_LOOK_AFTER_S)
        if store.check([_FAILED]):
            found.append(Loss(store.get(_FAILED).decode()))
            return
        absent = _lacking(store, _HERE, list(range(world_size)))
        named = [f"rank {one} ({store.get(f'{_HOST}{one}').decode()})" for one in absent[:_MOST_NAMED]]
        more = [f"{len(absent) - _MOST_NAMED} more"] if len(absent) > _MOST_NAMED else []
        found.append(Loss(absent=(*named, *more)))

    # A store whose process is stopped never answers.
    asking = threading.Thread(target=_quietly, args=(ask,), name="missing-ranks", daemon=True)
    asking.start()
    asking.join(2 * wait_s)
    return found[0] if found else Loss(store_answers=False)


def _asks_for_rank_0(store: Any) -> bool:
    """Whether this rank asks: the first that comes, if rank 0 does not come soon."""
    if store.add(_ASKING, 1) != 1:
        return False
    until = time.monotonic() + _RANK_0_COMES_IN_S
    while time.monotonic() < until:
        if store.check([f"{_HERE}0"]):
            return False
        time.sleep(_LOOK_AFTER_S)
    return True


def _lacking(store: Any, prefix: str, ranks: list[int]) -> list[int]:
    """The ranks whose key is not in the store. Few requests, where few lack."""
    if not ranks or store.check([f"{prefix}{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return ranks
    half = len(ranks) // 2
    return _lacking(store, prefix, ranks[:half]) + _lacking(store, prefix, ranks[half:])


def _quietly(function: Any) -> None:
    try:
        function()
    except RuntimeError:
        """The process that holds the store has ended."""
