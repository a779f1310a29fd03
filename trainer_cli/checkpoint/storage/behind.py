"""Work on one block of memory after another, behind whoever has the blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class Behind:
    """One kind of work, in the order in which blocks are handed over, in a thread that is gone when this is closed.

    Where the system gives no more threads, it is done here and now. After a block that failed, none is worked on.
    """

    def __init__(self, name: str, work: Callable[[memoryview], object]) -> None:
        self._work = work
        self._blocks: SimpleQueue[tuple[memoryview, Future[None]] | None] = SimpleQueue()
        self._last: Future[None] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        # A daemon: a disk that hangs holds up no exit.
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # Should it be there all the same, it ends at once.
            self._blocks.put(None)
        else:
            self._thread = thread

    def hand_over(self, block: memoryview) -> None:
        """Have a block worked on, which stays as it is until `wait` returns. Raises what an earlier one failed with."""
        if self._thread is None:
            self._work(block)
            return
        if self._last is not None and self._last.done():
            self._last.result()
        self._last = Future()
        self._blocks.put((block, self._last))

    def wait(self) -> None:
        """Return once all is done that was handed over. Raises what failed first."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait for the block that is being worked on; those after it are let go."""
        self._closed = True
        if self._thread is not None:
            self._blocks.put(None)
            self._thread.join()

    def _run(self) -> None:
        failure: BaseException | None = None
        while (handed_over := self._blocks.get()) is not None:
            block, done = handed_over
            if failure is None and not self._closed:
                try:
                    self._work(block)
                except BaseException as error:
                    failure = error
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)
