"""A second place for committed checkpoints: a thread makes it equal, one checkpoint after another.

    checkpoint.folder=s3://…     from the local disk to a store: each checkpoint, until retention removes it
    checkpoint.copy_to           from there to a folder or a store: each k-th, which is held until it is there

In both places a checkpoint exists if its manifest does, and the manifest is written last.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from trainer_cli.errors import NO_SPACE, StoreAwayError, as_clause
from trainer_cli.layout import MANIFEST_FILE
from trainer_cli.manifest import FileEntry, Manifest
from trainer_cli.storage import ReadableFolder, Storage

if TYPE_CHECKING:
    from trainer_cli.addons.stores.object_folders import ObjectFolders

logger = logging.getLogger(__name__)

_OF_PLACE = (*NO_SPACE, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a place that the next checkpoint would meet too; EIO also of a store that is away."""
_OF_SOURCE = "while the checkpoint was read"
"""Note on an error that says nothing about the place or another checkpoint."""


@contextmanager
def _noting_source() -> Iterator[None]:
    """Note on an error of this block that the checkpoint could not be read."""
    try:
        yield
    except OSError as error:
        # A source that is a store is away for every checkpoint.
        if not isinstance(error, StoreAwayError):
            error.add_note(_OF_SOURCE)
        raise


class _SourceFile(NamedTuple):
    size_bytes: int
    read_at: Callable[[Sequence[memoryview], int], None]


class _Source:
    """The folder of a checkpoint that is being sent, whose reads end once that is abandoned."""

    def __init__(self, folder: ReadableFolder, mirror: Mirror) -> None:
        self.path, self.is_shared, self._folder, self._mirror = folder.path, folder.is_shared, folder, mirror

    @contextmanager
    def open(self, file: str) -> Iterator[_SourceFile]:
        # A local place is written outside of this block, and a store that fails raises StoreAwayError.
        with _noting_source(), self._folder.open(file) as opened:

            def read_at(buffers: Sequence[memoryview], offset: int) -> None:
                if self._mirror.is_abandoned:
                    raise InterruptedError(errno.EINTR, "it is abandoned")
                opened.read_at(buffers, offset)

            yield _SourceFile(opened.size_bytes, read_at)

    def on_verified(self, file: str, entry: FileEntry) -> None:
        """Nothing: no checkpoint is saved here."""


@dataclass(eq=False)
class _Waiting:
    """A checkpoint in the queue."""

    hold: ExitStack
    """Ends when it leaves the queue."""
    is_amended: bool
    """Only its manifest has changed: it is not sent where it was not."""
    gives_way: bool
    """Whether a newer one may take its place; never once it was begun."""


class Mirror:
    """Sends checkpoints from a storage to a place, oldest first.

    One that fails stays in the queue; `add` of the next one and `retry` send it again.

    Args:
        on_sent: called with a name, the manifest that the place has from now on, and whether it had none of these
            files before.
        on_failed: called with a name, an error, and whether the last error of this checkpoint was of another kind.
        prepare: called before each checkpoint is sent.

    Attributes:
        is_abandoned: while set, nothing is sent: what is under way ends before its next block, and stays in the queue.
    """

    def __init__(
        self,
        source: Storage,
        place: Storage | ObjectFolders,
        *,
        on_sent: Callable[[str, bytes, bool], object],
        on_failed: Callable[[str, BaseException, bool], object] | None = None,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.source, self.place = source, place
        self._on_sent, self._on_failed, self._prepare = on_sent, on_failed or self.warn, prepare
        # A dict, because it keeps the order of the commits: older checkpoints are sent first.
        self._queue: dict[str, _Waiting] = {}
        self._changed = threading.Condition()
        self._running = self.is_abandoned = False
        self._failed: dict[str, type[BaseException]] = {}
        """Kind of the last error of each checkpoint that has failed."""
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
            if last and not is_amended:
                last.hold.close()
                last = None
            # One that waits, and is amended, is still to be sent whole; as another object, since it may be being sent.
            self._queue[name] = replace(last or _Waiting(hold or ExitStack(), is_amended, gives_way))
            self._start()
        return [other for other in others if other != name]

    def drop(self, name: str) -> None:
        """Take a checkpoint out of the queue."""
        with self._changed:
            waiting = self._queue.pop(name, None)
            self._failed.pop(name, None)
        if waiting:
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
        """Send what can be sent within this time, and let the others go. False if one was still being sent."""
        for name in self.wait(timeout_s):
            self.drop(name)
        self.is_abandoned |= self._running
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

    def warn(self, name: str, error: BaseException, is_first: bool) -> None:
        """Report one that is not sent yet, once."""
        if is_first:
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
                if name is None or self.is_abandoned:
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
                if self.is_abandoned:
                    continue
                # Each of the other checkpoints would wait for the same time-out, or meet the same error.
                is_of_source = _OF_SOURCE in getattr(error, "__notes__", ())
                is_of_place = getattr(error, "errno", 0) in _OF_PLACE and not is_of_source
                failed = dict(self._queue) if is_of_place else {name: waiting}
                tried.update(failed)
                for each in failed.values():
                    each.gives_way = False
                    # Its name is enough from now on: many may fail, and each hold takes a descriptor.
                    each.hold.close()
                is_first = self._failed.get(name) is not type(error)
                self._failed[name] = type(error)
                try:
                    self._on_failed(name, error, is_first)
                # It must not end the thread: `wait` would wait for ever.
                except BaseException as second:
                    logger.warning("after the failure of %s: %s", self.place.location(name), as_clause(second))
            else:
                with self._changed:
                    # It may be added again at any time; if it was amended or saved again meanwhile, it still waits.
                    tried.discard(name)
                    if self._queue.get(name) is waiting:
                        self.drop(name)

    def _send(self, name: str, waiting: _Waiting) -> None:
        """Make the checkpoint in the place equal to that in the storage."""
        self._prepare()
        if self._queue.get(name) is not waiting:
            return  # It was removed meanwhile.
        with _noting_source():
            manifest = self.source.peek(name, MANIFEST_FILE)
        sent = self.place.peek(name, MANIFEST_FILE)
        if manifest is None or (sent is None and waiting.is_amended):
            return
        if sent == manifest or (sent is not None and self._is_amended(name, manifest, sent)):
            self._on_sent(name, manifest, False)
            return
        # Locked, and its digests compared on the way: a damaged checkpoint is never whole in the place.
        with ExitStack() as stack:
            with _noting_source():
                folder = stack.enter_context(self.source.reading(name))
            self.place.receive(name, manifest, _Source(folder, self))
        self._on_sent(name, manifest, True)

    def _is_amended(self, name: str, manifest: bytes, sent: bytes) -> bool:
        """Replace the manifest of a checkpoint that has the same files. Otherwise it is removed, and False.

        Raises:
            FileExistsError: it is not this run's, or a later attempt's.
        """
        own, there = Manifest.parse(manifest), Manifest.parse(sent)
        is_of_run = there.run_id == own.run_id
        if is_of_run and there.files == own.files and there.attempt <= own.attempt:
            self.place.amend(name, manifest)
            return True
        # Programs that name no run and no attempt are not known to be the same.
        if not is_of_run or there.attempt >= own.attempt:
            other = "another checkpoint of that name" if is_of_run else "a checkpoint of another run"
            raise FileExistsError(errno.EEXIST, f"{other} exists there", self.place.location(name))
        # Of a branch that the run has left.
        if not self.place.remove(name):
            raise OSError(errno.EBUSY, "an older copy is being read", self.place.location(name))
        return False
