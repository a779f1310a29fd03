"""Saves the trainer's state on every rank: at once, or copied now and written behind the training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trainer_cli.callbacks.copier import Copier
from trainer_cli.callbacks.retention import Retention
from trainer_cli.checkpoint.async_checkpointer import AsyncCheckpointer
from trainer_cli.checkpoint.checkpointer import InFlightSave, make_sync_checkpointer
from trainer_cli.checkpoint.copies import check_copies
from trainer_cli.checkpoint.format.open import format_of
from trainer_cli.checkpoint.format.tree import UnsavableState
from trainer_cli.checkpoint.model_state import evaluated_average, model_files
from trainer_cli.checkpoint.save import CheckpointMetadata, WriterThread, errors_of_save, nothing
from trainer_cli.checkpoint.storage.base import Storage
from trainer_cli.checkpoint.storage.open import open_storage
from trainer_cli.core.checkpoint_config import CheckpointConfig, OnSaveError
from trainer_cli.core.left_out import KEY, check_leave_out, described, left_out, without
from trainer_cli.core.naming import COPIES_CACHE, Naming
from trainer_cli.core.policy import Decision, Kind
from trainer_cli.core.url_path import as_path
from trainer_cli.errors import ConfigError, SaveError
from trainer_cli.loggers.base import SAVES
from trainer_cli.parallel.process_group import ALONE, ProcessGroup

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from trainer_cli.trainer.trainer import Trainer

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
    """Where copies of checkpoints are kept that are saved to an object store; None: in the user's cache."""
    history_file: Path | None = None
    """To which each save and removal is appended, with its reason (`checkpoint/history.py`)."""


class _Ask(StrEnum):
    """What rank 0 asks of the other ranks."""

    save = "save"
    save_in_background = "save_in_background"
    finish = "finish"
    prepare = "prepare"


