"""Work done by a thread behind the training, which lives little longer than there is some."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque

from trainer_cli.checkpoint.process.port import Carrier, Work

_YIELD_S = 0.0005


class Background:
    """One piece after the other, in a thread that `submit` starts. Where no thread can be had, a piece is done here and
    now.

    Once nothing is left the thread ends, so that a data worker is seldom forked beside one that is at work.

    Args:
        lingers_s: so long the thread waits for more before it ends: to wake one takes far less time than to start one.
    """

    @property
    def carrier(self) -> Carrier | None:
        """None: the thread writes."""
        return None

    def __init__(self, name: str, *, lingers_s: float = 0.0) -> None:
        self._queue = _Queue(name, lingers_s)
        # The thread knows only the queue: a checkpointer that nobody holds goes at once, with its memory and process.
        weakref.finalize(self, self._queue.close).atexit = False

    def submit(self, work: Work) -> None:
        if not self._queue.put(work):
            work()

    def settle(self, timeout_s: float | None = None) -> bool:
        return self._queue.settle(timeout_s)

    def close(self) -> None:
        """Nothing is held: the thread ends by itself."""


class _Queue:
    """Pieces that wait, and the thread that does them."""

    def __init__(self, name: str, lingers_s: float) -> None:
        self._name = name
        self._lingers_s = lingers_s
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._waiting: deque[Work] = deque()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._idle = threading.Event()
        self._idle.set()

    def _own(self) -> threading.Condition:
        """What guards all of it. In a forked child nothing is as it was: what waits is its parent's, and a thread that
        is not there may have held the lock."""
        if self._pid != os.getpid():
            self._begin()
        return self._news

    def put(self, work: Work) -> bool:
        """Have a piece done, after those before it; False where the system gives no thread."""
        with self._own():
            was_idle = self._idle.is_set()
            self._waiting.append(work)
            try:
                if self._is_seen():
                    return True
            except BaseException:
                # Broken off by a signal's handler: whoever hands it over takes it for not done.
                self._waiting.remove(work)
                if was_idle:
                    self._idle.set()
                raise
            self._waiting.pop()
        return False

    def _is_seen(self) -> bool:
        """Whether a thread, that is started if need be, comes for what waits."""
        if self._thread is not None:
            self._idle.clear()
            self._news.notify()
            return True
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        # One that is not noted here ends by itself.
        self._thread = thread
        self._idle.clear()
        return True

    def settle(self, timeout_s: float | None) -> bool:
        """Wait until all is done, and its thread gone."""
        self._own()
        # Where a signal's handler raises in it, a thread's own `join` takes the thread for ended, now and ever after.
        if not self._idle.wait(timeout_s):
            return False
        with self._news:
            if not self._idle.is_set():
                return True  # somebody has more to do, of which this wait knows nothing
            thread, self._thread = self._thread, None
            self._news.notify()
        if thread is not None:
            thread.join()
        return True

    def close(self) -> None:
        """Linger no more: nothing will come."""
        with self._own():
            self._closed = True
            self._news.notify()

    def _work(self) -> None:
        # Whoever submits goes on first: a thread that begins keeps the interpreter for milliseconds.
        time.sleep(_YIELD_S)
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:
                with self._news:
                    self._thread = None
                    # Another thread does the rest, where one can be had.
                    if not (self._waiting and self._is_seen()):
                        self._idle.set()
                raise
            del work

    def _next(self) -> Work | None:
        """The next piece, or None where this thread is wanted no more."""
        this = threading.current_thread()
        with self._news:
            lingered = not self._waiting
            if lingered and self._thread is this:
                self._idle.set()
                self._news.wait_for(lambda: self._waiting or self._closed or self._thread is not this, self._lingers_s)
            if self._thread is not this:
                return None
            if not self._waiting:
                self._thread = None
                self._idle.set()
                return None
            work = self._waiting.popleft()
        if lingered:
            time.sleep(_YIELD_S)  # as at the beginning
        return work
