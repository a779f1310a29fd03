"""Run workers of torch's DataLoader, which ignore signals meant for the parent, and end with it.

`Workers` answers a sequence of requests in order. `WorkerProcesses` starts and ends the processes, and reports a dead
one. It is also used for DataLoaders of the user.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import multiprocessing
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from typing import Any, Protocol

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import DataLoader

from trainer_cli.errors import TrainError, UserError

TIMEOUT_S = 600.0
"""Default limit of the wait for a batch."""
GRACE_S = 1.0
"""Time that a worker has to exit before it is killed."""
LOADERS_GRACE_S = 5.0
"""Time that workers of a subclass of DataLoader have to exit, as in torch."""

_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
_WATCH_S = 0.1
_LONGEST_FOLDERS = {
    "file_descriptor": 107 - len("/listener-01234567"),
    # Torch makes its socket not in this folder, but in another one beside it.
    "file_system": 107 - len("torch-shm-dir-012345/manager.sock") + len("pymp-01234567"),
}
"""Torch's strategy of sharing tensors -> maximum number of bytes of the path of multiprocessing's folder for temporary
files. Linux limits the path of a socket to 107."""
_SHARED_MEMORY = ("shared memory", "</torch_")
"""Texts by which errors of torch about a file in /dev/shm are recognized."""
_SHARED_MEMORY_CURE = "Use fewer workers, or none (data.num_workers=0), or enlarge /dev/shm (docker run --shm-size=8g)."


class WorkerError(TrainError):
    """A worker died, or returned no batch in time. Checkpoints are intact."""


class WorkerProcesses:
    """The worker processes of a loader. They end with `end`, with this object, or with the interpreter."""

    def __init__(self) -> None:
        # Without a lock: a worker that is killed while it holds one would block the others.
        self._closing: Any = multiprocessing.get_context().RawValue(ctypes.c_bool, False)
        self._processes: list[BaseProcess] = []
        self._end = partial(_end, os.getpid(), self._processes, self._closing)
        # Not at exit, where finalizers run too late: `_end_all_at_exit` does it then.
        weakref.finalize(self, self._end).atexit = False
        _owners.add(self)
        _end_all_at_exit()

    @contextmanager
    def starting(self, context: Any = None) -> Generator[None, None, None]:
        """Register the processes that start inside the block. They start with the parent's signals blocked.

        Args:
            context: of multiprocessing, by which they start; None: the default.

        Torch's handler of SIGCHLD is removed, because it raises an error anywhere in the main thread, even inside a
        save. Torch's iterator also checks its workers itself, every five seconds of a wait.
        """
        earlier_processes = set(multiprocessing.active_children())
        # Inherited by the workers, so that no signal reaches them before they ignore it.
        signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            with _own_folder_of_sockets(), _own_fork_server(), _same_child_handler(), _naming_shared_memory():
                if (context or multiprocessing.get_context()).get_start_method() != "fork":
                    # Its start unblocks SIGINT and SIGTERM: not only when the workers need it.
                    resource_tracker.ensure_running()
                    signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
                yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
            new_processes = set(multiprocessing.active_children()) - earlier_processes
            # By pid, which usually rises in the order of their start, so that number k is torch's worker k.
            self._processes += sorted(new_processes, key=lambda process: process.pid or 0)

    def init_fn(self, user_init_fn: Callable[[int], None] | None = None) -> Callable[[int], None]:
        """Make the `worker_init_fn` of a DataLoader, which also calls that of the user."""
        return partial(_begin, self._closing, user_init_fn)

    def died(self) -> bool:
        """Whether a process has ended."""
        return any(not process.is_alive() for process in self._processes)

    def explained(self, error: Exception) -> Exception:
        """A WorkerError that names the dead worker and the cause, or full shared memory; otherwise the error itself."""
        if isinstance(error, OSError | EOFError):
            # From a connection that a dying worker has closed, or from the dataset. A dying one ends within the grace.
            dying = wait([process.sentinel for process in self._processes], timeout=GRACE_S)
            for process in self._processes:
                process.join(GRACE_S if process.sentinel in dying else 0)
        for number, process in enumerate(self._processes):
            if process.exitcode:
                return _death(number, process)
        text = str(error)
        if os.strerror(errno.ENOSPC) in text and any(sign in text for sign in _SHARED_MEMORY):
            return _shared_memory_full()
        return error

    def ask_to_end(self) -> None:
        """Make processes with `init_fn` exit soon."""
        self._closing.value = True

    def kill(self) -> None:
        """Kill the processes. A wait for a batch then raises within seconds."""
        for process in self._processes:
            process.kill()

    def end(self, shut_down: Callable[[], None] | None = None) -> None:
        """Wait until the processes have ended, and kill them after a second.

        Args:
            shut_down: ends processes without `init_fn`, in the way of their loader. They are killed after five seconds.
        """
        with _without_child_handler():
            try:
                if shut_down is not None:
                    killer = threading.Timer(LOADERS_GRACE_S, self.kill)
                    # It must not keep the interpreter alive.
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
def _own_folder_of_sockets() -> Generator[None, None, None]:
    """Give processes that start inside the block a folder for the sockets by which they send tensors.

    This process removes it at its exit, or its workers if it was killed. Each worker would otherwise make one of its
    own, which stays if it is killed. Other child processes do not inherit it: they may outlive this process.

    Raises:
        UserError: its path is too long for a socket. A worker would send no batch, and report nothing.
    """
    # multiprocessing's own note of the folder, which a child process copies from its parent.
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = config.pop("tempdir", None)
    try:
        config["tempdir"] = folder = _make_folder(os.getpid())
        if len(os.fsencode(folder)) > _LONGEST_FOLDERS[get_sharing_strategy()]:  # type: ignore[no-untyped-call]
            raise UserError(
                f"the path of the folder for temporary files is too long for sockets of data workers: {folder}",
                where="TMPDIR",
                cure="Set the environment variable TMPDIR to a shorter path, such as /tmp, or use data.num_workers=0.",
            )
        # A cleaner of old files may have removed it.
        os.makedirs(folder, mode=0o700, exist_ok=True)
        yield
    finally:
        config["tempdir"] = before


@contextmanager
def _own_fork_server() -> Generator[None, None, None]:
    """Start processes inside the block from a fork server of our own, if the start method is `forkserver`.

    It is started with signals blocked. A server that other code has started would die of them, and all its processes
    with it. Processes of other code, which multiprocessing ends by SIGTERM, are not forked from ours.
    """
    before = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _make_fork_server().connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before


@cache
def _make_fork_server() -> Any:
    """Make the fork server of data workers, with the modules that are preloaded in others. Not started yet."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(list(forkserver._forkserver._preload_modules))  # type: ignore[attr-defined]
    return server


