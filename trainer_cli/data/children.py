"""Child processes that load data: signals for the parent do not reach them, and they end by force if need be."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 1.0


@contextmanager
def born_here() -> Generator[list[Any], None, None]:
    """Collects the worker processes that start within; the parent's signals are held back from them meanwhile.

    What is left of them at exit ends by force.
    """
    earlier = set(multiprocessing.active_children())
    workers: list[Any] = []
    with blocked_signals(*PARENTS_SIGNALS):
        yield workers
    workers += [child for child in multiprocessing.active_children() if child not in earlier]
    _born.update(workers)
    _watch_the_exit()


class Keeper(Protocol):
    """Whoever keeps workers."""

    def end(self) -> None:
        """End them."""
        ...


def end_at_exit(keeper: Keeper) -> None:
    """Have its workers end when the interpreter goes, unless it is gone by then."""
    _keepers.add(keeper)
    _watch_the_exit()


_born: weakref.WeakSet[Any] = weakref.WeakSet()
_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()


@cache
def _watch_the_exit() -> None:
    """End all that is left before multiprocessing does, which came first and so comes last: it would wait for the
    workers for ever, since they do not hear SIGTERM."""

    def end_all() -> None:
        for keeper in list(_keepers):
            keeper.end()
        for worker in list(_born):
            with suppress(RuntimeError):  # torch's own handler, where one that was waited for is killed
                end_by_force([worker])

    atexit.register(end_all)


def end_by_force(workers: Sequence[Any]) -> None:
    """Wait a little for workers to end, then kill them: those that hold SIGTERM back end by nothing less."""
    deadline = time.monotonic() + GRACE_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join(GRACE_S)


@contextmanager
def blocked_signals(*signals: signal.Signals) -> Generator[None, None, None]:
    """Hold signals back, so that a child born meanwhile does not get them before it is ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
