"""How ranks find one another: a store that rank 0 holds, or torchrun's agent.

Errors which say that another rank has failed, has ended or hangs, and what this one was at.

What has happened when a collective failed: a rank that fails says why through the store, and the ranks that see the
collective fail say that they are here.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trainer_cli.core.ranks import Ranks
from trainer_cli.errors import UserError

_BACKENDS = ("gloo/", "NCCL", "nccl")
"""One of these is in every error of torch's that says that another rank has ended, or does not answer."""


class PeerError(Exception):
    """Another rank failed, and says why; this one only ends, with the same exit code if that is known."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LostRankError(PeerError):
    """A rank has ended without a word, is stopped, or hangs; the message names it."""


def is_of_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank has failed or ended."""
    return isinstance(error, PeerError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in _BACKENDS)
    )


@contextmanager
def noting(doing: str) -> Iterator[None]:
    """Add a note to an error which says that another rank has ended or hangs: `while` and what this one was at."""
    try:
        yield
    except RuntimeError as error:
        if is_of_peer(error):
            error.add_note(doing)
        raise


def waited(error: BaseException, otherwise: str) -> str:
    """What this rank was at when it waited for one that did not come, by the notes of the error."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note for note in notes if note.startswith("while ")), otherwise)


_SAID_AFTER = timedelta(seconds=30)
"""How long ranks wait in silence for one that has not started."""
_LOOK_AFTER_S = 0.1


def meet(ranks: Ranks, environ: Mapping[str, str], timeout: timedelta) -> Any:
    """The store by which the ranks find one another, once all have come to it.

    Raises:
        UserError: the port of rank 0 is in use.
        PeerError: a rank does not come; on one of the others a LostRankError.
    """
    import torch.distributed

    dist: Any = torch.distributed
    if ranks.address is None:
        return dist.HashStore()
    host, port = ranks.address
    serves = ranks.rank == 0 and not has_agent_store(environ)
    if not serves:
        _wait_for_rank_0(ranks, host, port, timeout)
    try:
        served = dist.TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if serves:
            cure = "Set MASTER_PORT to a free port, the same on all ranks."
            raise UserError(
                f"rank 0 cannot listen at {host}:{port}: {error}", where="MASTER_PORT", cure=cure
            ) from error
        raise LostRankError(f"rank 0 does not answer rank {ranks.rank} at {host}:{port}") from error
    store = dist.PrefixStore(f"attempt{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", served)
    try:
        introduce(store, ranks.rank, socket.gethostname())
        absent = late(store, ranks.world_size, min(timeout, _SAID_AFTER))
        if absent and ranks.rank == _speaker(ranks, absent):
            print(f"train: waiting for {_named(absent)} of {ranks.world_size} processes to start", file=sys.stderr)
        if absent:
            absent = late(store, ranks.world_size, timeout - min(timeout, _SAID_AFTER))
    except RuntimeError as error:
        raise PeerError("rank 0, which holds the store, has ended") from error
    if not absent:
        return store
    if ranks.rank != _speaker(ranks, absent):
        raise PeerError("a rank did not start")
    have = "has" if len(absent) == 1 else "have"
    raise LostRankError(f"{_named(absent)} of {ranks.world_size} {have} not started in {timeout.total_seconds():g} s")


def has_agent_store(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's agent holds the store, which then outlives a restart of the processes; else rank 0 does."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_for_rank_0(ranks: Ranks, host: str, port: int, timeout: timedelta) -> None:
    """Wait until something listens at the address of rank 0. Torch waits without a word, and handles no signal.

    Raises:
        LostRankError: nothing does within the timeout.
    """
    until, say_at = (time.monotonic() + wait.total_seconds() for wait in (timeout, min(timeout, _SAID_AFTER)))
    while True:
        try:
            socket.create_connection((host, port), timeout=_SAID_AFTER.total_seconds()).close()
            return
        except OSError as error:
            now, why = time.monotonic(), f"{host}:{port} (MASTER_ADDR, MASTER_PORT): {error}"
            if now >= until:
                raise LostRankError(f"rank 0 does not answer rank {ranks.rank} at {why}") from error
            if now >= say_at and (ranks.local_rank == 0 or ranks.rank == 1):
                print(f"train: rank {ranks.rank} is waiting for rank 0 at {why}", file=sys.stderr)
                say_at = until
            time.sleep(_LOOK_AFTER_S)


def _speaker(ranks: Ranks, absent: list[int]) -> int:
    """The first rank that is there."""
    return min(set(range(ranks.world_size)) - set(absent))


def _named(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


_HOST, _HERE, _FAILED = "trainer_cli/host/", "trainer_cli/here/", "trainer_cli/failed"
_COUNT, _ASKING = "trainer_cli/here", "trainer_cli/asking"
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