@cache
def _make_folder(pid: int) -> str:
    """Make multiprocessing's temporary folder of this process. Cached by `pid`, because a fork needs another one."""
    return str(get_temp_dir())


@contextmanager
def _same_child_handler() -> Generator[None, None, None]:
    """Restore the handler of SIGCHLD after the block. Only the main thread can set it."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


@contextmanager
def _without_child_handler() -> Generator[None, None, None]:
    """Remove the handler of SIGCHLD inside the block: torch's raises an error for a worker that is killed."""
    with _same_child_handler():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield


class BatchSource(Protocol):
    """Makes whole batches. Each worker has a copy."""

    dataset: Any

    def fetch(self, request: Any, /) -> Any:
        """Answer a request."""
        ...


class Workers:
    """Worker processes, each with a copy of `source`, that fetch requests ahead of their use.

    Request k of a pass goes to worker k modulo `count`.

    Args:
        seed: seed of the random generators of the workers.
        persistent: keep the processes between passes.
        timeout_s: limit of the wait for an answer; None: ten minutes.
        pin_memory: copy tensors to page-locked memory.
    """

    def __init__(
        self, source: BatchSource, count: int, *, seed: int, persistent: bool, timeout_s: float | None, pin_memory: bool
    ) -> None:
        self.source = source
        self.count = count
        self.seed = seed
        self.persistent = persistent
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self.pin_memory = pin_memory
        self._kept: _Pool | None = None

    def answers(self, requests: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield the answer to each request, in order. A second pass at the same time has other processes.

        Raises:
            WorkerError: a worker died, or no answer came for `timeout_s` seconds.
            Exception: an error of the dataset, with the worker and the traceback in its text.
        """
        if self._kept is not None and self._kept.died():
            self.close()
        # Taken out during the pass, so that a second pass at the same time gets other workers.
        pool, self._kept = self._kept or _Pool(self), None
        usable = False
        try:
            yield from pool.answers(requests)
            usable = True
        except GeneratorExit:
            # The pass was left early, but the workers are intact.
            usable = True
            raise
        finally:
            # The generator may refer to the owner of these workers and keep it alive.
            requests.close()
            if usable and self.persistent and self._kept is None:
                self._kept = pool
            else:
                pool.end()

    def close(self) -> None:
        """End the persistent workers. A later pass starts new ones."""
        pool, self._kept = self._kept, None
        if pool is not None:
            pool.end()


class _Pool:
    """A DataLoader whose sampler yields the requests of pass after pass."""

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
            # Without it DataLoader would draw the workers' seed from the training's generator.
            generator=torch.Generator().manual_seed(workers.seed),
            # So that the pool ends the workers, and not torch at the end of a pass.
            persistent_workers=True,
        )

    def answers(self, requests: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield the answer to each request, in order; see `Workers.answers`."""
        self._requests.current = requests
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
        """Whether a process has ended."""
        return self._processes.died()

    def end(self) -> None:
        """End the processes, and the thread of the time limit."""
        self._limit.end()
        self._processes.ask_to_end()
        # Dropped before the wait, because torch's iterator then closes its queues, at which a worker may hang.
        self._loader = self._iterator = None
        self._processes.end()


class _TimeLimit:
    """Kill the workers from a thread if the wait for a batch is too long.

    DataLoader's `timeout` has no effect on a worker that stops while it sends a tensor.
    """

    def __init__(self, processes: WorkerProcesses, timeout_s: float) -> None:
        self._processes, self._timeout_s = processes, timeout_s
        self._since = float("inf")
        self._is_over = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        """Begin to wait for a batch; the thread that watches the time starts with the first wait."""
        self._since = time.monotonic()
        if self._thread is None:
            arguments = (weakref.ref(self), self._ended, min(1.0, self._timeout_s / 4))
            self._thread = threading.Thread(target=_watch, args=arguments, name="data worker timeout", daemon=True)
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._since = float("inf")

    def error(self) -> WorkerError | None:
        """The error to raise if the limit was exceeded; otherwise None."""
        if not self._is_over:
            return None
        return WorkerError(
            f"no batch came from the data workers for {self._timeout_s:g} s",
            where="data.worker_timeout",
            cure="Raise data.worker_timeout if a batch may take that long.",
        )

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(GRACE_S)

    def check(self) -> None:
        """Kill the workers if the limit is exceeded. A worker that has died is reported by torch's iterator."""
        is_exceeded = time.monotonic() - self._since >= self._timeout_s
        if is_exceeded and not self._is_over and not self._processes.died():
            self._is_over = True
            self._processes.kill()


def _watch(limit: weakref.ref[_TimeLimit], ended: threading.Event, interval_s: float) -> None:
    """Check a time limit at intervals, as its thread. The weak reference lets the workers end with their owner."""
    while not ended.wait(interval_s):
        if (existing := limit()) is None:
            return
        existing.check()
        # The local name would keep the limit alive during the next wait.
        del existing


class _Fetched:
    """The dataset of a DataLoader whose samples are requests."""

    def __init__(self, source: BatchSource) -> None:
        self.dataset = source.dataset
        self._source = source

    def __getitem__(self, request: Any) -> Any:
        try:
            return self._source.fetch(request)
        except StopIteration as error:
            raise RuntimeError("the dataset raised StopIteration, which DataLoader takes for its end") from error


class _Requests:
    """Sampler of a DataLoader that is used for more than one pass."""

    current: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.current


def unchanged(batch: Any) -> Any:
    """The `collate_fn` of a dataset that makes whole batches."""
    return batch


def pinned(batch: Any) -> Any:
    """Copy a batch to page-locked memory, for asynchronous copies to a GPU."""
    # By a DataLoader, which knows the containers of a batch. Its generator keeps that of the training unchanged.
    single: Any = [batch]
    loader: Any = DataLoader(
        single, batch_size=None, collate_fn=unchanged, pin_memory=True, generator=torch.Generator()
    )
    return next(iter(loader))


def _begin(closing: Any, user_init_fn: Callable[[int], None] | None, number: int) -> None:
    """Set up a worker. Signals to the process group are for the parent, which finishes its step and saves."""
    for parents_signal in _PARENTS_SIGNALS:
        signal.signal(parents_signal, signal.SIG_IGN)
    # Only after they are ignored: those that came meanwhile are delivered now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    # A thread, because the main thread of a worker may be busy in the dataset.
    threading.Thread(target=_exit_in_time, args=(closing, os.getppid()), daemon=True).start()
    if user_init_fn is not None:
        user_init_fn(number)


def _exit_in_time(closing: Any, parents_pid: int) -> None:
    """Exit on request or when the parent has ended, even while the dataset is busy."""
    parent = multiprocessing.parent_process()
    while os.getppid() == parents_pid and parent is not None and parent.is_alive() and not closing.value:
        time.sleep(_WATCH_S)
    if not closing.value:
        # The parent was killed, and cannot remove its folder, which no other process uses.
        shutil.rmtree(get_temp_dir(), ignore_errors=True)
    # Not sys.exit, which would end this thread alone.
    os._exit(0)


@contextmanager
def _naming_shared_memory() -> Generator[None, None, None]:
    """Raise a WorkerError where the locks of queues find no space in shared memory: their OSError names no file, and
    would be taken for that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            raise _shared_memory_full() from error
        raise


def _shared_memory_full() -> WorkerError:
    """The error for full shared memory."""
    return WorkerError("shared memory is full", where="data", cure=_SHARED_MEMORY_CURE)


def _death(number: int, process: BaseProcess) -> WorkerError:
    """The error for a worker that has died."""
    code = process.exitcode or 0
    if code > 0:
        how, cure = f"ended with exit code {code}", "Look above for its last output."
    else:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"was killed by {name}"
        cure = {
            -signal.SIGKILL: "Most likely the machine ran out of memory: use fewer workers (data.num_workers).",
            -signal.SIGBUS: f"Most likely shared memory is full. {_SHARED_MEMORY_CURE}",
        }.get(code, "data.num_workers=0 loads in the main process, for a debugger.")
    return WorkerError(f"data worker {number} (pid {process.pid}) {how}", where="data", cure=cure)


def _end(owner: int, processes: list[BaseProcess], closing: Any) -> None:
    """End the processes. Does nothing in a forked child, which has a copy of the list."""
    if os.getpid() != owner:
        return
    closing.value = True
    # One deadline for all, so that the time does not grow with the number of workers.
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
    """Register a handler that ends all workers at exit.

    multiprocessing would send them SIGTERM, which they ignore, and wait for them without a limit.
    """

    def end_all() -> None:
        """End the workers of every loader of this process."""
        for owner in list(_owners):
            owner.end()

    # Handlers run in reverse order: before multiprocessing's own, which was registered when it was imported.
    atexit.register(end_all)
