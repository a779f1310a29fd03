"""A second place for committed checkpoints: a thread makes it equal, one checkpoint after another.

    checkpoint.folder=s3://…     from the local disk to a store: each checkpoint, until retention removes it
    checkpoint.copy_to           from there to a folder or a store: each k-th, which is held until it is there

In both places a checkpoint exists if its manifest does, and the manifest is written last.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from trainer_cli.errors import StoreAwayError, as_clause
from trainer_cli.layout import MANIFEST_FILE
from trainer_cli.manifest import Manifest
from trainer_cli.storage import Storage

if TYPE_CHECKING:
    from trainer_cli.addons.stores.object_folders import ObjectFolders

logger = logging.getLogger(__name__)


class _Waiting:
    """A checkpoint in the queue.

    Args:
        hold: ends when it leaves the queue.
        is_amended: only its manifest has changed: it is not sent where it was not.
        gives_way: whether a newer one may take its place; never once it was begun.
    """

    def __init__(self, hold: ExitStack, *, is_amended: bool, gives_way: bool) -> None:
        self.hold, self.is_amended, self.gives_way = hold, is_amended, gives_way


class Mirror:
    """Sends checkpoints from a storage to a place, oldest first.

    One that fails stays in the queue; `add` of the next one and `retry` send it again.

    Args:
        on_sent: called with a name, the manifest that the place has from now on, and whether it had none of these
            files before.
        on_failed: called with a name and an error, once until it is sent.
        prepare: called before each checkpoint is sent.
    """

    def __init__(
        self,
        source: Storage,
        place: Storage | ObjectFolders,
        *,
        on_sent: Callable[[str, bytes, bool], object],
        on_failed: Callable[[str, BaseException], object] | None = None,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.source, self.place = source, place
        self._on_sent, self._on_failed, self._prepare = on_sent, on_failed or self.warn, prepare
        # A dict, because it keeps the order of the commits: older checkpoints are sent first.
        self._queue: dict[str, _Waiting] = {}
        self._changed = threading.Condition()
        self._running = False
        self._failed: set[str] = set()
        self._locked: set[str] = set()
        """Checkpoints that are being sent, removed or changed."""

    def add(
        self, name: str, hold: ExitStack | None = None, *, is_amended: bool = False, gives_way: bool = False
    ) -> list[str]:
        """Queue a checkpoint, also one that is being sent, whose manifest may have changed since; see `_Waiting`.

        Returns:
            those that have given way to it.
        """
        with self._changed:
            others = [other for other, waiting in self._queue.items() if gives_way and waiting.gives_way]
            for other in others:
                self.drop(other)
            last = self._queue.get(name)
            # One that waits, and is amended, is still to be sent whole.
            if last is not None and is_amended:
                hold, is_amended, gives_way = last.hold, last.is_amended, last.gives_way
            elif last is not None:
                last.hold.close()
            self._queue[name] = _Waiting(hold or ExitStack(), is_amended=is_amended, gives_way=gives_way)
            self._start()
        return [other for other in others if other != name]

    def drop(self, name: str) -> None:
        """Take a checkpoint out of the queue."""
        with self._changed:
            waiting = self._queue.pop(name, None)
            self._failed.discard(name)
        if waiting is not None:
            waiting.hold.close()

    def retry(self) -> None:
        """Send every queued checkpoint again."""
        with self._changed:
            if self._queue:
                self._start()

    def waiting(self) -> list[str]:
        """The checkpoints that have not been sent yet."""
        return list(self._queue)

    def wait(self, timeout_s: float | None = None) -> list[str]:
        """Wait until each was sent or has failed; returns those that were not sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout_s)
            return list(self._queue)

    def close(self, timeout_s: float) -> bool:
        """Send what can be sent within this time, and let the others go. False if one is still being sent."""
        for name in self.wait(timeout_s):
            self.drop(name)
        return not self._running

    @contextmanager
    def locking(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Keep other threads from sending, removing or changing a checkpoint.

        Yields False, without a lock, if another thread does so and `wait` is False.
        """
        with self._changed:
            if name in self._locked and not wait:
                yield False
                return
            self._changed.wait_for(lambda: name not in self._locked)
            self._locked.add(name)
        try:
            yield True
        finally:
            with self._changed:
                self._locked.discard(name)
                self._changed.notify_all()

    def warn(self, name: str, error: BaseException) -> None:
        """Report one that is not sent yet."""
        logger.warning(
            "%s is not in the store yet: %s; its local copy stays, and is sent again later",
            self.place.location(name),
            as_clause(error),
        )

    def _start(self) -> None:
        if not self._running:
            # A daemon: a store that hangs must not keep the process alive. `wait` is where a run waits, with a limit.
            thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)
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
                name = next((name for name in self._queue if name not in tried), None)
                if name is None:
                    # Under the lock, so that a name added now starts a new thread.
                    self._running = False
                    self._changed.notify_all()
                    return
                waiting = self._queue[name]
                waiting.gives_way = False
            # Once per run of the thread: a checkpoint that fails again and again must not hold up the others.
            tried.add(name)
            try:
                with self.locking(name):
                    self._send(name, waiting)
            # Of any kind, and reported here: `wait` waits for this thread, and no caller for its result.
            except BaseException as error:
                # Each of the other checkpoints would wait for the same time-out.
                failed = dict(self._queue) if isinstance(error, StoreAwayError) else {name: waiting}
                tried.update(failed)
                for each in failed.values():
                    each.gives_way = False
                    # Its name is enough from now on: many may fail, and each hold takes a descriptor.
                    each.hold.close()
                # Once for each checkpoint, not once for each attempt.
                if name not in self._failed:
                    self._failed.add(name)
                    self._report(name, error)
            else:
                with self._changed:
                    if self._queue.get(name) is waiting:
                        self.drop(name)
                    else:
                        # It was amended, or saved again, while it was sent.
                        tried.discard(name)

    def _report(self, name: str, error: BaseException) -> None:
        """Call `on_failed`, whose own failure must not end the thread: `wait` would wait for ever."""
        try:
            self._on_failed(name, error)
        except BaseException as second:
            logger.warning("after the failure of %s: %s", self.place.location(name), as_clause(second))

    def _send(self, name: str, waiting: _Waiting) -> None:
        """Make the checkpoint in the place equal to that in the storage."""
        self._prepare()
        if self._queue.get(name) is not waiting:
            return  # It was removed meanwhile.
        manifest, sent = self.source.peek(name, MANIFEST_FILE), self.place.peek(name, MANIFEST_FILE)
        if manifest is None or (sent is None and waiting.is_amended):
            return
        if sent == manifest or (sent is not None and self._is_amended(name, manifest, sent)):
            self._on_sent(name, manifest, False)
            return
        # Locked, and its digests compared on the way: a damaged checkpoint is never whole in the place.
        with self.source.reading(name) as folder:
            self.place.receive(name, manifest, folder)
        self._on_sent(name, manifest, True)

    def _is_amended(self, name: str, manifest: bytes, sent: bytes) -> bool:
        """Replace the manifest of a checkpoint that has the same files. Otherwise it is removed, and False.

        Raises:
            FileExistsError: it is not this run's, or a later attempt's.
        """
        own, there = Manifest.parse(manifest), Manifest.parse(sent)
        if there.run_id != own.run_id:
            why = "a checkpoint of another run exists there"
            raise FileExistsError(errno.EEXIST, why, self.place.location(name))
        if there.files == own.files and there.attempt <= own.attempt:
            self.place.amend(name, manifest)
            return True
        # Programs that name no run and no attempt are not known to be the same.
        if there.attempt >= own.attempt:
            why = "another checkpoint of that name exists there"
            raise FileExistsError(errno.EEXIST, why, self.place.location(name))
        # Of a branch that the run has left.
        if not self.place.remove(name):
            raise OSError(errno.EBUSY, "an older copy is being read", self.place.location(name))
        return False
