"""The copies of a run's checkpoints in a second folder: which are made, which are removed, and what a failure means."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from trainer_cli.callbacks.retention import Retention
from trainer_cli.checkpoint.save import CheckpointMetadata
from trainer_cli.checkpoint.storage.base import Storage
from trainer_cli.checkpoint.storage.mirror import Mirror
from trainer_cli.core.checkpoint_config import Newer
from trainer_cli.core.manifest import Manifest
from trainer_cli.core.naming import MANIFEST_FILE
from trainer_cli.errors import SaveError, StoreAwayError, TrainError, disk_cure
from trainer_cli.loggers.base import SAVES

log = logging.getLogger(__name__)

_ABANDON_S = 1.0
"""How long an interrupted training waits for a copy that is left unfinished."""


class Copier:
    """Has a mirror copy every k-th committed checkpoint of a run, and applies the rules of removal to the copies.

    A checkpoint is held against removal until it is copied. If another is due meanwhile, it waits; if a third is, that
    one takes the place of the second. Rank 0 copies.

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
        self.mirror = Mirror(source, self._copy, storage.location, self._on_failure)
        self.on_failed_copy: Callable[[], object] = lambda: None
        """Called from the mirror's thread after a failure."""
        self._number = 0
        self._failure: SaveError | None = None
        self._reported = False
        self._begun_at = 0
        self._abandoned = False
        self._copied: set[str] = set()

    @property
    def next_number(self) -> int:
        """The number of the next checkpoint to be committed. That of step 0 has none, so that the copies are of round
        steps."""
        return self._number + 1

    def start(self, source_retention: Retention, step: int, newer: Newer) -> None:
        """Begin a training at this step, as `CheckpointerCallback` does in its own folder, and make up for copies that
        an earlier attempt did not finish.

        Raises:
            UserError: there are newer copies, and they may not go.
            SaveError: as in `raise_failure`.
        """
        self.retention.rules, self._begun_at = source_retention.rules, step
        self._abandoned = self._reported = False
        # Numbering continues from the resumed checkpoint, and from copies whose originals were removed.
        before, copies = [entry for entry in source_retention.own() if entry.step <= step], []
        try:
            self.storage.sweep()
            self.retention.leave_branch(step, newer)
            copies = self.retention.own()
        except OSError as error:
            self._fail(self.folder, error)
            self.raise_failure()
        self._number = max((_number(entry.manifest) for entry in (*before, *copies)), default=0)
        self._copied = {entry.name for entry in copies}
        # The newest copy too: it may lack what was added to its checkpoint since.
        after = max((entry.step for entry in copies), default=0)
        due = [entry.name for entry in before if entry.step >= after and self._is_due(_number(entry.manifest))]
        for name in due:
            if source_retention.catalog.entry(name).valid:
                self.mirror.add(name, hold=name == due[-1])

    def on_committed(self, name: str, metadata: CheckpointMetadata) -> None:
        """Copy this checkpoint if it is due; called in the thread that committed it, before any removal."""
        if metadata.number is not None:
            self._number = metadata.number
            if self._is_due(metadata.number):
                self.mirror.add(name, hold=True)

    def on_amended(self, name: str) -> None:
        """The manifest of a checkpoint was replaced: its copy, if there is one, gets it too."""
        if name in self.mirror.waiting() or name in self._copied:
            self.mirror.add(name)

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
            self.mirror.add(newest.name, hold=True)
        waiting = self.mirror.finish()
        self.raise_failure()
        # What an earlier version of this program has copied to the local disk is sent by the storage itself.
        try:
            self.retention.finish_uploads(waiting)
        except SaveError as error:
            self._failure = error
            self.raise_failure()
        else:
            self.retention.retire(None)

    def abandon(self) -> None:
        """Do not wait for the copy in progress: the next start makes up for it."""
        self._abandoned = True

    def close(self, timeout_s: float) -> bool:
        """End the thread. False if a copy is still being made after `timeout_s` seconds."""
        return self.mirror.close(_ABANDON_S if self._abandoned else timeout_s)

    def _copy(self, name: str) -> None:
        """Make a copy equal to its checkpoint."""
        content, copied = self.source.peek(name, MANIFEST_FILE), self.storage.peek(name, MANIFEST_FILE)
        if content is None or copied == content:
            return
        manifest = Manifest.parse(content)
        if copied is not None:
            earlier = Manifest.parse(copied)
            if manifest.amends(earlier):
                self.storage.amend(name, content)
                return
            if manifest.run_id != earlier.run_id:
                raise FileExistsError("a checkpoint of another run exists there")
            # Of a branch that the run has left.
            if not self.storage.remove(name):
                raise OSError("an older copy is being read")
        with self.source.reading(name) as folder:
            self.storage.send(name, content, folder)
        self._copied.add(name)
        self._reported = False
        SAVES.info("copied step %d to %s", manifest.step, self.folder)
        self.retention.retire(None)

    def _on_failure(self, name: str, error: BaseException) -> bool:
        # Without an answer no copy is lost yet: the checkpoint waits for the next one, and for the end.
        if isinstance(error, StoreAwayError):
            return True
        self._fail(self.folder / name, error)
        self.on_failed_copy()
        return False

    def _is_due(self, number: int) -> bool:
        return number > 0 and number % self.every == 0

    def _fail(self, path: Path, error: BaseException) -> None:
        """Keep a failure for `raise_failure`."""
        why, cure = str(error) or type(error).__name__, "The checkpoint itself is not changed."
        if isinstance(error, TrainError):
            why, cure = error.what, str(error.cure)
        elif isinstance(error, OSError) and error.errno is not None:
            why, cure = str(error.strerror), f"{cure} {disk_cure(error)}"
        self._failure = SaveError(f"the checkpoint could not be copied: {why}", where=str(path), cure=cure)
        self._failure.__cause__ = error


def _number(manifest: Manifest | None) -> int:
    return 0 if manifest is None or manifest.number is None else manifest.number
