"""Send committed checkpoints from the local disk to an object store in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trainer_cli.errors import StoreAwayError, as_clause

logger = logging.getLogger(__name__)


class Uploader:
    """A thread that calls `send` for each queued checkpoint, oldest first.

    A checkpoint whose `send` fails stays in the queue; `add` of the next one and `retry` send it again.

    Args:
        send: sends one checkpoint; it returns once that is committed in the store.
        location: returns the URL of a checkpoint, for messages.
    """

    def __init__(self, send: Callable[[str], object], location: Callable[[str], str]) -> None:
        self._send, self._location = send, location
        # A dict, because it keeps the order of the commits: older checkpoints are sent first.
        self._waiting: dict[str, None] = {}
        self._changed = threading.Condition()
        self._running = False
        self._failed: set[str] = set()

    def add(self, name: str) -> None:
        """Queue a checkpoint."""
        with self._changed:
            self._waiting[name] = None
            self._start()

    def drop(self, name: str) -> None:
        """Take a checkpoint out of the queue."""
        with self._changed:
            self._waiting.pop(name, None)

    def retry(self) -> None:
        """Send every queued checkpoint again."""
        with self._changed:
            if self._waiting:
                self._start()

    def waiting(self) -> list[str]:
        """The checkpoints that are not in the store yet."""
        with self._changed:
            return list(self._waiting)

    def wait(self, timeout_s: float | None = None) -> list[str]:
        """Wait until each was sent or has failed; returns those that are not in the store."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout_s)
            return list(self._waiting)

    def _start(self) -> None:
        if not self._running:
            # A daemon: a store that hangs must not keep the process alive. `wait` is where a run waits, with a limit.
            thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("checkpoints are sent to the store later: %s", error)
            else:
                # The thread waits for the lock, so it cannot have ended yet.
                self._running = True

    def _run(self) -> None:
        tried: set[str] = set()
        while True:
            with self._changed:
                name = next((name for name in self._waiting if name not in tried), None)
                if name is None:
                    # Under the lock, so that a name added now starts a new thread.
                    self._running = False
                    self._changed.notify_all()
                    return
            # Once per run of the thread: a checkpoint that fails again and again must not hold up the others.
            tried.add(name)
            try:
                self._send(name)
            # Of any kind, and reported here: `wait` waits for this thread, and no caller for its result.
            except BaseException as error:
                if isinstance(error, StoreAwayError):
                    # Each of the other checkpoints would wait for the same time-out.
                    with self._changed:
                        tried.update(self._waiting)
                # One warning for each checkpoint, not one for each attempt.
                if name not in self._failed:
                    self._failed.add(name)
                    logger.warning(
                        "%s is not in the store yet: %s; its local copy stays, and is sent again later",
                        self._location(name),
                        as_clause(error),
                    )
            else:
                self._failed.discard(name)
                self.drop(name)


def run_in_parallel(calls: list[Callable[[], object]], max_threads: int) -> None:
    """Make the calls in threads. Raises the first exception once all calls that began have ended."""
    if not calls:
        return
    with ThreadPoolExecutor(min(max_threads, len(calls)), "checkpoint-transfer") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in futures:
                future.result()
        finally:
            # Calls that have not begun are pointless after an error; those in progress end before the files are closed.
            pool.shutdown(cancel_futures=True)
