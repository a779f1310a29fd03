"""Saves the trainer's state on every rank: at once, or copied now and written behind the training."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trainer_cli.callbacks.retention import Retention
from trainer_cli.callbacks.run_copies import open_copies
from trainer_cli.catalog import Catalog, CheckpointHistory, Spent
from trainer_cli.checkpoint import (
    Checkpointer,
    CheckpointMetadata,
    InFlightSave,
    SaveCaller,
    SaveJob,
    WriterThread,
    errors_of_save,
    make_sync_checkpointer,
)
from trainer_cli.environment import usable_cores
from trainer_cli.errors import ConfigError, SaveError, without_secrets
from trainer_cli.files import is_gone
from trainer_cli.format import new_format
from trainer_cli.layout import COPIES_CACHE, Naming
from trainer_cli.loads import LEAVE_OUT, LOG_MARKS, check_leave_out, describe_left_out, find_left_out, omit_states
from trainer_cli.loggers import SAVES
from trainer_cli.manifest import UnsavableState
from trainer_cli.parallel import ALONE, LostRankError, PeerError, ProcessGroup
from trainer_cli.policy import CheckpointKind, Decision
from trainer_cli.schema import CheckpointConfig
from trainer_cli.storage import Storage, open_storage, point_latest_link
from trainer_cli.trainer import describe, with_settings

if TYPE_CHECKING:
    from concurrent.futures import Future

    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)

AFTER_EXCEPTION = "exception"
"""Folder, below that of the checkpoints, of the one saved when the training failed. No resume looks there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The run that checkpoints belong to, and what is saved with each of them."""

    run_id: str = field(default_factory=lambda: uuid4().hex)
    attempt: int = 1
    config_digest: str | None = None
    target_packages: tuple[str, ...] = ()
    extra_files: Mapping[str, bytes] = field(default_factory=dict)
    samples: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Digests of a few samples of each dataset, for the manifest."""
    source: Mapping[str, str] = field(default_factory=dict)
    """Digests of the project's imported files, for the manifest."""
    local_folder: Path | None = None
    """Folder for local copies of checkpoints that are saved to an object store; None: in the user's cache."""
    history_file: Path | None = None
    """The file to which each save and removal is appended, with its reason (`catalog/history.py`); None: no file."""

    def describe(self, trainer: Trainer, kind: CheckpointKind, reason: str) -> CheckpointMetadata:
        """The facts about the present step of this run, for the manifest of a checkpoint."""
        step = describe(trainer)
        return replace(
            step,
            run_id=self.run_id,
            attempt=self.attempt,
            kind=kind,
            reason=reason,
            metrics=trainer.metric_logger.last_at(trainer.progress.step),
            config_digest=self.config_digest,
            target_packages=self.target_packages,
            files={**step.files, **self.extra_files},
            samples=self.samples,
            source=self.source,
        )


