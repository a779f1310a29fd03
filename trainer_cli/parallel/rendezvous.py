"""How ranks meet through a store, and find out which of them is lost when a collective fails.

Rank 0, torchrun's agent or a process of the launcher (`serve_store`) holds the store. Each rank writes its machine's
name into it at the start. A rank that fails writes why before it ends; ranks that see a collective fail write that they
are alive, and those without such a key are lost.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trainer_cli.errors import UserError
from trainer_cli.parallel.peer_errors import LostRankError, PeerError
from trainer_cli.ranks import Ranks, has_agent_store

_HOST, _ALIVE, _FAILED = "trainer_cli/host/", "trainer_cli/here/", "trainer_cli/failed"
_ALIVE_COUNT, _ASKING = "trainer_cli/here", "trainer_cli/asking"
_HOST_COUNT, _ALL_HOSTS = "trainer_cli/hosts", "trainer_cli/all_hosts"
"""Keys in the store; those that end in a slash are followed by a rank."""
_SILENT = timedelta(seconds=30)
"""How long ranks wait for one that has not started before they print that they wait."""
_POLL_S = 0.1
_RANK_0_ANSWERS_IN_S = 1.0
"""How long another rank waits for rank 0 before it searches in its place."""
_MOST_NAMED = 8


def meet(ranks: Ranks, environ: Mapping[str, str], timeout: timedelta) -> Any:
    """Connect to the store, and return it once all ranks have.

    Raises:
        UserError: the port of rank 0 is in use.
        PeerError: a rank does not connect in time; on one of the others a LostRankError.
    """
    import torch.distributed

    dist: Any = torch.distributed
    if ranks.address is None:
        return dist.HashStore()
    host, port = ranks.address
    is_server = ranks.rank == 0 and not has_agent_store(environ)
    if not is_server:
        _wait_for_rank_0(ranks, host, port, timeout)
    try:
        tcp_store = dist.TCPStore(host, port, is_master=is_server, timeout=timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if is_server:
            cure = "Set MASTER_PORT to a free port, the same on all ranks."
            raise UserError(
                f"rank 0 cannot listen at {host}:{port}: {error}", where="MASTER_PORT", cure=cure
            ) from error
        raise LostRankError(f"rank 0 does not answer rank {ranks.rank} at {host}:{port}") from error
    # torchrun's agent keeps its store over restarts: keys of an earlier attempt must not be read.
    store = dist.PrefixStore(f"attempt{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp_store)
    try:
        write_host(store, ranks.rank, ranks.world_size, socket.gethostname())
        first_s, all_here = min(timeout, _SILENT), True
        if not wait_for_hosts(store, first_s):
            if absent := _find_absent_hosts(store, ranks.world_size, "waiting"):
                print(f"train: waiting for {_named(absent)} of {ranks.world_size} processes to start", file=sys.stderr)
            all_here = wait_for_hosts(store, timeout - first_s)
        absent = [] if all_here else _find_absent_hosts(store, ranks.world_size, "absent")
    except RuntimeError as error:
        raise PeerError("rank 0, which holds the store, has ended") from error
    if all_here:
        return store
    if not absent:
        raise PeerError("a rank did not start")
    have = "has" if len(absent) == 1 else "have"
    raise LostRankError(f"{_named(absent)} of {ranks.world_size} {have} not started in {timeout.total_seconds():g} s")


def serve_store() -> Any:
    """A store for ranks of this machine alone, at its `port` of 127.0.0.1. Served while it is referenced."""
    import torch.distributed

    dist: Any = torch.distributed
    # By itself torch would listen to all machines.
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _wait_for_rank_0(ranks: Ranks, host: str, port: int, timeout: timedelta) -> None:
    """Wait until something listens at the address of rank 0. Torch would wait in silence, and handle no signal.

    Raises:
        LostRankError: nothing does within the timeout.
    """
    deadline, say_at = (time.monotonic() + wait.total_seconds() for wait in (timeout, min(timeout, _SILENT)))
    while True:
        try:
            socket.create_connection((host, port), timeout=_SILENT.total_seconds()).close()
            return
        except OSError as error:
            now, why = time.monotonic(), f"{host}:{port} (MASTER_ADDR, MASTER_PORT): {error}"
            if now >= deadline:
                raise LostRankError(f"rank 0 does not answer rank {ranks.rank} at {why}") from error
            if now >= say_at and (ranks.local_rank == 0 or ranks.rank == 1):
                print(f"train: rank {ranks.rank} is waiting for rank 0 at {why}", file=sys.stderr)
                say_at = deadline
            time.sleep(_POLL_S)


def _named(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


@dataclass(frozen=True, slots=True)
class LostRanks:
    """What one rank could find out after a collective failed."""

    failure: str | None = None
    """The message of the rank that failed, as it wrote it into the store."""
    absent: tuple[str, ...] = ()
    """The ranks that did not answer, the first of them with their machines."""
    is_asked: bool = True
    """False if another rank searches, and reports, in place of this one."""
    store_answers: bool = True
    """False if the store did not answer, so that the cause is unknown."""


def write_host(store: Any, rank: int, world_size: int, host: str) -> None:
    """Write the name of a rank's machine into the store."""
    store.set(f"{_HOST}{rank}", host)
    # One key for all to wait for: if each waited for those of all others, they would ask for world_size**2 keys.
    if store.add(_HOST_COUNT, 1) == world_size:
        store.set(_ALL_HOSTS, "")


