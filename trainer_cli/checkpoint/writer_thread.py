"""The thread that writes checkpoints and deletes removed ones, one job after another."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue

logger = logging.getLogger(__name__)

Job = Callable[[], object]
_Jobs = SimpleQueue["tuple[Job, Future[None]] | None"]


class WriterThread:
    """Runs jobs in the order of `submit`. A job that fails ends neither the thread nor the jobs after it.

    The thread starts with the first job. It is a daemon, so that a disk that hangs cannot hold up the end of the
    process; its owner calls `close`. A forked child has no such thread, and jobs submitted there run at once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._jobs: _Jobs = SimpleQueue()
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> Future[None]:
        """Run a job after those before it; the future holds what it raised. Runs it now if no thread can be started."""
        if self._ensure_running():
            done: Future[None] = Future()
            self._jobs.put((job, done))
            return done
        return run_now(job)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every job is done; False if that took longer than `timeout_s` seconds."""
        if self._thread is None or self._pid != os.getpid():
            return True
        # A job behind all others, rather than the last one's future: an interrupt may have kept that from its caller.
        return bool(wait([self.submit(_no_job)], timeout_s).done)

    def close(self, timeout_s: float | None = None) -> bool:
        """End the thread after its jobs; False if that took longer than `timeout_s` seconds."""
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return True
        # A job that submits another meanwhile runs it at once: what comes after the end marker is never read.
        self._closing = True
        try:
            self._jobs.put(None)
            thread.join(timeout_s)
        finally:
            self._thread, self._jobs, self._closing = None, SimpleQueue(), False
        return not thread.is_alive()

    def _ensure_running(self) -> bool:
        """Start the thread if it is not running. False in a fork, while `close` waits, and if no thread can start."""
        if self._closing or self._pid != os.getpid():
            return False
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
            else:
                # It holds the queue alone: an owner that is dropped without `close` still ends it.
                weakref.finalize(self, self._jobs.put, None).atexit = False
        return self._thread is not None


def run_now(job: Job) -> Future[None]:
    """Run a job in this thread; the future holds its exception. An interrupt is raised as well."""
    done: Future[None] = Future()
    _run(job, done)
    error = done.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return done


def report_failure(where: str, written: Future[None]) -> None:
    """Log the failure of a save that no caller waits for."""
    if (error := written.exception()) is not None:
        logger.error("the checkpoint %s was not saved: %s", where, error)


def _work(jobs: _Jobs) -> None:
    """Run jobs until the end marker, None."""
    while (item := jobs.get()) is not None:
        _run(*item)
        # Not kept until the next job: it holds the state that it wrote.
        del item


def _no_job() -> None:
    """Ends when all jobs before it have."""


def _run(job: Job, done: Future[None]) -> None:
    """Run a job, and set its exception or its end in the future."""
    try:
        job()
    # Of any kind: the thread must live for the jobs after this one.
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)
