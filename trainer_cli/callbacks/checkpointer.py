"""The CheckpointerCallback: asks the policy when to save and what may go, and has the checkpointer do it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from torch import Tensor

from trainer_cli.checkpoint.asynchronous import AsyncCheckpointer
from trainer_cli.checkpoint.catalog import Catalog, Entry
from trainer_cli.checkpoint.checkpointer import Saving, make_sync_checkpointer
from trainer_cli.checkpoint.naming import Naming
from trainer_cli.checkpoint.policy import (
    Decision,
    Kind,
    Moment,
    Occasion,
    Saved,
    SaveRules,
    next_save_step,
    why_keep,
    why_remove,
    why_save,
)
from trainer_cli.checkpoint.process.background import Background
from trainer_cli.checkpoint.process.port import Process
from trainer_cli.checkpoint.rules import retention_rules, save_rules
from trainer_cli.checkpoint.snapshot import is_finite
from trainer_cli.checkpoint.soundness import catalog_of, is_sound, newest_sound
from trainer_cli.checkpoint.staging import WeightsMovedError
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.writer import Facts
from trainer_cli.config.schema import CheckpointConfig, KeepBestConfig, Mode, Newer, OnSaveError, Removal
from trainer_cli.errors import ConfigError, SaveError, UserError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import nn
    from torch.optim import Optimizer

    from trainer_cli.trainer.loops import TrainingLoop
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

AFTER_EXCEPTION = "exception"
"""Folder, below that of the checkpoints, of the one saved when the training failed. No resume looks there."""
_CLEARING_S = 60.0
_DRAINING_S = 600.0
"""So long an end waits for a save in flight."""
_ORDINARY = (Occasion.pre_train, Occasion.step)
"""Moments after which the training goes on: the save may, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Whose checkpoints these are, and what travels with each of them."""

    run_id: str = field(default_factory=lambda: uuid4().hex)
    attempt: int = 1
    config_digest: str | None = None
    target_packages: tuple[str, ...] = ()
    extra_files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A save that goes on behind the training."""

    step: int
    path: Path
    decision: Decision
    saving: Saving
    metrics: Mapping[str, float]
    asked: bool
    last_saved_step: int | None
    """The one before it: it holds again if this one fails."""


