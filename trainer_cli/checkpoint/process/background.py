"""Work done by a thread behind the training, which lives only as long as there is some."""

from __future__ import annotations

import threading
import time
from collections import deque

from trainer_cli.checkpoint.process.port import Carrier, Work

_YIELD_S = 0.0005


class Background:
    """One piece after the other, in a thread that `submit` starts and that ends when nothing is left. Where no thread
    can be had, a piece is done here and now.

    Between two pieces there is no thread, so that a data worker is seldom forked beside one.
    """

    @property
    def carrier(self) -> Carrier | None:
        """None: the thread writes."""
        return None

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[Work] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()

    def submit(self, work: Work) -> None:
        with self._lock:
            self._waiting.append(work)
            if self._thread is not None:
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
        thread = self._thread
        if thread is None:
            return True
        # Where a signal's handler raises in it, a thread's own `join` takes the thread for ended, now and ever after.
        if not self._idle.wait(timeout_s):
            return False
        thread.join()
        return True

    def close(self) -> None:
        """Nothing is held: the thread is gone with its last piece."""

    def _work(self) -> None:
        # Whoever submits goes on first: a thread that begins keeps the interpreter for milliseconds.
        time.sleep(_YIELD_S)
        while True:
            with self._lock:
                if not self._waiting:
                    self._end()
                    return
                work = self._waiting.popleft()
            try:
                work()
            except BaseException:
                with self._lock:
                    self._end()
                raise

    def _end(self) -> None:
        self._thread = None
        self._idle.set()
