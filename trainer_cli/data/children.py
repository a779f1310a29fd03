"""Child processes that load data: signals for the parent do not reach them, and they end by force if need be."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 1.0


@contextmanager
def born_here() -> Generator[list[Any], None, None]:
    """Collects the worker processes that start within; the parent's signals are held back from them meanwhile."""
    earlier = set(multiprocessing.active_children())
    workers: list[Any] = []
    with blocked_signals(*PARENTS_SIGNALS):
        yield workers
    workers += [child for child in multiprocessing.active_children() if child not in earlier]


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
