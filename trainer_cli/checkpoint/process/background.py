"""Work done by a thread behind the training, which lives little longer than there is some."""

from __future__ import annotations

import threading
import time
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
        self._name = name
        self._lingers_s = lingers_s
        self._waiting: deque[Work] = deque()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()

    def submit(self, work: Work) -> None:
        with self._news:
            self._waiting.append(work)
            # In a forked child it is dead.
            if self._thread is not None and self._thread.is_alive():
                self._idle.clear()
                self._news.notify()
                return
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The system gives no more threads.
                here = self._waiting.pop()
            else:
                self._thread = thread
                self._idle.clear()
                return
        here()

    def settle(self, timeout_s: float | None = None) -> bool:
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
        """Nothing is held: the thread ends by itself."""

    def _work(self) -> None:
        # Whoever submits goes on first: a thread that begins keeps the interpreter for milliseconds.
        time.sleep(_YIELD_S)
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:
                with self._news:
                    self._end()
                raise
            del work

    def _next(self) -> Work | None:
        """The next piece, or None where this thread is wanted no more."""
        this = threading.current_thread()
        with self._news:
            lingered = not self._waiting
            if lingered:
                self._idle.set()
                self._news.wait_for(lambda: self._waiting or self._thread is not this, self._lingers_s)
            if self._thread is not this:
                return None
            if not self._waiting:
                self._end()
                return None
            work = self._waiting.popleft()
        if lingered:
            time.sleep(_YIELD_S)  # as at the beginning
        return work

    def _end(self) -> None:
        self._thread = None
        self._idle.set()
