"""Work on one piece after another in a thread, behind whoever has the pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

Piece = TypeVar("Piece")


class WorkerThread(Generic[Piece]):
    """One kind of work, in the order in which pieces are handed over. It is gone when this is closed.

    Where the system gives no more threads, the work is done here and now. After a piece that failed, none is worked on,
    and whoever comes is told of that failure.
    """

    def __init__(self, name: str, work: Callable[[Piece], object]) -> None:
        self._work = work
        self._pieces: SimpleQueue[tuple[Piece, Future[None]] | None] = SimpleQueue()
        self._last: Future[None] | None = None
        self._last_but_one: Future[None] | None = None
        self._failure: BaseException | None = None
        self._ends = False
        self._thread: threading.Thread | None = None
        # A daemon: work that hangs, as on a dead disk, holds up no exit.
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except BaseException as error:
            # Should it be there all the same, it ends at once.
            self._pieces.put(None)
            if not isinstance(error, RuntimeError):
                raise
        else:
            self._thread = thread

    def hand_over(self, piece: Piece) -> None:
        """Have a piece worked on; memory that it stands for stays as it is until `wait` returns. Raises what failed."""
        self.tell()
        if self._thread is None:
            self._carry_out(piece)
            self.tell()
        else:
            self._last_but_one, self._last = self._last, Future()
            self._pieces.put((piece, self._last))

    def wait(self) -> None:
        """Return once all is done that was handed over by now; from any thread. Raises what failed, and CancelledError
        where it was let go."""
        wait_for_all([self])

    def let_go(self) -> None:
        """Work on no further piece."""
        self._ends = True
        self._pieces.put(None)

    def close(self) -> None:
        """Let go, and wait for the piece that is being worked on, however long that takes: its memory is not free."""
        self.let_go()
        if self._thread is not None:
            self._thread.join()

    def piece(self, *, but_last: bool = False) -> Future[None] | None:
        """The last piece that was handed over, or the one before it."""
        return self._last_but_one if but_last else self._last

    def tell(self) -> None:
        """Raise what failed."""
        if self._failure is not None:
            raise self._failure

    def _carry_out(self, piece: Piece) -> None:
        try:
            self._work(piece)
        except BaseException as error:
            self._failure = error

    def _run(self) -> None:
        while (handed_over := self._pieces.get()) is not None:
            piece, done = handed_over
            if self._ends:
                done.cancel()
                continue
            if self._failure is None:
                self._carry_out(piece)
            done.set_result(None)
            # Nothing of it is kept until the next one comes.
            del piece, done, handed_over


def wait_for_all(
    threads: Collection[WorkerThread[Any]], *, but_last: bool = False, timeout_s: float | None = None
) -> None:
    """Return once several have done all that was handed over to them by now, or all but the last piece of each.

    Raises:
        CancelledError: one was let go.
        TimeoutError: without a number, as it takes longer than it may.
        Exception: what failed first in one of them; none is at work on such a piece any more.
    """
    deadline = None if timeout_s is None else monotonic() + timeout_s
    for piece in [thread.piece(but_last=but_last) for thread in threads]:
        if piece is not None:
            piece.result(None if deadline is None else max(deadline - monotonic(), 0.0))
    for thread in threads:
        thread.tell()


def close_all(threads: Collection[WorkerThread[Any]]) -> None:
    """Close several: none begins another piece while one of them is waited for."""
    for thread in threads:
        thread.let_go()
    for thread in threads:
        thread.close()
