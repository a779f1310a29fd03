"""Copies committed checkpoints into a second folder, behind the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from trainer_cli.addons.stores.download import read_blocks, write_copy
from trainer_cli.callbacks import Retention
from trainer_cli.checkpoint import CheckpointMetadata, WriterThread
from trainer_cli.errors import SaveError, TrainError, disk_cure
from trainer_cli.layout import MANIFEST_FILE
from trainer_cli.loggers import SAVES
from trainer_cli.manifest import Manifest
from trainer_cli.schema import Newer
from trainer_cli.storage import ReadableFolder, Storage

log = logging.getLogger(__name__)

_ABANDON_S = 1.0
"""How long an interrupted training waits for a copy that is left unfinished."""


class Copier:
    """Copies every k-th committed checkpoint of a run in a thread of its own, and applies the rules of removal to the
    copies. A checkpoint is held against removal until it is copied.

    One checkpoint is copied at a time. If another is due meanwhile, it waits; if a third is, that one takes the place
    of the second, so that a slow store does not fill the local disk. Rank 0 copies.

    Args:
        source: the storage of the checkpoints.
        storage: that of the copies.
        folder: of the copies.
        every: copies each checkpoint whose number is a multiple of this.
        raises: whether a failure ends the training; else it is logged once, until a copy succeeds.
    """

    def __init__(
        self, source: Storage, storage: Storage, folder: Path, run_id: str, *, every: int, raises: bool
    ) -> None:
        self.source, self.storage, self.folder, self.every, self.raises = source, storage, folder, every, raises
        self.retention = Retention(folder, storage, run_id)
        self.on_failure: Callable[[], object] = lambda: None
        """Called from the copier's thread after a failure."""
        self._thread = WriterThread("checkpoint-copier")
        self._number = 0
        self._lock = threading.Lock()
        self._waiting: tuple[str, ExitStack] | None = None
        self._failure: SaveError | None = None
        self._reported = False
        self._begun_at = 0
        self._opened = False
        self._abandoned = False

    @property
    def next_number(self) -> int:
        """The number of the next checkpoint to be committed. That of step 0 has none, so that the copies are of round
        steps."""
        return self._number + 1

    def start(self, source_retention: Retention, step: int, newer: Newer) -> None:
        """Begin a training at this step, as `CheckpointerCallback` does in its own folder, and make up for a copy that
        an earlier attempt did not finish.

        Raises:
            UserError: there are newer copies, and they may not go.
            SaveError: as in `raise_failure`.
        """
        self.retention.rules, self._begun_at = source_retention.rules, step
        self._opened, self._abandoned, self._reported = False, False, False
        # Numbering continues from the resumed checkpoint, and from copies whose originals were removed.
        before = (entry for entry in source_retention.own() if entry.step <= step)
        self._number = max((_number(entry.manifest) for entry in before), default=0)
        try:
            self._open()
            self.retention.leave_branch(step, newer)
            self._number = max([self._number, *(_number(entry.manifest) for entry in self.retention.own())])
        except OSError as error:
            self._failure = self._failed(self.folder, error)
            self.raise_failure()
        for entry in source_retention.catalog.newest_first(source_retention.run_id):
            number = _number(entry.manifest)
            if entry.valid and entry.step <= step and number and number % self.every == 0:
                self.copy(entry.name)
                break

    def on_committed(self, name: str, metadata: CheckpointMetadata) -> None:
        """Copy this checkpoint if it is due; called in the thread that committed it, before any removal."""
        if metadata.number is not None:
            self._number = metadata.number
            if metadata.number % self.every == 0:
                self.copy(name)

    def copy(self, name: str) -> None:
        """Copy a checkpoint, or make an older copy of it equal; nothing if it is equal already."""
        # Held from now on, not from when the thread comes to it: retention may run before.
        hold = ExitStack()
        try:
            hold.enter_context(self.source.reading(name))
        except OSError as error:
            self._keep(self._failed(self.folder / name, error))
            return
        # The thread takes what waits: no checkpoint may be submitted twice, or lost between the two lines.
        with self._lock:
            replaced, self._waiting = self._waiting, (name, hold)
        if replaced is None:
            self._thread.submit(self._copy_waiting)
            return
        # The thread has not begun with it, and takes the new one in its place.
        replaced[1].close()
        if replaced[0] != name:
            log.warning("%s is not copied: %s is due before an earlier copy has ended", replaced[0], name)

    def on_amended(self, name: str) -> None:
        """The manifest of a checkpoint was replaced: its copy, if there is one, gets it too."""
        self._thread.submit(lambda: self._guarded(name, lambda: self._copy(name, only_existing=True)))

    def raise_failure(self) -> None:
        """Raise the failure of a copy, or log it, as configured.

        Raises:
            SaveError: a checkpoint could not be copied.
        """
        # Taken away, so that a failure is raised or logged once.
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if self.raises:
            raise failure
        if not self._reported:
            log.error("%s Training continues, and later checkpoints are copied.", failure)
        self._reported = True

    def finish(self, source_retention: Retention) -> None:
        """Copy the newest checkpoint, and wait until all copies are in their folder.

        Raises:
            SaveError: as in `raise_failure`.
        """
        # One that is older than the copy that was resumed is no news.
        newest = source_retention.newest()
        if newest is not None and newest.step >= self._begun_at:
            self.copy(newest.name)
        # Before the uploads: a copy that is still written is not yet in their queue.
        self._thread.drain()
        self.raise_failure()
        if waiting := self.storage.finish_uploads():
            message = f"the copies {', '.join(waiting)} could not be sent"
            self._failure = SaveError(
                message,
                where=str(self.folder),
                cure="Run the same command again to send what is still on this machine.",
            )
            self.raise_failure()
        elif self._opened:
            self.retention.retire(None)

    def abandon(self) -> None:
        """Leave the copy in progress unfinished."""
        self._abandoned = True

    def close(self, timeout_s: float) -> bool:
        """End the thread. False if a copy is still being made after `timeout_s` seconds."""
        return self._thread.close(_ABANDON_S if self._abandoned else timeout_s)

    def _open(self) -> None:
        """Make the folder ready, once it can be reached."""
        if not self._opened:
            self.storage.sweep()
            self._opened = True

    def _copy_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        assert waiting is not None
        name, hold = waiting
        with hold:
            self._guarded(name, lambda: self._copy(name))

    def _guarded(self, name: str, work: Callable[[], object]) -> None:
        """Do something with a copy; a failure is kept for `raise_failure`."""
        try:
            self._open()
            work()
        # Of any kind, and reported by raise_failure: no caller waits for this thread's result.
        except BaseException as error:
            if not self._abandoned:
                self._keep(self._failed(self.folder / name, error))

    def _copy(self, name: str, *, only_existing: bool = False) -> None:
        """Make a copy equal to its checkpoint; with `only_existing` only where there is one."""
        manifest, copied = self.source.peek(name, MANIFEST_FILE), self.storage.peek(name, MANIFEST_FILE)
        if copied == manifest or (only_existing and None in (copied, manifest)):
            return
        if manifest is None:
            raise FileNotFoundError("it was removed")
        source_manifest = Manifest.parse(manifest)
        if copied is not None:
            copied_manifest = Manifest.parse(copied)
            if copied_manifest.files == source_manifest.files:
                self.storage.amend(name, manifest)
                return
            if copied_manifest.run_id != source_manifest.run_id:
                raise FileExistsError("a checkpoint of another run exists there")
            # Of a branch that the run has left.
            if not self.storage.remove(name):
                raise OSError("an older copy is being read")
        # Blocks are verified as they are read, so that a damaged checkpoint never has a valid copy.
        with self.source.reading(name) as folder:
            files = (
                (file, self._blocks(folder, file, entry.size_bytes)) for file, entry in source_manifest.files.items()
            )
            write_copy(self.storage, name, manifest, files, self.source.location(name))
        self._reported = False
        SAVES.info("copied step %d to %s", source_manifest.step, self.folder)
        self.retention.retire(None)

    def _blocks(self, folder: ReadableFolder, file: str, size_bytes: int) -> Iterator[memoryview]:
        for block in read_blocks(folder, file, size_bytes):
            if self._abandoned:
                raise InterruptedError
            yield block

    def _keep(self, failure: SaveError) -> None:
        self._failure = failure
        self.on_failure()

    @staticmethod
    def _failed(path: Path, error: BaseException) -> SaveError:
        if isinstance(error, TrainError):
            return SaveError(f"the checkpoint could not be copied: {error.what}", where=str(path), cure=error.cure)
        why, cure = str(error) or type(error).__name__, "The checkpoint itself is not changed."
        if isinstance(error, OSError) and error.errno is not None:
            why, cure = str(error.strerror), f"{cure} {disk_cure(error)}"
        failure = SaveError(f"the checkpoint could not be copied: {why}", where=str(path), cure=cure)
        failure.__cause__ = error
        return failure


def _number(manifest: Manifest | None) -> int:
    return 0 if manifest is None or manifest.number is None else manifest.number