class StateSaver:
    """What the CheckpointerCallback saves with: storage, checkpointers, and the save in flight.

    `save`, `save_in_background`, `finish` and `prepare` are called by rank 0 inside `ProcessGroup.lead`; the other
    ranks call `follow`, and each writes its part.

    Args:
        thread: writes saves in the background; one at a time.
        committed: called on the rank that commits, in the thread that does, after each commit in the background.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        identity: RunIdentity,
        thread: WriterThread,
        committed: Callable[[str, CheckpointMetadata], None],
    ) -> None:
        self.folder, self.identity, self.thread = folder, identity, thread
        self._digest, self._committed = settings.digest, committed
        self._leave_out = settings.leave_out
        self._naming = Naming(settings.name, settings.suffix)
        self.storage = self._new_storage(folder)
        self.copier = self._new_copier(settings)
        form = format_of(settings.format, settings.compression)
        self.checkpointer = make_sync_checkpointer(format=form, storage=self._storage_at, digest=self._digest)
        self.background: AsyncCheckpointer | None = None
        self._write_in_background(_saves_in_background(settings.save_async))
        self.in_flight: InFlightSave | None = None
        self.prepared = False
        """Whether memory for copies was reserved."""

    def join(self, group: ProcessGroup) -> None:
        """Save with these ranks. Collective."""
        # Ranks may have different numbers of usable CPUs.
        self._write_in_background(group.broadcast(self.background is not None))
        for checkpointer in (self.checkpointer, self.background):
            if checkpointer is not None:
                checkpointer.join(group)

    def _write_in_background(self, wanted: bool) -> None:
        if wanted and self.background is None:
            self.background = AsyncCheckpointer(
                format=self.checkpointer.format, storage=self._storage_at, digest=self._digest, thread=self.thread
            )
        elif not wanted:
            self.background = None

    def path(self, trainer: Trainer) -> Path:
        """Where the present step is saved.

        Raises:
            ConfigError: its name names no variable that there is.
        """
        counts = {**trainer.progress.state_dict(), "run_name": trainer.name, "world_size": trainer.strategy.world_size}
        try:
            return self.folder / self._naming.name(counts)
        except ValueError as error:
            raise ConfigError(str(error), location="checkpoint.name") from None

    def check(self, trainer: Trainer) -> None:
        """Check before the first step that the state can be saved, and say what is left out of it.

        Raises:
            ConfigError: nothing in the training has a name in `leave_out`, or evaluations see an average named there.
            UserError: a part of the state cannot be saved; it is named.
        """
        check_leave_out(KEY, self._leave_out, trainer.callbacks)
        lacking = left_out(self._leave_out, trainer.callbacks)
        for name, callback in trainer.callbacks.items():
            if callback.evaluates and {"callbacks", f"callbacks.{name}"} & set(lacking):
                raise ConfigError(
                    f"{KEY} names callbacks.{name}, which evaluations see: a checkpoint without it cannot be evaluated",
                    location=KEY,
                    hint="Keep it; SaveCheckpointState saves an average alone, in place of the weights.",
                )
        if lacking and trainer.strategy.group.is_main:
            log.warning("%s", described(lacking))
        self.checkpointer.format.plan(self._state(trainer))

    def _state(self, trainer: Trainer) -> Mapping[str, Any]:
        return without(trainer.checkpoint_state(), self._leave_out)

    def metadata(self, trainer: Trainer, decision: Decision, finished: str | None = None) -> CheckpointMetadata:
        """What the manifest says of the present step, whose metrics are passed to the loggers' files.

        Raises:
            SaveError: these cannot be written.
        """
        progress, identity = trainer.progress, self.identity
        with errors_of_save(progress.step, self.path(trainer)):
            trainer.metric_logger.write_out()
        return CheckpointMetadata(
            run_id=identity.run_id,
            attempt=identity.attempt,
            step=progress.step,
            epoch=progress.epoch,
            kind=decision.kind,
            reason=decision.reason,
            finished=finished,
            metrics=dict(trainer.metric_logger.last),
            average=evaluated_average(trainer.callbacks),
            left_out=self._left_out(trainer),
            config_digest=identity.config_digest,
            target_packages=identity.target_packages,
            world_size=trainer.strategy.world_size,
            files={**model_files(trainer.model), **identity.extra_files},
            progress=progress.state_dict(),
            samples=identity.samples,
            source=identity.source,
            number=None if self.copier is None or progress.step == 0 else self.copier.next_number,
        )

    def _left_out(self, trainer: Trainer) -> tuple[str, ...]:
        """The states that a checkpoint of the present step lacks; callbacks without state are none of them."""
        names = left_out(self._leave_out, trainer.callbacks) if self._leave_out else ()
        return tuple(
            name
            for name in names
            if not name.startswith("callbacks.") or trainer.callbacks[name.removeprefix("callbacks.")].state_dict()
        )

    def save(self, trainer: Trainer, path: Path, metadata: CheckpointMetadata) -> None:
        """Save the present step, durably.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: on one rank it failed, and nothing was committed.
        """
        self._with_all(trainer, _Ask.save, path, metadata)

    def save_in_background(self, trainer: Trainer, path: Path, metadata: CheckpointMetadata) -> None:
        """Copy the present step and submit it to the writer thread; `finish` reports the outcome.

        Raises:
            SaveError: on one rank it could not be copied.
        """
        self.prepared = True
        self._with_all(trainer, _Ask.save_in_background, path, metadata)

    def prepare(self, trainer: Trainer) -> None:
        """Reserve memory for copies, once."""
        self.prepared = True
        if self.in_flight is None:
            self._with_all(trainer, _Ask.prepare)

    def finish(self, trainer: Trainer, *, wait: bool) -> CheckpointMetadata | None:
        """The metadata of the save in flight if it has ended, or, with `wait`, once it has; None: not yet, or none.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: it has failed; or it does not end, and is still in flight.
        """
        save, agreement = self.in_flight, trainer.agreement
        if save is None or not (wait or (save.written.done() if agreement is None else agreement.all_written)):
            return None
        if not save.written.done():
            assert self.background is not None
            self.background.wait_for(save)
        self._with_all(trainer, _Ask.finish)
        return save.metadata

    def follow(self, trainer: Trainer) -> None:
        """Do what rank 0 asks. It also decides what a failure means, and raises it if it must be raised."""
        try:
            self._do(trainer, *trainer.strategy.group.broadcast((_Ask.save, None, None)))
        except SaveError as error:
            log.error("%s", error)

    def save_after(self, exception: Exception, trainer: Trainer) -> None:
        """Save the present state in a folder of its own: it is not the end of a step, so no resume may load it.

        Raises:
            SaveError: nothing was committed.
        """
        folder = self.folder / AFTER_EXCEPTION
        storage = self._new_storage(folder)
        path = folder / self.path(trainer).name
        storage.sweep()
        for earlier in Retention(folder, storage, self.identity.run_id).own():
            if not earlier.pinned and storage.remove(earlier.name):
                SAVES.info("removed %s (of an earlier failure)", folder / earlier.name)
        decision = Decision(Kind.ephemeral, f"after {type(exception).__name__}: {exception}"[:500])
        metadata = replace(self.metadata(trainer, decision), metrics={}, world_size=1, number=None)
        try:
            self._write(trainer, path, metadata, alone=True)
        except UnsavableState as error:
            several = trainer.strategy.world_size > 1
            why = "this process has only a part of it" if several else str(error)
            log.warning("the state after the failure is not kept: %s", why)
            return
        log.warning("the state after the failure is kept in %s; no resume takes it", path)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until the save in flight is written; `finish` reports its outcome."""
        if self.background is not None:
            self.background.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the writer thread. False: removed checkpoints are still being deleted after so many seconds."""
        if self.background is not None:
            self.background.close()
            return True
        return self.thread.close(timeout_s)

    def _with_all(
        self, trainer: Trainer, ask: _Ask, path: Path | None = None, metadata: CheckpointMetadata | None = None
    ) -> None:
        """Do something on every rank; called by rank 0, which the others follow.

        Raises:
            SaveError: on one rank it failed.
        """
        group = trainer.strategy.group
        group.together(lambda: self._do(trainer, *group.broadcast((ask, path, metadata))))

    def _do(self, trainer: Trainer, ask: _Ask, path: Path | None, metadata: CheckpointMetadata | None) -> None:
        if ask is _Ask.prepare:
            assert self.background is not None
            self.background.prepare(self._state(trainer))
        elif ask is _Ask.finish:
            save, self.in_flight = self.in_flight, None
            assert save is not None
            try:
                save.raise_failure()
            finally:
                if trainer.agreement is not None:
                    trainer.agreement.saved()
        else:
            assert path is not None and metadata is not None
            (self._write if ask is _Ask.save else self._begin)(trainer, path, metadata)

    def _begin(self, trainer: Trainer, path: Path, metadata: CheckpointMetadata) -> None:
        """Copy this rank's state and submit it to the writer thread."""
        assert self.background is not None
        with errors_of_save(metadata.step, path):
            self.in_flight = self.background.save(
                partial(self._state, trainer),
                path,
                metadata=metadata,
                overwrite=False,
                trained=_trained(trainer),
                before_commit=trainer.metric_logger.make_durable,
                # In the writer thread, before the save is done: nothing else reads the disk meanwhile.
                after_commit=partial(self._committed, path.name, metadata),
                after_write=nothing if trainer.agreement is None else partial(trainer.agreement.report, written=True),
            )
        if trainer.agreement is None:

            def request_poll(written: Future[None]) -> None:
                trainer.interrupt()

            self.in_flight.written.add_done_callback(request_poll)

    def _write(self, trainer: Trainer, path: Path, metadata: CheckpointMetadata, *, alone: bool = False) -> None:
        checkpointer = make_sync_checkpointer(storage=self._storage_at, group=ALONE) if alone else self.checkpointer
        with errors_of_save(metadata.step, path):
            checkpointer.save(
                partial(self._state, trainer),
                path,
                metadata=metadata,
                overwrite=False,
                trained=_trained(trainer),
                before_commit=trainer.metric_logger.make_durable,
            )

    def _storage_at(self, root: Path) -> Storage:
        if self.copier is not None and root == self.copier.folder.absolute():
            return self.copier.storage
        return self.storage if root == self.folder.absolute() else self._new_storage(root)

    def _new_copier(self, settings: CheckpointConfig) -> Copier | None:
        if settings.copy_to.folder is None:
            return None
        folder, local, identity = as_path(settings.copy_to.folder), self.identity.local_folder, self.identity
        check_copies(self.folder, folder)
        cache = None if local is None else local / COPIES_CACHE
        return Copier(
            self.storage,
            open_storage(folder, cache=cache, run_id=identity.run_id, attempt=identity.attempt),
            folder,
            identity.run_id,
            every=settings.copy_to.every,
            raises=settings.on_save_error is OnSaveError["raise"],
        )

    def _new_storage(self, root: Path) -> Storage:
        local = self.identity.local_folder
        return open_storage(
            root,
            cache=local if local is None or root == self.folder else local / root.name,
            run_id=self.identity.run_id,
            attempt=self.identity.attempt,
            later=self.thread.submit,
        )


def _trained(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


def _saves_in_background(save_async: bool | None) -> bool:
    """Whether saves are written in the background: as configured, else if more than one CPU is usable."""
    if save_async is not None:
        return save_async
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable > 1
