"""The copies of a run's checkpoints in a second folder: which are due, which go, and what a failure means."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from trainer_cli.addons.stores.mirror import Mirror
from trainer_cli.callbacks import Retention
from trainer_cli.catalog import Catalog, Entry
from trainer_cli.checkpoint import CheckpointMetadata
from trainer_cli.errors import CheckpointError, ConfigError, SaveError, StoreAwayError, TrainError, disk_cure
from trainer_cli.files import as_path
from trainer_cli.loggers import SAVES
from trainer_cli.manifest import Manifest
from trainer_cli.schema import CheckpointConfig, Newer
from trainer_cli.storage import Storage, open_storage

log = logging.getLogger(__name__)

_ABANDON_S = 1.0
"""How long an interrupted training waits for the block that a copy is at."""


class Copies:
    """Has every k-th committed checkpoint of a run copied, and applies the rules of removal to the copies. A checkpoint
    is held against removal until it is copied.

    One checkpoint is copied at a time. If another is due meanwhile, it waits; if a third is, that one takes the place
    of the second, so that a slow folder does not fill the local disk. One that fails waits for another try, until the
    rules would remove it. Rank 0 copies.

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
        self.mirror = Mirror(
            source,
            storage,
            on_sent=self._on_sent,
            on_failed=self._on_failed,
            prepare=self._open,
        )
        self.on_failure: Callable[[], object] = lambda: None
        """Called from the mirror's thread after a failure."""
        self._own = Catalog(source)
        self._number = self._begun_at = 0
        self._failure: SaveError | None = None
        self._opened = self._reported = False

    @property
    def next_number(self) -> int:
        """The number of the next checkpoint to be committed. That of step 0 has none, so that the copies are of round
        steps."""
        return self._number + 1

    def reachable(self, saved: Catalog, run_id: str | None) -> list[Catalog]:
        """The catalog of a run's own folder and, if it can be listed, that of its copies; else a warning says so.

        Raises:
            CheckpointError: the copies cannot be listed, and the run's own folder has no valid checkpoint: where the
                run stands is unknown.
        """
        copies = self.retention.catalog
        try:
            # A listing alone: manifests of copies are read only if one of them may be newer.
            copies.names()
        except OSError as error:
            if saved.newest_valid(run_id) is None:
                raise CheckpointError(
                    f"{saved.folder} holds no valid checkpoint, and whether copies are in {copies.folder} "
                    f"cannot be seen: {error}",
                    where="checkpoint.copy_to.folder",
                    cure="To start without them, set checkpoint.copy_to.folder=null.",
                ) from error
            log.warning("the copies in %s cannot be listed, so none is resumed: %s", copies.folder, error)
            return [saved]
        return [saved, copies]

    def start(self, source_retention: Retention, step: int, newer: Newer) -> None:
        """Begin a training at this step, as `CheckpointerCallback` does in its own folder, and make up for copies that
        an earlier attempt did not finish.

        Raises:
            UserError: there are newer copies, and they may not go.
            SaveError: as in `raise_failure`.
        """
        self.retention.rules, self._begun_at = source_retention.rules, step
        self._opened = self._reported = self.mirror.is_abandoned = False
        own = [entry for entry in source_retention.own() if entry.step <= step]
        copied: list[Entry] = []
        try:
            self._open()
            self.retention.leave_branch(step, newer)
            copied = self.retention.own()
        except OSError as error:
            self._keep(self.folder, error)
            self.raise_failure()
        # Numbering continues from the resumed checkpoint, and from copies whose originals were removed.
        self._number = max(map(_number_of, own + copied), default=0)
        newest = max((entry.step for entry in copied), default=0)
        due = [
            entry.name
            for entry in own
            if newest <= entry.step and (number := _number_of(entry)) and number % self.every == 0
        ]
        removable = self._find_removable(due, copied)
        for name in due:
            if name not in removable:
                self.mirror.add(name)

    def on_committed(self, name: str, metadata: CheckpointMetadata) -> None:
        """Copy this checkpoint if it is due; called in the thread that committed it, before any removal."""
        if metadata.number is not None:
            self._number = metadata.number
            if metadata.number % self.every == 0:
                self.copy(name)

    def waiting(self) -> list[str]:
        """The checkpoints that no rule may remove, as they are not copied yet."""
        return self.mirror.waiting()

    def copy(self, name: str) -> None:
        """Copy a checkpoint, or make an older copy of it equal; nothing if it is equal already."""
        # Held from now on, not from when the thread comes to it: retention may run before.
        hold = ExitStack()
        try:
            hold.enter_context(self.source.reading(name))
        except OSError as error:
            self._keep(self.folder / name, error)
            return
        for other in self.mirror.add(name, hold, gives_way=True):
            log.warning("%s is not copied: %s is due before an earlier copy has ended", other, name)

    def on_amended(self, name: str) -> None:
        """The manifest of a checkpoint was replaced: its copy, if there is one, gets it too."""
        self.mirror.add(name, is_amended=True)

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
        self.mirror.retry()
        waiting = self.mirror.wait()
        self.raise_failure()
        # Also those that an earlier version of this program copied for a store, and has not sent.
        waiting += self.storage.finish_uploads()
        if waiting:
            self._failure = SaveError(
                f"the copies {', '.join(waiting)} could not be sent",
                where=str(self.folder),
                cure="Run the same command again to send what is still on this machine.",
            )
            self.raise_failure()
        elif self._opened:
            self.retention.retire(None)

    def abandon(self) -> None:
        """Leave the copy in progress unfinished."""
        self.mirror.is_abandoned = True

    def close(self, timeout_s: float) -> bool:
        """End the copying. False if a copy is still being made after `timeout_s` seconds."""
        return self.mirror.close(_ABANDON_S if self.mirror.is_abandoned else timeout_s)

    def _open(self) -> None:
        """Make the folder ready, once it can be reached."""
        if not self._opened:
            self.storage.sweep()
            self._opened = True

    def _on_sent(self, name: str, manifest: bytes, is_new: bool) -> None:
        if is_new:
            self._reported = False
            SAVES.info("copied step %d to %s", Manifest.parse(manifest).step, self.folder)
            self.retention.retire(None)

    def _on_failed(self, name: str, error: BaseException, is_first: bool) -> None:
        """Keep a failure for `raise_failure`; of a store that does not answer only that at the end counts."""
        is_away = isinstance(error, StoreAwayError)
        if is_first and not is_away:
            self._keep(self.folder / name, error)
        try:
            copied = self.retention.own()
        except (OSError, TrainError):
            copied = []
        # They take space while they wait.
        for other in self._find_removable(self.mirror.waiting(), copied):
            self.mirror.drop(other)
        if is_away and name in self.mirror.waiting():
            self.mirror.warn(name, error, is_first)

    def _find_removable(self, names: list[str], copied: list[Entry]) -> list[str]:
        """Those of the checkpoints that are not valid, or whose copies would be removed at once."""
        waiting = {name: self._own.entry(name) for name in names}
        entries = {entry.name: entry for entry in copied} | waiting
        removable = self.retention.rules.why_remove([entry.facts for entry in entries.values() if entry.facts])
        return [name for name, entry in waiting.items() if name in removable or not entry.valid]

    def _keep(self, path: Path, error: BaseException) -> None:
        """Keep a failure for `raise_failure`."""
        why, cure = str(error) or type(error).__name__, "The checkpoint itself is not changed."
        if isinstance(error, TrainError):
            why, cure = error.what, error.cure or ""
        elif isinstance(error, OSError) and error.errno is not None:
            why, cure = str(error.strerror), f"{cure} {disk_cure(error)}"
        self._failure = SaveError(f"the checkpoint could not be copied: {why}", where=str(path), cure=cure)
        self._failure.__cause__ = error
        self.on_failure()


def open_copies(
    source: Storage, folder: Path, config: CheckpointConfig, *, run_id: str, attempt: int, cache: Path | None
) -> Copies:
    """The copies that a run makes of the checkpoints in `folder`, whose storage is `source`.

    Args:
        cache: the local folder for copies that are in an object store; by default one in the user's cache.

    Raises:
        ConfigError: the folder of the copies is that of the checkpoints, or inside it.
    """
    assert config.copy_to.folder is not None
    copies = as_path(config.copy_to.folder)
    if copies.resolve() == folder.resolve() or folder.resolve() in copies.resolve().parents:
        raise ConfigError(
            f"checkpoint.copy_to.folder is {copies}, which is in the folder of the checkpoints, {folder}",
            location="checkpoint.copy_to.folder",
            hint="Name one on another disk or in an object store.",
        )
    storage = open_storage(copies, cache=cache, run_id=run_id, attempt=attempt)
    return Copies(source, storage, copies, run_id, every=config.copy_to.every, raises=not config.tolerates_errors)


def _number_of(entry: Entry) -> int:
    return entry.manifest.number or 0 if entry.manifest else 0