class CheckpointerCallback(Callback):
    """Saves at intervals, at fixed steps, at the end and on a stop; keeps and removes by rule.

    A save after which the training goes on is written behind it, one at a time. It counts as made from the beginning,
    so that no rule saves twice; it is committed, and others may go for it, at a step's end once it is written. A
    save at an end is made on the spot.

    Args:
        folder: where checkpoints live, each in a directory of its own. `settings["folder"]` goes before it.
        identity: the run they belong to. By default a new run, or the one that `folder` already holds.
        process: where the bytes of removed checkpoints are freed; by default behind the training.
        writer: where a save behind the training is written; by default a thread.
        settings: the fields of `CheckpointConfig` by name, for example `save_interval=250`.
    """

    def __init__(
        self,
        folder: str | Path = "checkpoints",
        *,
        identity: RunIdentity | None = None,
        process: Process | None = None,
        writer: Process | None = None,
        **settings: Any,
    ) -> None:
        self.settings = CheckpointConfig(**{**settings, **_typed(settings)})
        self.folder = Path(folder if self.settings.folder is None else self.settings.folder)
        self.identity = identity or RunIdentity(run_id=self._found_run_id() or uuid4().hex)
        self.process = process or Background("checkpoint-removal")
        self.storage = self._new_storage(self.folder, recycle=True)
        self.catalog = Catalog(self.storage)
        self.checkpointer = make_sync_checkpointer(storage=self._storage_at, digest=self.settings.digest)
        self._behind = (
            AsyncCheckpointer(storage=self._storage_at, digest=self.settings.digest, process=writer)
            if _saves_behind(self.settings.save_async)
            else None
        )
        self._flight: _Flight | None = None
        self._owed: Decision | None = None
        self._failed_step: int | None = None
        self._spoilt = False
        self._naming = Naming(self.settings.name, self.settings.suffix)
        self._held: set[str] = set()
        self._rules: SaveRules | None = None
        self._last_saved_step: int | None = None
        self._failures = 0

    def hold_ephemeral(self, name: str) -> None:
        """Hold saves by `ephemeral_save_interval` back until this name is released."""
        self._held.add(name)

    def release_ephemeral(self, name: str) -> None:
        """Take a hold back; one that is not there is no error."""
        self._held.discard(name)

    def wanted_metrics(self) -> dict[str, str]:
        best = self.settings.keep_best
        return {} if best.metric is None else {"keep_best.metric": best.metric}

    def newest(self) -> Path | None:
        """The newest checkpoint of this run, every byte verified; newer ones that are not sound are set aside.

        Raises:
            CheckpointError: there are some, and none is sound.
        """
        entry = newest_sound(self.catalog, self.identity.run_id, str(self.folder))
        return None if entry is None else self.folder / entry.name

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        self._rules = save_rules(self.settings, loop.saving_cadence)
        self._retention = retention_rules(self.settings, loop.saving_cadence)
        if not self.settings.enabled:
            return
        self.checkpointer.format.trial(trainer.checkpoint_state())
        self._name(trainer)
        self.storage.sweep()
        own = self._own()
        if own and not self._is_gone_on_from(trainer):
            raise UserError(
                f"{self.folder} holds checkpoints of this run (the newest is step {own[-1].step}), but this training "
                "does not go on from them, and they would not be replaced",
                cure="Leave ckpt_path out to go on from the newest, or save into another folder.",
            )
        if self._behind is not None:
            log.info("saves are written behind the training (checkpoint.save_async=false turns this off)")
        self._leave_branch([entry for entry in own if entry.step > trainer.progress.step], trainer.progress.step)
        self._last_saved_step = max((one.step for one in own if one.step <= trainer.progress.step), default=None)
        self._retire()

    def next_step(self, trainer: Trainer) -> int | None:
        if not self.settings.enabled or self._rules is None:
            return None
        if self.asked or self._owed is not None:
            return trainer.progress.step + 1
        return next_save_step(self._rules, trainer.progress)

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        if self._behind is not None and self._behind.gate():
            self._spoilt = True

    def gate(self) -> None:
        """Come here before weights are written elsewhere: waits until a save in flight has its copy of them."""
        if self._behind is not None and self._behind.gate(asked=True):
            self._spoilt = True

    def on_checkpoint(self, trainer: Trainer, occasion: Occasion) -> None:
        if not self.settings.enabled or self._rules is None:
            return
        self._try(lambda: self._land(trainer, wait=self._must_land(trainer, occasion)))
        decision = self._why_save(trainer, occasion)
        if decision is not None and self._flight is not None:
            self._try(lambda: self._land(trainer, wait=True))
            decision = self._why_save(trainer, occasion)
        finished = trainer.stop_reason if occasion is Occasion.final else None
        if self._flight is not None and self._flight.step == trainer.progress.step:
            self._flight = replace(self._flight, asked=self._flight.asked or self.asked)
            self.asked = False
        elif self._last_saved_step == trainer.progress.step:
            self._try(lambda: self._amend(self._moment(trainer, occasion), finished))
        elif decision is not None and occasion in _ORDINARY and self._behind is not None:
            self._try(lambda: self._save_behind(trainer, decision))
        elif decision is not None:
            self._try(lambda: self.save(trainer, decision, finished=finished))

    def _must_land(self, trainer: Trainer, occasion: Occasion) -> bool:
        """Whether what is decided now depends on what becomes of the save in flight: never on how fast the disk is."""
        flight, metrics = self._flight, trainer.journal.last
        if flight is None or self._rules is None:
            return False
        if occasion not in _ORDINARY or self._spoilt:
            return True
        if flight.step == trainer.progress.step:
            # Once more the same step's end: only an evaluation since then is news.
            return not _same(flight.metrics, metrics)
        return self._rules.keep_best is not None and self._rules.keep_best.metric in metrics

    def _why_save(self, trainer: Trainer, occasion: Occasion) -> Decision | None:
        assert self._rules is not None
        step = trainer.progress.step
        if step == self._last_saved_step or (step == self._failed_step and occasion is Occasion.step):
            return None
        return why_save(self._rules, self._moment(trainer, occasion)) or self._owed

    def _moment(self, trainer: Trainer, occasion: Occasion) -> Moment:
        assert self._rules is not None
        metrics = dict(trainer.journal.last)
        best = self._rules.keep_best
        return Moment(
            trainer.progress,
            occasion,
            self._last_saved_step,
            loaded=trainer.loaded_from is not None,
            asked=self.asked and occasion is not Occasion.pre_train,
            held=bool(self._held),
            metrics=metrics,
            saved=self._facts() if best is not None and best.metric in metrics else (),
        )

    def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
        self._try(lambda: self._land(trainer, wait=True))

    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Keep what there is, apart from the checkpoints: it is of no step's end, so no resume may take it."""
        try:
            self._land(trainer, wait=True)
        except SaveError as error:
            log.error("%s", error)
        if not isinstance(exception, Exception) or isinstance(exception, SaveError | UserError):
            return
        if not self.settings.enabled or self._rules is None or trainer.progress.step == self._last_saved_step:
            return
        storage = self._new_storage(self.folder / AFTER_EXCEPTION)
        name = self._name(trainer)
        for earlier in storage.names():
            storage.remove(earlier)
        decision = Decision(Kind.ephemeral, f"after {type(exception).__name__}: {exception}"[:500])
        self._write(trainer, storage.root / name, decision, None, exact=False)
        log.warning("the state after the failure is kept in %s; no resume takes it", storage.root / name)

    def finalize(self) -> None:
        if self._behind is not None:
            self._behind.close()
        if not self.storage.settle(_CLEARING_S):
            log.warning(
                "removed checkpoints in %s are still being deleted; the next start goes on with it", self.folder
            )

    def save(self, trainer: Trainer, decision: Decision, *, finished: str | None = None) -> Path:
        """Save this step, durably, and remove what may go now. Returns the checkpoint's path.

        Raises:
            SaveError: nothing was committed; older checkpoints are intact.
        """
        self._land(trainer, wait=True)
        path = self.folder / self._name(trainer)
        self._write(trainer, path, decision, finished)
        self._last_saved_step = trainer.progress.step
        self.asked, self._owed = False, None
        self._committed(trainer, trainer.progress.step, decision, path)
        return path

    def _save_behind(self, trainer: Trainer, decision: Decision) -> None:
        """Begin to save this step; `_land` tells what became of it."""
        assert self._behind is not None
        path, step = self.folder / self._name(trainer), trainer.progress.step
        state = trainer.checkpoint_state()
        trainer.journal.hand_over()
        saving = self._behind.save(
            state,
            path,
            facts=self._facts_of(trainer, decision, None),
            late=_changed_by_the_step(trainer),
            trained=[parameter for parameter in trainer.parameters if parameter.requires_grad],
            before_commit=trainer.journal.make_durable,
        )
        metrics = dict(trainer.journal.last)
        self._flight = _Flight(step, path, decision, saving, metrics, self.asked, self._last_saved_step)
        self._last_saved_step = step
        self.asked, self._owed = False, None

        def tell(written: Future[None]) -> None:
            trainer.attention = True

        saving.written.add_done_callback(tell)

    def _land(self, trainer: Trainer, *, wait: bool) -> None:
        """Take up the save in flight, if it has come to its end, or once it has.

        Raises:
            SaveError: it has failed, and counts no more.
        """
        flight = self._flight
        if flight is None or self._behind is None or not (wait or flight.saving.written.done()):
            return
        if not flight.saving.written.done() and not self._behind.settle(_DRAINING_S):
            raise SaveError(
                f"the save of step {flight.step} has not come to an end in {_DRAINING_S:.0f} s", where=str(flight.path)
            )
        self._flight, self._spoilt = None, False
        try:
            flight.saving.written.result()
        except WeightsMovedError as error:
            # No fault of the disk, and it cannot happen again: the next step makes up for it.
            self._last_saved_step, self._owed = flight.last_saved_step, flight.decision
            self._failed_step = flight.step
            log.error("step %d: %s", flight.step, error)
        except SaveError:
            self._last_saved_step, self._failed_step = flight.last_saved_step, flight.step
            self.asked = self.asked or flight.asked
            raise
        else:
            self._committed(trainer, flight.step, flight.decision, flight.path)

    def _committed(self, trainer: Trainer, step: int, decision: Decision, path: Path) -> None:
        self._failures = 0
        log.info("committed step %d (%s)", step, decision.reason)
        trainer.hooks.call("on_after_save_checkpoint", trainer, path)
        self._retire()

    def kept(self) -> dict[str, str]:
        """Each checkpoint of this run on the disk now, and why it is kept."""
        return why_keep(self._facts(), self._retention) if self._rules is not None else {}

    def _try(self, save: Callable[[], object]) -> None:
        """Save; a failure ends the training, or is told and passed over, as `on_save_error` says."""
        try:
            save()
        except SaveError as error:
            self._failures += 1
            limit = self.settings.max_save_errors
            if self.settings.on_save_error is OnSaveError["raise"] or self._failures > limit:
                raise
            log.error(
                "%s The training goes on (failure %d; %d in a row are passed over).", error, self._failures, limit
            )

    def _write(
        self, trainer: Trainer, path: Path, decision: Decision, finished: str | None, *, exact: bool = True
    ) -> None:
        state = trainer.checkpoint_state()
        trainer.journal.make_durable()
        facts = self._facts_of(trainer, decision, finished, exact=exact)
        self.checkpointer.save(state, path, facts=replace(facts, finite=is_finite(trainer.model)))

    def _facts_of(self, trainer: Trainer, decision: Decision, finished: str | None, *, exact: bool = True) -> Facts:
        progress, identity = trainer.progress, self.identity
        return Facts(
            run_id=identity.run_id,
            attempt=identity.attempt,
            step=progress.step,
            epoch=progress.epoch,
            kind=decision.kind,
            reason=decision.reason,
            finished=finished,
            metrics=dict(trainer.journal.last) if exact else {},
            config_digest=identity.config_digest,
            target_packages=identity.target_packages,
            files=dict(identity.extra_files),
            progress=progress.state_dict(),
        )

    def _amend(self, moment: Moment, finished: str | None) -> None:
        """Complete the manifest of a step that was saved before its evaluation, which a stop had put off.

        Raises:
            SaveError: the manifest is as it was.
        """
        if moment.occasion is not Occasion.pre_train:
            self.asked = False
        entry = next((one for one in self._own() if one.step == moment.now.step), None)
        if entry is None or entry.manifest is None or self._rules is None:
            return
        manifest = entry.manifest
        decision = why_save(self._rules, replace(moment, last_saved_step=None, occasion=_asked_late(moment.occasion)))
        metrics = {**manifest.metrics, **moment.metrics}
        if _same(metrics, manifest.metrics) and finished in (None, manifest.finished):
            return
        if decision is not None and manifest.kind is Kind.ephemeral:
            manifest = replace(manifest, kind=decision.kind, reason=decision.reason)
        whole = replace(manifest, metrics=metrics, finished=finished or manifest.finished)
        try:
            self.storage.amend(entry.name, whole.to_bytes())
        except OSError as error:
            raise SaveError(
                f"the checkpoint could not be completed: {error.strerror or error}",
                where=str(self.folder / entry.name),
                cure="It is intact as it was.",
            ) from error
        log.info("completed step %d (its evaluation is made)", entry.step)
        self._retire()

    def _leave_branch(self, newer: list[Entry], step: int) -> None:
        """Training goes back behind these: refuse, or remove them (set them aside), so that they can never win later.

        One that cannot be read was passed over, not left: it stays.
        """
        left = [entry for entry in newer if is_sound(self.storage, entry)]
        if not left:
            return
        names = ", ".join(entry.name for entry in left)
        if self.settings.newer is not Newer.trash:
            raise UserError(
                f"this goes back to step {step}, but {self.folder} holds newer checkpoints: {names}",
                where="checkpoint.newer",
                cure="To remove them, add checkpoint.newer=trash.",
            )
        if pinned := [entry.name for entry in left if entry.pinned]:
            raise UserError(
                f"this goes back to step {step}, but newer checkpoints are pinned: {', '.join(pinned)}",
                where="checkpoint.newer",
                cure="Unpin them, or copy them to another place.",
            )
        for entry in reversed(left):
            if self.settings.remove is Removal.never:
                # Nothing is ever deleted then; under its hidden name it wins no more.
                self.storage.set_aside(entry.name, f"the training went back to step {step}")
            elif not self.storage.remove(entry.name):
                raise UserError(f"{entry.name} is being read, so it cannot be removed now", cure="Try again later.")
        log.warning("went back to step %d: removed %s", step, names)

    def _retire(self) -> None:
        try:
            removable = why_remove(self._facts(), self._retention)
        except OSError as error:
            log.warning("could not see which checkpoints may go: %s; it will be tried again", error)
            return
        for name, reason in removable.items():
            try:
                removed = self.storage.remove(name)
            except OSError as error:
                log.warning("could not remove checkpoint %s: %s; it will be tried again", name, error)
                continue
            if removed:
                log.debug("removed %s (%s)", name, reason)

    def _is_gone_on_from(self, trainer: Trainer) -> bool:
        """True where the training goes on, whole, from a checkpoint in the folder."""
        source = trainer.loaded_from
        return trainer.goes_on and source is not None and source.absolute().parent == self.folder.absolute()

    def _own(self) -> list[Entry]:
        return self.catalog.valid(self.identity.run_id)

    def _facts(self) -> list[Saved]:
        """What is there, for the policy. One newer than the last that was saved or gone on from was passed over,
        since it cannot be read: it has no say in whether others go."""
        newest = self._last_saved_step
        own = [entry for entry in self._own() if newest is None or entry.step <= newest]
        return [saved for entry in own if (saved := entry.saved()) is not None]

    def _name(self, trainer: Trainer) -> str:
        counts = {**trainer.progress.state_dict(), "run_name": trainer.name, "world_size": 1}
        try:
            return self._naming.name(counts)
        except ValueError as error:
            raise ConfigError(str(error), where="checkpoint.name") from None

    def _found_run_id(self) -> str | None:
        newest = catalog_of(self.folder).newest_valid()
        return newest.manifest.run_id if newest is not None and newest.manifest is not None else None

    def _storage_at(self, root: Path) -> LocalStorage:
        return self.storage if root == self.folder.absolute() else self._new_storage(root)

    def _new_storage(self, root: Path, *, recycle: bool = False) -> LocalStorage:
        return LocalStorage(
            root,
            run_id=self.identity.run_id,
            attempt=self.identity.attempt,
            later=self.process.submit,
            wait=self.process.settle,
            recycle=recycle,
        )


