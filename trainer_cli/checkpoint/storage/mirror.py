"""A second place for checkpoints: those committed in one storage are sent to it by a thread.

    checkpoint.folder=s3://…     ObjectStorage: each checkpoint of the local disk is sent to the store
    checkpoint.copy_to.folder    callbacks/copier: every k-th of a run is sent to a second folder, local or in a store

    add -> queue ─ the thread ─> manifests compared -> files, each compared with its digest -> manifest, if none exists
                              └> a failure: it waits for the next checkpoint, the end, or the next start

Nothing is recorded of what was sent: manifests are compared. A process that is killed at any point leaves a whole
checkpoint, or what the next sweep of the same run deletes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from trainer_cli.checkpoint.storage.base import Storage
from trainer_cli.checkpoint.writer_thread import WriterThread
from trainer_cli.core.naming import MANIFEST_FILE
from trainer_cli.errors import StoreAwayError, as_clause

logger = logging.getLogger(__name__)


class Mirror:
    """Sends checkpoints of a storage in a thread of its own, one at a time, the oldest first.

    Args:
        send: makes the second place's checkpoint of a name equal to that of `source`.
        location: returns where a checkpoint is sent to, for messages.
        on_failure: called from the thread; returns whether the checkpoint waits, to be sent again.
    """

    def __init__(
        self,
        source: Storage,
        send: Callable[[str], object],
        location: Callable[[str], str],
        on_failure: Callable[[str, BaseException], bool] = lambda name, error: True,
    ) -> None:
        self._source, self._send, self._location, self._on_failure = source, send, location, on_failure
        self._thread = WriterThread("checkpoint-mirror")
        self._lock = threading.Lock()
        # A dict, because it keeps the order of the commits.
        self._waiting: dict[str, bool] = {}
        """Checkpoints to be sent, and whether each is held."""
        self._failed: dict[str, bool] = {}
        """Those that have failed in this pass of the thread."""
        self._sending = ""
        self._is_scheduled = False
        self._reported: set[str] = set()

    def add(self, name: str, *, hold: bool = False) -> None:
        """Queue a checkpoint.

        Args:
            hold: whether `holds` it until it is sent or fails. One that is held and not begun gives way to the next, so
                that a slow target does not fill the local disk. One that is not held is left out if it is removed.
        """
        with self._lock:
            late = [other for other, held in self._waiting.items() if held and hold and other != name]
            for other in late:
                del self._waiting[other]
            self._waiting[name] = hold or self._waiting.get(name, False)
        for other in late:
            logger.warning("%s is not copied: %s is due before an earlier copy has ended", other, name)
        self._schedule()

    def holds(self, name: str) -> bool:
        """Whether a checkpoint must not be removed yet."""
        with self._lock:
            return name == self._sending or self._waiting.get(name, False)

    def waiting(self) -> list[str]:
        """The checkpoints that are still to be sent."""
        with self._lock:
            return [name for name in {self._sending: True, **self._failed, **self._waiting} if name]

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until each was sent or has failed; False if that took longer than `timeout_s` seconds."""
        return self._thread.drain(timeout_s)

    def finish(self, timeout_s: float | None = None) -> list[str]:
        """Send again what waits; returns what is not in the target after that, or after `timeout_s` seconds."""
        if self.waiting():
            self._schedule()
        self.drain(timeout_s)
        return [name for name in self.waiting() if self._source.peek(name, MANIFEST_FILE) is not None]

    def close(self, timeout_s: float) -> bool:
        """End the thread. False if a checkpoint is still being sent after `timeout_s` seconds."""
        ended = self._thread.close(timeout_s)
        if not ended:
            with self._lock:
                self._is_scheduled = False  # What is added later begins a thread of its own.
        return ended

    def _schedule(self) -> None:
        with self._lock:
            scheduled, self._is_scheduled = self._is_scheduled, True
        # A pass that runs sends also what is added meanwhile: each pass may take as long as a time-out.
        if not scheduled:
            self._thread.submit(self._send_waiting)

    def _send_waiting(self) -> None:
        """Send what waits, each once: one that fails again and again must not delay the others."""
        is_away = False
        while True:
            with self._lock:
                if is_away:
                    # Each would wait for the same time-out. None is held meanwhile, or the local disk would fill.
                    self._failed.update(dict.fromkeys(self._waiting, False))
                    self._waiting = {}
                name = self._sending = next(iter(self._waiting), "")
                if not name:
                    # Under the lock, so that what is added now begins another pass.
                    self._waiting, self._failed, self._is_scheduled = self._failed, {}, False
                    return
                # It may be added again while it is sent.
                del self._waiting[name]
            try:
                if self._source.peek(name, MANIFEST_FILE) is None:
                    logger.info("%s was removed before it was sent", self._source.location(name))
                else:
                    self._send(name)
                    self._reported.discard(name)
            # Of any kind, and reported here: no caller waits for this thread's result.
            except BaseException as error:
                is_away = isinstance(error, StoreAwayError)
                if self._report(name, error):
                    self._failed[name] = False

    def _report(self, name: str, error: BaseException) -> bool:
        """Report a failure; returns whether the checkpoint waits."""
        waits = self._on_failure(name, error)
        # One warning for each checkpoint, not one for each attempt.
        if waits and name not in self._reported:
            self._reported.add(name)
            where, why = self._location(name), as_clause(error)
            logger.warning("%s is not in the store yet: %s; its local copy stays, and is sent again later", where, why)
        return waits
