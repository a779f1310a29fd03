"""What has happened when a collective failed: a rank that fails says why through the store, and the ranks that see the
collective fail say that they are here."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

_HOST, _HERE, _FAILED = "trainer_cli/host/", "trainer_cli/here/", "trainer_cli/failed"
_LOOK_AFTER_S = 0.1
STORE_IS_SILENT = ["rank 0, which holds the store"]


def introduce(store: Any, rank: int, host: str) -> None:
    """Write the name of a rank's machine into the store, for `what_happened`."""
    store.set(f"{_HOST}{rank}", host)


def late(store: Any, world_size: int, timeout: timedelta) -> list[int]:
    """Wait until every rank has called `introduce`. Returns the ranks that have not in time."""
    keys = [f"{_HOST}{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def report_failure(store: Any, rank: int, why: str) -> None:
    """Write into the store that a rank fails, and why, before it ends."""
    store.set(_FAILED, f"rank {rank} failed: {why}")


def what_happened(store: Any, rank: int, world_size: int, *, wait_s: float) -> tuple[str | None, list[str]]:
    """What a rank that failed has said of itself; if none has, the ranks, with their machines, that do not call this,
    too, within `wait_s` seconds.

    A rank that has ended, is stopped, or hangs in something else does not call it. Those that hear of the failure do so
    at about the same time: the first that ends closes its connections to the others.
    """
    found: list[tuple[str | None, list[str]]] = []

    def ask() -> None:
        store.set(f"{_HERE}{rank}", "")
        until = time.monotonic() + wait_s
        absent = [one for one in range(world_size) if one != rank]
        while absent and time.monotonic() < until:
            if store.check([_FAILED]):
                found.append((store.get(_FAILED).decode(), []))
                return
            time.sleep(_LOOK_AFTER_S)
            absent = [one for one in absent if not store.check([f"{_HERE}{one}"])]
        found.append((None, [f"rank {one} ({store.get(f'{_HOST}{one}').decode()})" for one in absent]))

    # A store whose process is stopped never answers.
    asking = threading.Thread(target=_quietly, args=(ask,), name="missing-ranks", daemon=True)
    asking.start()
    asking.join(2 * wait_s)
    return found[0] if found else (None, list(STORE_IS_SILENT))


def _quietly(function: Any) -> None:
    try:
        function()
    except RuntimeError:
        """The process that holds the store has ended."""
