"""Copies into a state's memory, large ones in shares, so that a training that waits for them waits less.

Memory takes more than one processor gives it, and finding new memory takes processors: two threads take half as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_cli.checkpoint.threads import WorkerThread, close_all

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.memory import Memory

_LARGE_BYTES = 1 << 20
"""What is smaller one thread copies alone: handing it over would take as long."""
_GRAIN_BYTES = 4096
"""Shares begin at multiples of that."""
_MOST_THREADS = 4
"""So many fill what memory can take."""

_Share = tuple[int, int, int]
"""Where it is, how large, and where in the memory it goes."""


class Copying:
    """Copies that may still be under way until `wait` returns; as a context, its threads are gone at its end.

    Args:
        threads: at most how many share a copy, the caller's included.
    """

    def __init__(self, memory: Memory, threads: int) -> None:
        self._memory = memory
        self._most = min(threads, _MOST_THREADS) - 1
        """Threads beside the caller's."""
        self._threads: list[WorkerThread[_Share]] = []

    def copy(self, source: int, size_bytes: int, offset: int) -> None:
        """Copy what lies at an address, and stays there until `wait` returns."""
        share = size_bytes
        if size_bytes >= _LARGE_BYTES and self._most > 0:
            while len(self._threads) < self._most:
                self._threads.append(WorkerThread("checkpoint-copy", self._carry_out))
            grains = -(-size_bytes // _GRAIN_BYTES)
            share = -(-grains // (self._most + 1)) * _GRAIN_BYTES
            for start, thread in zip(range(share, size_bytes, share), self._threads, strict=False):
                thread.hand_over((source + start, min(share, size_bytes - start), offset + start))
        self._memory.copy(source, share, offset)

    def wait(self) -> None:
        """Return once every copy is made."""
        for thread in self._threads:
            thread.wait()

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, *_: object) -> None:
        close_all(self._threads)

    def _carry_out(self, share: _Share) -> None:
        self._memory.copy(*share)
