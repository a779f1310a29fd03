"""Worker processes of torch's DataLoader: they ignore signals for the parent, and end with it.

`Workers` answers a sequence of requests in order. `WorkerProcesses` starts and ends the processes, and reports one
that died; a DataLoader of the user uses it too.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from trainer_cli.errors import TrainError

TIMEOUT_S = 600.0
"""The default limit of a wait for a batch."""
GRACE_S = 1.0
"""The time a worker has to end before it is killed."""
LOADERS_GRACE_S = 5.0
"""The time that the workers of a DataLoader of another class have, as torch gives them."""

_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_WATCH_S = 0.1
_SHARED_MEMORY = ("shared memory", "</torch_")
"""What torch's errors of a file in /dev/shm have in their text."""
_SHARED_MEMORY_CURE = "Use fewer workers, or none (data.num_workers=0), or enlarge /dev/shm (docker run --shm-size=8g)."


class WorkerError(TrainError):
    """A worker died, or returned no batch in time. Checkpoints are intact."""


class WorkerProcesses:
    """The processes of one loader. They end with `end`, with this object, or with the interpreter."""

    def __init__(self) -> None:
        self._closing: Any = multiprocessing.get_context().RawValue(ctypes.c_bool, False)
        self._processes: list[BaseProcess] = []
        self._end = partial(_end, os.getpid(), self._processes, self._closing)
        weakref.finalize(self, self._end).atexit = False
        _owners.add(self)
        _end_all_at_exit()

    @contextmanager
    def starting(self) -> Generator[None, None, None]:
        """Register the processes that start inside. They start with the parent's signals blocked.

        Removes torch's handler of SIGCHLD, which raises an error anywhere in the main thread, also inside a save;
        torch's iterator checks its workers itself, every five seconds of a wait.
        """
        earlier = set(multiprocessing.active_children())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            with _same_child_handler():
                yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            new = set(multiprocessing.active_children()) - earlier
            self._processes += sorted(new, key=lambda process: process.pid or 0)

    def init_fn(self, own: Callable[[int], None] | None = None) -> Callable[[int], None]:
        """The `worker_init_fn` of a DataLoader; the user's `own` is called, too."""
        return partial(_begin, self._closing, own)

    def died(self) -> bool:
        """Whether one of them has ended."""
        return any(not process.is_alive() for process in self._processes)

    def explained(self, error: Exception) -> Exception:
        """A WorkerError with the worker that died and its cause, or that shared memory is full, or the error itself."""
        if isinstance(error, OSError | EOFError):
            # From a connection that a dying worker has closed, or from the dataset.
            dying = wait([process.sentinel for process in self._processes], timeout=GRACE_S)
            for process in self._processes:
                process.join(GRACE_S if process.sentinel in dying else 0)
        for number, process in enumerate(self._processes):
            if process.exitcode:
                return _death(number, process)
        text = str(error)
        if os.strerror(errno.ENOSPC) in text and any(sign in text for sign in _SHARED_MEMORY):
            return WorkerError("shared memory is full", where="data", cure=_SHARED_MEMORY_CURE)
        return error

    def ask_to_end(self) -> None:
        """Make processes with `init_fn` exit at once."""
        self._closing.value = True

    def kill(self) -> None:
        """Kill them. A wait for a batch raises within seconds."""
        for process in self._processes:
            process.kill()

    def end(self, shut_down: Callable[[], None] | None = None) -> None:
        """Wait until they have ended; kill them after a second.

        Args:
            shut_down: ends processes without `init_fn`, in the way of their loader. Those that are left are killed
                after five seconds.
        """
        with _without_child_handler():
            try:
                if shut_down is not None:
                    killer = threading.Timer(LOADERS_GRACE_S, self.kill)
                    killer.daemon = True
                    killer.start()
                    try:
                        shut_down()
                    finally:
                        killer.cancel()
            finally:
                self._end()
                self._closing.value = False


