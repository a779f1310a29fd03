"""Worker processes that load batches: they outlive no parent, heed no signal meant for it, and always end."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_GRACE_S = 1.0
_WATCH_S = 0.25


def worker_batches(
    source: Any, keys: Iterable[Any], *, num_workers: int, pin_memory: bool, seed: int
) -> Generator[Any, None, None]:
    """`source[key]` for each key in order, computed ahead in worker processes.

    The workers start with the first batch and end with the last one, or when the generator is closed. They
    ignore SIGINT, SIGTERM and SIGUSR1: these are for the parent, which finishes its step and saves. The
    random state of this process is not touched.
    """
    closing = multiprocessing.get_context().RawValue(ctypes.c_bool, False)
    loader: DataLoader[Any] = DataLoader(
        source,
        batch_size=None,
        sampler=keys,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        worker_init_fn=partial(_start_worker, closing),
        generator=torch.Generator().manual_seed(seed),
    )
    with born_here() as workers:
        iterator = iter(loader)
    end = partial(_end, workers, closing)
    atexit.register(end)  # before multiprocessing's own, which would wait for ever: they ignore SIGTERM
    try:
        yield from iterator
    finally:
        if not closing.value:  # else the interpreter is going, and has ended them already
            try:
                _shut_down(iterator, closing)
            finally:
                end()
                atexit.unregister(end)


@contextmanager
def born_here() -> Generator[list[Any], None, None]:
    """Collects the worker processes that start within; the parent's signals are held back from them meanwhile."""
    earlier = set(multiprocessing.active_children())
    workers: list[Any] = []
    with blocked_signals(*_PARENTS_SIGNALS):
        yield workers
    workers += [child for child in multiprocessing.active_children() if child not in earlier]


def end_by_force(workers: Sequence[Any]) -> None:
    """Wait a little for workers to end, then kill them: those that hold SIGTERM back end by nothing less."""
    deadline = time.monotonic() + _GRACE_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join(_GRACE_S)


@contextmanager
def blocked_signals(*signals: signal.Signals) -> Generator[None, None, None]:
    """Hold signals back, so that a child born meanwhile does not get them before it is ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _shut_down(iterator: Any, closing: Any) -> None:
    """End the workers as torch does, which lets each finish its batch; one that takes long must drop it.

    Told at once, it might leave half a message in the queue on which torch's pinning thread still waits.
    """
    impatience = threading.Timer(_GRACE_S, _set, (closing,))
    impatience.daemon = True
    impatience.start()
    iterator._shutdown_workers()
    impatience.cancel()


def _end(workers: Sequence[Any], closing: Any) -> None:
    """End what is still alive: by request, then by force."""
    _set(closing)
    end_by_force(workers)


def _set(flag: Any) -> None:
    flag.value = True


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(closing: Any, worker: int) -> None:
    for number in _PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    threading.Thread(target=_leave_in_time, args=(closing,), daemon=True).start()


def _leave_in_time(closing: Any) -> None:
    """Leave, whatever the dataset is doing, when told to or when the parent, killed, can tell nobody.

    Another parent's id shows its death at once, unless it died before this thread began; its pipe shows that
    too, but only when no process that it started later holds a copy of it.
    """
    above = os.getppid()
    parent = multiprocessing.parent_process()
    while os.getppid() == above and parent is not None and parent.is_alive() and not closing.value:
        time.sleep(_WATCH_S)
    os._exit(0)