class StateSaver(SaveCaller):
    """What the CheckpointerCallback saves with: storage, checkpointer, and the save in flight.

    Rank 0 calls `save`, `finish` and `prepare` inside `ProcessGroup.leading`, with the other ranks' StateSavers as
    followers: each rank writes its part.

    Args:
        thread: writes saves in the background; one at a time.
        keeps_settings: whether the state has the settings of the trainer: the run has no config, whose changes are
            refused.
    """

    trainer: Trainer

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        identity: RunIdentity,
        thread: WriterThread,
        *,
        keeps_settings: bool = False,
    ) -> None:
        self.folder, self.identity, self.thread = folder, identity, thread
        self._keeps_settings = keeps_settings
        self._leave_out, self._links_latest = settings.leave_out, settings.latest_link
        self._links_frozen = settings.link_frozen
        self._naming = Naming(settings.name, settings.suffix)
        self.storage = self._new_storage(folder)
        self.history = CheckpointHistory(identity.history_file)
        self.retention = Retention(folder, self.storage, identity.run_id, self.history)
        cache = None if identity.local_folder is None else identity.local_folder / COPIES_CACHE
        self.copies = open_copies(
            self.storage, folder, settings, run_id=identity.run_id, attempt=identity.attempt, cache=cache
        )
        if self.copies is not None:
            self.retention.held = self.copies.waiting
        format = new_format(settings.format, settings.compression)
        self.checkpointer = Checkpointer(format=format, storage=self._storage_at, digest=settings.digest, thread=thread)
        self.in_background = saves_in_background(settings.save_async)
        """Whether the thread writes the saves during the training; those at an end are synchronous."""
        self.in_flight: InFlightSave | None = None
        self.prepared = False
        """Whether memory for copies was reserved."""

    def join(self, trainer: Trainer) -> None:
        """Save the state of this trainer, with the ranks of its group. Collective."""
        self.trainer, group = trainer, trainer.strategy.group
        # Ranks may have different numbers of usable CPUs.
        self.in_background = group.broadcast(self.in_background)
        self.checkpointer.join(group)

    def path(self) -> Path:
        """Where the present step is saved.

        Raises:
            ConfigError: `checkpoint.name` has an unknown variable.
        """
        trainer = self.trainer
        counts = {**trainer.progress.state_dict(), "run_name": trainer.name, "world_size": trainer.strategy.world_size}
        try:
            return self.folder / self._naming.name(counts)
        except ValueError as error:
            raise ConfigError(str(error), location="checkpoint.name") from None

    def check(self) -> None:
        """Check before the first step that the state can be saved, and say what is left out of it.

        Raises:
            ConfigError: nothing in the training has a name in `leave_out`, or evaluations see an average named there.
            UserError: a part of the state cannot be saved; it is named.
        """
        trainer = self.trainer
        check_leave_out(LEAVE_OUT, self._leave_out, trainer.callbacks)
        lacking = find_left_out(self._leave_out, trainer.callbacks)
        for name, callback in trainer.callbacks.items():
            if callback.evaluates and {"callbacks", f"callbacks.{name}"} & set(lacking):
                raise ConfigError(
                    f"{LEAVE_OUT} names callbacks.{name}, which evaluations see: a checkpoint without it cannot be "
                    "evaluated",
                    location=LEAVE_OUT,
                    hint="Keep it; SaveCheckpointState saves an average alone, in place of the weights.",
                )
        if lacking and trainer.strategy.group.is_main:
            log.warning("%s", describe_left_out(lacking))
        self.checkpointer.format.plan(self._state())

    def _state(self) -> Mapping[str, Any]:
        """The state to save, without what `leave_out` names, with settings if they are kept, and the loggers' marks."""
        state = omit_states(self.trainer.checkpoint_state(), self._leave_out)
        if self._keeps_settings:
            state = with_settings(self.trainer, state)
        marks = self.trainer.metric_logger.state_dict()
        # What a callback has saved under this name is not replaced.
        adds_marks = marks and LOG_MARKS not in state
        return {**state, LOG_MARKS: marks} if adds_marks else state

    def metadata(self, decision: Decision, finished: str | None = None) -> CheckpointMetadata:
        """What the manifest says of the present step, whose metrics are passed to the loggers' files.

        Raises:
            SaveError: these cannot be written.
        """
        trainer, progress = self.trainer, self.trainer.progress
        with errors_of_save(progress.step, self.path()):
            trainer.metric_logger.write_out()
        return replace(
            self.identity.describe(trainer, decision.kind, decision.reason),
            finished=finished,
            left_out=self._left_out(),
            number=None if self.copies is None or progress.step == 0 else self.copies.next_number,
            spent=Spent(trainer.metric_logger.time.seconds(), trainer.metric_logger.time.kept_s()),
        )

    def _left_out(self) -> tuple[str, ...]:
        """Names of the states that a checkpoint of the present step lacks, without callbacks that have no state."""
        callbacks = self.trainer.callbacks
        names = find_left_out(self._leave_out, callbacks) if self._leave_out else ()
        return tuple(
            name
            for name in names
            if not name.startswith("callbacks.") or callbacks[name.removeprefix("callbacks.")].state_dict()
        )

    def save(self, path: Path, metadata: CheckpointMetadata, *, in_background: bool) -> None:
        """Save the present step: durably, or only copied and submitted to the writer thread, so that `finish` reports
        the outcome.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: on one rank it failed, and nothing was committed.
        """
        self.prepared |= in_background
        self._group.have_followers_call(self.save_on_rank, path, metadata, in_background)
        self.save_on_rank(path, metadata, in_background)

    def save_on_rank(self, path: Path, metadata: CheckpointMetadata, in_background: bool) -> None:
        """Save this rank's part of the present step. Collective."""
        with self._raising_on_rank_0(), errors_of_save(metadata.step, path):
            self.in_flight = self.checkpointer.save(
                self._state,
                path,
                metadata=metadata,
                overwrite=False,
                trained=self.trainer.trained,
                caller=self,
                in_background=in_background,
                frozen=self._frozen(),
            )
            if self.in_flight is not None:
                self.in_flight.written.add_done_callback(self._on_written)

    def checksums(self) -> dict[str, int]:
        return self.trainer.strategy.before_save(self.trainer.model)

    def before_commit(self) -> None:
        """Make the records durable that are of steps before the checkpoint."""
        # No checkpoint may have steps whose records a power cut can take away.
        self.trainer.metric_logger.make_durable()

    def on_committed(self, job: SaveJob) -> None:
        """Record the checkpoint, start its copy, and remove the checkpoints that it replaces.

        Runs in the thread that committed it, so that the training does not wait for the disk.
        """
        name, metadata = job.name, job.metadata
        SAVES.info("committed step %d (%s)", metadata.step, metadata.reason)
        self.history.saved(name, metadata.step, metadata.kind.value, metadata.reason, metadata.spent)
        if self.copies is not None:
            # Before any removal: a checkpoint that waits for its copy is held.
            self.copies.on_committed(name, metadata)
        if self._links_latest:
            point_latest_link(self.folder, name)
        self.retention.retire(metadata.step)

    def _on_written(self, written: Future[None]) -> None:
        """Have the save finished at the end of the present step.

        Runs in the thread that writes, which never communicates with other ranks: the next step's agreement does.
        """
        if self.trainer.agreement is None:
            self.trainer.interrupt()
        else:
            self.trainer.agreement.report_written()

    def prepare(self) -> None:
        """Reserve memory for copies, once."""
        self.prepared = True
        if self.in_flight is None:
            self._group.have_followers_call(self.prepare_on_rank)
            self.prepare_on_rank()

    def prepare_on_rank(self) -> None:
        """Reserve memory for copies of this rank's state. Collective, as callbacks may gather their states."""
        with self._raising_on_rank_0():
            self.checkpointer.prepare(self._state(), frozen=self._frozen())

    def _frozen(self) -> Sequence[Any]:
        """The tensors of which checkpoints may share a file."""
        return self.trainer.trained.frozen() if self._links_frozen else ()

    def finish(self, *, wait: bool) -> InFlightSave | None:
        """End the save in flight if it is written, or with `wait` once it is. Returns it; None: it is still being
        written, or there is no save.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: it has failed; or it does not end, and is still in flight.
        """
        save = self.in_flight
        if save is None:
            return None
        agreement = self.trainer.agreement
        # With several ranks by the agreement of the last step, which is the same on all of them.
        has_ended = save.written.done() if agreement is None else agreement.all_written
        if not (wait or has_ended):
            return None
        if not save.written.done():
            self.checkpointer.wait_for(save)
        self._group.have_followers_call(self.finish_on_rank)
        self.finish_on_rank()
        return save

    def finish_on_rank(self) -> None:
        """Commit the save in flight with all ranks, or raise what failed. Collective."""
        save, self.in_flight = self.in_flight, None
        with self._raising_on_rank_0():
            assert save is not None
            try:
                save.raise_failure()
            finally:
                if self.trainer.agreement is not None:
                    self.trainer.agreement.saved()

    @property
    def _group(self) -> ProcessGroup:
        return self.trainer.strategy.group

    @contextmanager
    def _raising_on_rank_0(self) -> Iterator[None]:
        """Log a failed save on the other ranks: rank 0 decides what it means, and raises it if it ends the training."""
        try:
            yield
        except SaveError as error:
            if self._group.is_main:
                raise
            log.error("%s", error)
        except PeerError as error:
            # Rank 0 raises too, and the end of its `leading`, in which this rank takes part, raises it here.
            if self._group.is_main or isinstance(error, LostRankError):
                raise

    def save_after(self, exception: Exception) -> None:
        """Save the present state in a folder of its own: it is not the end of a step, so no resume may load it.

        Raises:
            SaveError: nothing was committed.
        """
        run_dir = self.trainer.run_dir
        if run_dir is not None and is_gone(run_dir):
            # A new folder of that name would keep the run directory from being moved back.
            log.warning("the state after the failure is not kept: %s is gone", run_dir)
            return
        folder = self.folder / AFTER_EXCEPTION
        storage = self._new_storage(folder)
        path = folder / self.path().name
        storage.sweep()
        for entry in Catalog(storage).valid(self.identity.run_id):
            if not entry.pinned and storage.remove(entry.name):
                SAVES.info("removed %s (of an earlier failure)", folder / entry.name)
        reason = without_secrets(f"after {type(exception).__name__}: {exception}")
        decision = Decision(CheckpointKind.ephemeral, reason[:500])
        metadata = replace(self.metadata(decision), metrics={}, world_size=1, number=None)
        # The other ranks may be gone: this one saves by itself.
        checkpointer = make_sync_checkpointer(storage=self._storage_at, group=ALONE)
        try:
            with errors_of_save(metadata.step, path):
                self.trainer.metric_logger.make_durable()
                checkpointer.save(self._state, path, metadata=metadata, overwrite=False, trained=self.trainer.trained)
        except UnsavableState as error:
            why = "this process has only a part of it" if self._group.world_size > 1 else str(error)
            log.warning("the state after the failure is not kept: %s", why)
            return
        log.warning("the state after the failure is kept in %s; it is never resumed; ckpt can name it", path)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until the save in flight is written; `finish` reports its outcome."""
        if self.in_background:
            self.checkpointer.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the writer thread. False if removed checkpoints are still being deleted after `timeout_s` seconds."""
        if self.in_background:
            self.checkpointer.close()
            return True
        return self.thread.close(timeout_s)

    def _storage_at(self, root: Path) -> Storage:
        """The storage of a folder of checkpoints: this run's own, that of its copies, or a new one."""
        if self.copies is not None and root == self.copies.folder.absolute():
            return self.copies.storage
        return self.storage if root == self.folder.absolute() else self._new_storage(root)

    def _new_storage(self, root: Path) -> Storage:
        """The storage of a folder; its removed files are deleted in the thread that writes."""
        local = self.identity.local_folder
        return open_storage(
            root,
            cache=local if local is None or root == self.folder else local / root.name,
            run_id=self.identity.run_id,
            attempt=self.identity.attempt,
            later=self.thread.submit,
        )


def saves_in_background(save_async: bool | None) -> bool:
    """Whether saves are written in the background: as configured, else if more than one CPU is usable."""
    if save_async is not None:
        return save_async
    return usable_cores() > 1
