"""Work on one piece after another, behind whoever has the pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

Piece = TypeVar("Piece")


class Behind(Generic[Piece]):
    """One kind of work, in the order in which pieces are handed over, in a thread that is gone when this is closed.

    Where the system gives no more threads, it is done here and now. After a piece that failed, none is worked on.
    """

    def __init__(self, name: str, work: Callable[[Piece], object]) -> None:
        self._work = work
        self._pieces: SimpleQueue[tuple[Piece, Future[None]] | None] = SimpleQueue()
        self._last: Future[None] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        # A daemon: a disk that hangs holds up no exit.
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # Should it be there all the same, it ends at once.
            self._pieces.put(None)
        else:
            self._thread = thread

    def hand_over(self, piece: Piece) -> None:
        """Have a piece worked on; memory that it stands for stays as it is until `wait` returns. Raises what an earlier
        one failed with."""
        if self._thread is None:
            self._work(piece)
            return
        if self._last is not None and self._last.done():
            self._last.result()
        self._last = Future()
        self._pieces.put((piece, self._last))

    def wait(self) -> None:
        """Return once all is done that was handed over. Raises what failed first."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait for the piece that is being worked on; those after it are let go."""
        self._closed = True
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()

    def _run(self) -> None:
        failure: BaseException | None = None
        while (handed_over := self._pieces.get()) is not None:
            piece, done = handed_over
            if failure is None and not self._closed:
                try:
                    self._work(piece)
                except BaseException as error:
                    failure = error
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)
