"""Worker processes that load batches: they outlive no parent, heed no signal meant for it, and always end.

    parent                                     worker 0, 1, …
    send(worker, request)      ──pipe──▶       source.fetch(request, at)
    receive(worker)            ◀──pipe──       the batch, or the error

Each worker has a pipe of its own and shares no lock, so one that dies at any moment, even while it writes,
harms no other. What it is loading stands in shared memory, so that the parent can name it afterwards. At most
a few requests wait in a pipe, each of some hundred bytes: sending one never blocks.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from trainer_cli.data.children import GRACE_S, PARENTS_SIGNALS, blocked_signals, end_at_exit, end_by_force
from trainer_cli.data.transport import receive
from trainer_cli.data.worker import NOWHERE, Failure, Source, work
from trainer_cli.errors import TrainError

AHEAD = 2
"""Requests that each worker has before it at most."""
TIMEOUT_S = 600.0
"""How long one sample may take unless the user says otherwise."""

_START_S = 60.0  # a worker that is not forked imports everything anew


class WorkerError(TrainError):
    """A worker died, or hangs. What was saved before is intact."""


class WorkerPool:
    """`count` processes, each with a copy of `source`, that answer requests in the order they were sent.

    They ignore SIGINT, SIGTERM and SIGUSR1: these are for the parent, which finishes its step and saves. They
    end with `end`, with the pool itself, or with the parent, whatever they are doing.
    """

    def __init__(self, source: Source, count: int, *, seed: int, timeout_s: float | None = None) -> None:
        self.source = source
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        context = multiprocessing.get_context()
        self._closing = context.RawValue(ctypes.c_bool, False)
        self._turn = context.RawValue(ctypes.c_int64, 0)
        # For each worker: how many things it has begun, and the place of the last one.
        self._progress = context.RawArray(ctypes.c_int64, [0, NOWHERE] * count)
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._waiting: list[deque[tuple[int, Any]]] = [deque() for _ in range(count)]
        end = partial(_end, os.getpid(), self._processes, self._pipes, self._closing)
        self._finalizer = weakref.finalize(self, end)
        self._finalizer.atexit = False
        end_at_exit(self)
        try:
            with blocked_signals(*PARENTS_SIGNALS):
                for number in range(count):
                    ours, theirs = context.Pipe()
                    shared = (self._closing, self._turn, self._progress)
                    process = context.Process(
                        target=work, args=(source, theirs, shared, number, count, seed), daemon=True
                    )
                    self._pipes.append(ours)
                    process.start()
                    self._processes.append(process)
                    theirs.close()
        except BaseException:
            self.end()
            raise

    @property
    def ended(self) -> bool:
        """True once it can answer no more."""
        return bool(self._closing.value)

    def begin_turn(self) -> None:
        """Drop what was asked for and not received: nobody waits for it."""
        self._turn.value += 1

    def send(self, worker: int, request: Any) -> None:
        """Ask a worker for something, behind what it was asked before."""
        self._waiting[worker].append((self._turn.value, request))
        try:
            self._pipes[worker].send(self._waiting[worker][-1])
        except OSError as error:
            raise self._death(worker, error) from None

    def receive(self, worker: int) -> Any:
        """The worker's answer to the earliest request of this turn that is not yet received.

        Raises:
            WorkerError: a worker died, or this one has shown no progress for `timeout_s` seconds.
            Exception: what `fetch` raised, with a note which worker it was.
        """
        while True:
            answer = self._answer(worker)
            turn, _ = self._waiting[worker].popleft()
            if turn == self._turn.value:
                break
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    def end(self) -> None:
        """End every worker: by request, after a second by force. Waits until they are gone."""
        self._finalizer()

    def _answer(self, worker: int) -> Any:
        pipe, sentinels = self._pipes[worker], [process.sentinel for process in self._processes]
        begun, since = self._progress[2 * worker], time.monotonic()
        while True:
            ready = wait([pipe, *sentinels], timeout=min(1.0, self.timeout_s))
            if pipe in ready:
                try:
                    return receive(pipe)
                except (EOFError, OSError) as error:
                    raise self._death(worker, error) from None
            dead = [number for number, process in enumerate(self._processes) if not process.is_alive()]
            if dead:
                raise self._death(dead[0])
            if self._progress[2 * worker] != begun:
                begun, since = self._progress[2 * worker], time.monotonic()
            elif time.monotonic() - since >= (self.timeout_s if begun else max(self.timeout_s, _START_S)):
                raise WorkerError(
                    f"data worker {worker} (pid {self._processes[worker].pid}) has been {self._doing(worker)} for "
                    f"{self.timeout_s:g} s",
                    where="data.worker_timeout",
                    cure="Raise data.worker_timeout if one sample may take that long.",
                )

    def _death(self, worker: int, error: Exception | None = None) -> WorkerError:
        """What became of a worker, or why its pipe failed although it lives."""
        process = self._processes[worker]
        process.join(GRACE_S)
        code = process.exitcode
        if code is None:
            return WorkerError(
                f"what data worker {worker} (pid {process.pid}) has loaded cannot be received: {error!r}",
                where="data",
                cure="Most likely too many files are open: raise `ulimit -n`, or collate into fewer tensors.",
            )
        how, cure = f"ended with exit code {code}", "Look above for what it said."
        if code < 0:
            how = f"was killed by {_signal_name(-code)}"
            cure = {
                -signal.SIGKILL: "Most likely the machine ran out of memory: use fewer workers (data.num_workers).",
                -signal.SIGBUS: "Most likely shared memory is full: enlarge /dev/shm or use fewer workers.",
            }.get(code, "data.num_workers=0 loads in the training's own process, for a debugger.")
        return WorkerError(
            f"data worker {worker} (pid {process.pid}) {how} while {self._doing(worker)}", where="data", cure=cure
        )

    def _doing(self, worker: int) -> str:
        if not self._waiting[worker]:
            return "waiting for work"
        place = self._progress[2 * worker + 1]
        return f"loading {self.source.tell(self._waiting[worker][0][1], None if place == NOWHERE else place)}"


class Workers:
    """The workers of one loader: started when first needed and, where they are persistent, kept for later."""

    def __init__(self, source: Source, count: int, *, seed: int, persistent: bool, timeout_s: float | None) -> None:
        self.source = source
        self.count = count
        self.seed = seed
        self.persistent = persistent
        self.timeout_s = timeout_s
        self._pool: WorkerPool | None = None

    @contextmanager
    def lent(self) -> Generator[WorkerPool, None, None]:
        """A pool for one pass, with nothing left to receive. A second pass meanwhile gets another pool."""
        pool, self._pool = self._pool, None
        if pool is None or pool.ended:
            pool = WorkerPool(self.source, self.count, seed=self.seed, timeout_s=self.timeout_s)
        usable = False
        try:
            pool.begin_turn()
            yield pool
            usable = True
        except GeneratorExit:
            usable = True  # the pass was left early
            raise
        finally:
            if usable and self.persistent and self._pool is None and not pool.ended:
                self._pool = pool
            else:
                pool.end()

    def close(self) -> None:
        """End those that are kept. A later pass starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.end()


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _end(owner: int, processes: Sequence[Any], pipes: Sequence[Any], closing: Any) -> None:
    """End the workers, unless this is one of them, or another child with a copy of the pool."""
    if os.getpid() != owner or closing.value:
        return
    closing.value = True
    for pipe in pipes:
        with suppress(OSError):
            pipe.send(None)  # wakes one that waits for work
    end_by_force(processes)
    for pipe in pipes:
        pipe.close()