def _saves_behind(wanted: bool | None) -> bool:
    """Whether saves are written behind the training: as wished, else where that takes no processor from it."""
    if wanted is not None:
        return wanted
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable > 1


def _changed_by_the_step(trainer: Trainer) -> list[Tensor]:
    """The tensors that only the optimizer's step changes: its parameters and what it keeps of them."""
    kept = [] if trainer.optimizer is None else trainer.optimizer.state.values()
    states = [value for state in kept for value in state.values() if isinstance(value, Tensor)]
    return [*trainer.parameters, *states]


def _asked_late(occasion: Occasion) -> Occasion:
    """The moment before a new attempt's first step is that of the step which it goes on from."""
    return Occasion.step if occasion is Occasion.pre_train else occasion


def _typed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Choices that come from python, or from a config that was written out, as plain texts and mappings."""
    kinds: dict[str, type[StrEnum]] = {"remove": Removal, "newer": Newer, "on_save_error": OnSaveError}
    typed: dict[str, Any] = {
        name: _choice(f"checkpoint.{name}", settings[name], kind) for name, kind in kinds.items() if name in settings
    }
    if isinstance(best := settings.get("keep_best"), Mapping):
        mode = _choice("checkpoint.keep_best.mode", best.get("mode", Mode.min), Mode)
        typed["keep_best"] = KeepBestConfig(**{**best, "mode": mode})
    return typed


def _choice(key: str, value: Any, kind: type[StrEnum]) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{key} is {value!r}, but it is one of {', '.join(kind)}", where=key) from None


def _same(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Equal metrics; NaN equals NaN here."""
    return first.keys() == second.keys() and all(
        value == second[name] or (math.isnan(value) and math.isnan(second[name])) for name, value in first.items()
    )