def wait_for_hosts(store: Any, timeout: timedelta) -> bool:
    """Wait until every rank has called `write_host`; False if some have not in time."""
    try:
        store.wait([_ALL_HOSTS], timeout)
    except RuntimeError:
        return bool(store.check([_ALL_HOSTS]))
    return True


def _find_absent_hosts(store: Any, world_size: int, phase: str) -> list[int]:
    """The ranks that have not called `write_host`, for the first rank that asks in a phase; none for the others: one
    message, not one from each."""
    is_first = store.add(f"{_HOST_COUNT}/{phase}", 1) == 1
    return _find_absent(store, _HOST, list(range(world_size))) if is_first else []


def report_failure(store: Any, rank: int, why: str) -> None:
    """Write into the store why a rank fails, before it ends."""
    store.set(_FAILED, f"rank {rank} failed: {why}")


def find_lost_ranks(store: Any, rank: int, world_size: int, *, wait_s: float) -> LostRanks:
    """After a collective failed: the message of the rank that failed, or the ranks that have ended, are stopped or
    hang: those that do not call this, too, within `wait_s` seconds.

    Rank 0 searches, or the first other rank if rank 0 does not call this. All others return at once: the connections
    that a rank closes when it ends tell its neighbours, which may wait for it alone. So the number of requests grows
    with the number of ranks, not with its square.
    """
    results: list[LostRanks] = []

    def search() -> None:
        """Write that this rank is alive, wait for the others, and add to `results` which of them are lost."""
        # A rank may search twice (a failure during its end), but is counted once.
        if not store.check([f"{_ALIVE}{rank}"]):
            store.set(f"{_ALIVE}{rank}", "")
            store.add(_ALIVE_COUNT, 1)
        if rank != 0 and not _searches_for_rank_0(store):
            failure = store.get(_FAILED).decode() if store.check([_FAILED]) else None
            results.append(LostRanks(failure, is_asked=False))
            return
        deadline = time.monotonic() + wait_s
        while store.add(_ALIVE_COUNT, 0) < world_size and time.monotonic() < deadline:
            if store.check([_FAILED]):
                break
            time.sleep(_POLL_S)
        if store.check([_FAILED]):
            results.append(LostRanks(store.get(_FAILED).decode()))
            return
        absent = _find_absent(store, _ALIVE, list(range(world_size)))
        ranks = [f"rank {lost} ({store.get(f'{_HOST}{lost}').decode()})" for lost in absent[:_MOST_NAMED]]
        more = [f"{len(absent) - _MOST_NAMED} more"] if len(absent) > _MOST_NAMED else []
        results.append(LostRanks(absent=(*ranks, *more)))

    def try_search() -> None:
        """Search, as long as the store answers."""
        # A RuntimeError means that the process that holds the store has ended.
        with suppress(RuntimeError):
            search()

    # In a thread with a time limit: a store whose process is stopped never answers, and torch's call cannot be stopped.
    thread = threading.Thread(target=try_search, name="missing-ranks", daemon=True)
    thread.start()
    thread.join(2 * wait_s)
    return results[0] if results else LostRanks(store_answers=False)


def _searches_for_rank_0(store: Any) -> bool:
    """Whether this rank searches in place of rank 0: it is the first of the others, and rank 0 does not soon."""
    if store.add(_ASKING, 1) != 1:
        return False
    deadline = time.monotonic() + _RANK_0_ANSWERS_IN_S
    while time.monotonic() < deadline:
        if store.check([f"{_ALIVE}0"]):
            return False
        time.sleep(_POLL_S)
    return True


def _find_absent(store: Any, prefix: str, ranks: list[int]) -> list[int]:
    """The ranks that have no key in the store, by bisection: few requests if few are absent."""
    if not ranks or store.check([f"{prefix}{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return ranks
    half = len(ranks) // 2
    return _find_absent(store, prefix, ranks[:half]) + _find_absent(store, prefix, ranks[half:])
