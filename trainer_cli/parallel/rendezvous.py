"""How ranks find one another: a store that rank 0 holds, or torchrun's agent."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from trainer_cli.errors import UserError
from trainer_cli.parallel.lost import introduce, late
from trainer_cli.parallel.peers import LostRankError, PeerError
from trainer_cli.parallel.ranks import Ranks

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
