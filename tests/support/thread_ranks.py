"""Ranks as threads of this process, which exchange objects as the processes of a group do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from trainer_cli.parallel.process_group import ProcessGroup

T = TypeVar("T")
_LONGEST_S = 30.0


class _Shared:
    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.values: list[Any] = [None] * world_size


class ThreadGroup(ProcessGroup):
    """One rank of several threads."""

    def __init__(self, rank: int, world_size: int, shared: _Shared) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, rank
        self._shared = shared
        self.is_dead: Callable[[], bool] = lambda: False

    def gather(self, value: T) -> list[T]:
        if self.is_dead():
            self._shared.barrier.abort()
        self._shared.values[self.rank] = value
        self._shared.barrier.wait(_LONGEST_S)
        values = list(self._shared.values)
        self._shared.barrier.wait(_LONGEST_S)
        return values

    def broadcast(self, value: T) -> T:
        return self.gather(value)[0]

    def barrier(self) -> None:
        self.gather(None)

    def leave(self) -> None:
        """Let calls that wait for this rank fail."""
        self._shared.barrier.abort()


def on_ranks(world_size: int, act: Callable[[ThreadGroup], T]) -> list[T | Exception]:
    """What each rank returns or raises."""
    shared = _Shared(world_size)

    def run(rank: int) -> T | Exception:
        group = ThreadGroup(rank, world_size, shared)
        try:
            return act(group)
        except Exception as error:
            if not isinstance(error, threading.BrokenBarrierError):
                cast("Any", group).error = error
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
