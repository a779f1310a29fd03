"""Sends committed checkpoints from the local disk to an object store, behind the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trainer_cli.errors import StoreAwayError

logger = logging.getLogger(__name__)


class Uploader:
    """A thread that calls `send` for each name that is waiting, oldest first.

    A name whose `send` raises OSError keeps waiting: it is tried again with the next one that is added, and by `retry`.

    Args:
        send: sends one checkpoint; it returns once that is committed in the store.
        location: where a checkpoint goes, for messages.
    """

    def __init__(self, send: Callable[[str], object], location: Callable[[str], str]) -> None:
        self._send, self._location = send, location
        self._waiting: dict[str, None] = {}
        self._changed = threading.Condition()
        self._running = False
        self._failed: set[str] = set()

    def add(self, name: str) -> None:
        """Send this one too."""
        with self._changed:
            self._waiting[name] = None
            self._start()

    def drop(self, name: str) -> None:
        """Send this one no more."""
        with self._changed:
            self._waiting.pop(name, None)

    def retry(self) -> None:
        """Try again what waits."""
        with self._changed:
            if self._waiting:
                self._start()

    def waiting(self) -> list[str]:
        """What is not in the store yet."""
        with self._changed:
            return list(self._waiting)

    def wait(self, timeout_s: float | None = None) -> list[str]:
        """Wait until all was sent or has failed; what is not in the store then."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout_s)
            return list(self._waiting)

    def _start(self) -> None:
        if not self._running:
            self._running = True
            threading.Thread(target=self._run, name="checkpoint-upload", daemon=True).start()

    def _run(self) -> None:
        tried: set[str] = set()
        while True:
            with self._changed:
                name = next((one for one in self._waiting if one not in tried), None)
                if name is None:
                    self._running = False
                    self._changed.notify_all()
                    return
            tried.add(name)
            try:
                self._send(name)
            except Exception as error:  # Reported here: no caller waits for this thread's result.
                if isinstance(error, StoreAwayError):
                    # The others would wait as long for nothing.
                    with self._changed:
                        tried.update(self._waiting)
                if name not in self._failed:
                    self._failed.add(name)
                    logger.warning(
                        "%s is not in the store yet: %s; its local copy stays, and is sent again later",
                        self._location(name),
                        error,
                    )
            else:
                self._failed.discard(name)
                self.drop(name)


def in_parallel(calls: list[Callable[[], object]], most: int) -> None:
    """Make the calls, some at a time; the first exception, once all that began have ended."""
    if not calls:
        return
    with ThreadPoolExecutor(min(most, len(calls)), "checkpoint-transfer") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