@contextmanager
def _same_child_handler() -> Generator[None, None, None]:
    """Restore the handler of SIGCHLD at the end. Only the main thread can."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


@contextmanager
def _without_child_handler() -> Generator[None, None, None]:
    """No handler of SIGCHLD meanwhile: torch's, which other loaders install, raises for a worker that is killed."""
    with _same_child_handler():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield


class Source(Protocol):
    """Makes whole batches; each worker gets a copy."""

    dataset: Any

    def fetch(self, request: Any, /) -> Any:
        """The answer to a request."""
        ...


class Workers:
    """Worker processes, each with a copy of `source`, that fetch requests ahead of their use.

    Request k of a pass goes to worker k modulo `count`.

    Args:
        seed: of the random generators with which each worker starts.
        persistent: keep the processes between passes.
        timeout_s: limit of the wait for an answer. Not given: ten minutes.
        pin_memory: bring tensors into page-locked memory.
    """

    def __init__(
        self, source: Source, count: int, *, seed: int, persistent: bool, timeout_s: float | None, pin_memory: bool
    ) -> None:
        self.source = source
        self.count = count
        self.seed = seed
        self.persistent = persistent
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self.pin_memory = pin_memory
        self._kept: _Pool | None = None

    def answers(self, requests: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The answer to each request, in order. A second pass at the same time gets other processes.

        Raises:
            WorkerError: a worker died, or no answer came for `timeout_s` seconds.
            Exception: the error of the dataset, with the worker and the traceback in its text.
        """
        if self._kept is not None and self._kept.died():
            self.close()
        pool, self._kept = self._kept or _Pool(self), None
        usable = False
        try:
            yield from pool.answers(requests)
            usable = True
        except GeneratorExit:
            usable = True  # the pass was left early
            raise
        finally:
            # The generator may refer to the owner of these workers and keep it alive.
            requests.close()
            if usable and self.persistent and self._kept is None:
                self._kept = pool
            else:
                pool.end()

    def close(self) -> None:
        """End those that are kept. A later pass starts new ones."""
        pool, self._kept = self._kept, None
        if pool is not None:
            pool.end()


class _Pool:
    """A DataLoader whose sampler yields the requests of one pass after the other."""

    def __init__(self, workers: Workers) -> None:
        self._processes = WorkerProcesses()
        self._requests = _Requests()
        self._iterator: Any = None
        self._limit = _TimeLimit(self._processes, workers.timeout_s)
        dataset: Any = _Fetched(workers.source)
        self._loader: Any = DataLoader(
            dataset,
            batch_size=None,
            sampler=self._requests,
            num_workers=workers.count,
            collate_fn=unchanged,
            pin_memory=workers.pin_memory,
            worker_init_fn=self._processes.init_fn(),
            generator=torch.Generator().manual_seed(workers.seed),
            persistent_workers=True,
        )

    def answers(self, requests: Iterator[Any]) -> Generator[Any, None, None]:
        self._requests.of_this_pass = requests
        self._iterator = None
        while True:
            try:
                with self._limit:
                    if self._iterator is None:
                        with self._processes.starting():
                            self._iterator = iter(self._loader)
                    answer = next(self._iterator)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                explained = self._limit.error() or self._processes.explained(error)
                if explained is error:
                    raise
                raise explained from error
            yield answer

    def died(self) -> bool:
        return self._processes.died()

    def end(self) -> None:
        self._limit.end()
        self._processes.ask_to_end()
        self._loader = self._iterator = None
        self._processes.end()


class _TimeLimit:
    """Kills the workers if a batch is waited for too long, by a thread.

    DataLoader's own `timeout` has no effect on a worker that stops while it sends a tensor.
    """

    def __init__(self, processes: WorkerProcesses, timeout_s: float) -> None:
        self._processes, self._timeout_s = processes, timeout_s
        self._since = float("inf")
        self._is_over = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()
        if self._thread is None:
            arguments = (weakref.ref(self), self._ended, min(1.0, self._timeout_s / 4))
            self._thread = threading.Thread(target=_watch, args=arguments, name="data worker timeout", daemon=True)
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._since = float("inf")

    def error(self) -> WorkerError | None:
        """The error to raise if the limit was exceeded, or None."""
        if not self._is_over:
            return None
        return WorkerError(
            f"no batch came from the data workers for {self._timeout_s:g} s",
            where="data.worker_timeout",
            cure="Raise data.worker_timeout if a batch may take that long.",
        )

    def end(self) -> None:
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(GRACE_S)

    def look(self) -> None:
        """Kill the workers if the limit is exceeded. torch's iterator detects one that died itself."""
        exceeded = time.monotonic() - self._since >= self._timeout_s
        if exceeded and not self._is_over and not self._processes.died():
            self._is_over = True
            self._processes.kill()


def _watch(limit: weakref.ref[_TimeLimit], ended: threading.Event, interval_s: float) -> None:
    """The thread of a time limit. It holds only a weak reference, so that the workers can end with their owner."""
    while not ended.wait(interval_s):
        if (existing := limit()) is None:
            return
        existing.look()
        del existing


class _Fetched:
    """The dataset of a DataLoader whose samples are requests."""

    def __init__(self, source: Source) -> None:
        self.dataset = source.dataset
        self._source = source

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._source.fetch(request)
        except StopIteration as error:
            raise RuntimeError("the dataset raised StopIteration, which DataLoader takes for its end") from error


class _Requests:
    """The sampler of a DataLoader that is kept for several passes."""

    of_this_pass: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.of_this_pass


def unchanged(batch: Any) -> Any:
    """The `collate_fn` of a dataset that makes whole batches."""
    return batch


def pinned(batch: Any) -> Any:
    """The batch in page-locked memory, for asynchronous copies to a GPU."""
    single: Any = [batch]
    loader: Any = DataLoader(
        single, batch_size=None, collate_fn=unchanged, pin_memory=True, generator=torch.Generator()
    )
    return next(iter(loader))


def _begin(closing: Any, own: Callable[[int], None] | None, number: int) -> None:
    """Set up a worker: signals to the whole process group are for the parent, which finishes its step and saves."""
    for one in _PARENTS_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    threading.Thread(target=_exit_in_time, args=(closing, os.getppid()), daemon=True).start()
    if own is not None:
        own(number)


def _exit_in_time(closing: Any, parents_pid: int) -> None:
    """Exit on request, or when the parent is gone, also while the dataset is busy."""
    parent = multiprocessing.parent_process()
    while os.getppid() == parents_pid and parent is not None and parent.is_alive() and not closing.value:
        time.sleep(_WATCH_S)
    os._exit(0)


def _death(number: int, process: BaseProcess) -> WorkerError:
    code = process.exitcode or 0
    if code > 0:
        how, cure = f"ended with exit code {code}", "Look above for its last output."
    else:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"was killed by {name}"
        cure = {
            -signal.SIGKILL: "Most likely the machine ran out of memory: use fewer workers (data.num_workers).",
            -signal.SIGBUS: f"Most likely shared memory is full. {_SHARED_MEMORY_CURE}",
        }.get(code, "data.num_workers=0 loads in the training's own process, for a debugger.")
    return WorkerError(f"data worker {number} (pid {process.pid}) {how}", where="data", cure=cure)


def _end(owner: int, processes: list[BaseProcess], closing: Any) -> None:
    """End the processes, unless this is one of them, or another child with a copy of the list."""
    if os.getpid() != owner:
        return
    closing.value = True
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(GRACE_S)
    processes.clear()


_owners: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()


@cache
def _end_all_at_exit() -> None:
    """At exit, multiprocessing sends its processes SIGTERM, which these ignore, and waits for them without a limit."""

    def end_all() -> None:
        for owner in list(_owners):
            owner.end()

    # Handlers run in reverse order: before multiprocessing's own, which was registered when it was imported.
    atexit.register(end_all)
