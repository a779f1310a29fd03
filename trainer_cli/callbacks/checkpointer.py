"""The CheckpointerCallback: asks the policy when to save and what may go, and has the checkpointer do it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trainer_cli.checkpoint.catalog import Catalog, Entry
from trainer_cli.checkpoint.checkpointer import Facts, make_sync_checkpointer
from trainer_cli.checkpoint.naming import checkpoint_name
from trainer_cli.checkpoint.policy import (
    Decision,
    Occasion,
    RetentionRules,
    Saved,
    SaveRules,
    next_save_step,
    why_keep,
    why_remove,
    why_save,
)
from trainer_cli.checkpoint.snapshot import is_finite
from trainer_cli.checkpoint.soundness import catalog_of, newest_sound
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.config.schema import CheckpointConfig, Removal
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.trainer.duration import Duration
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.loops import TrainingLoop
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Whose checkpoints these are, and what travels with each of them."""

    run_id: str = field(default_factory=lambda: uuid4().hex)
    attempt: int = 1
    config_digest: str | None = None
    target_packages: tuple[str, ...] = ()
    extra_files: Mapping[str, bytes] = field(default_factory=dict)


class CheckpointerCallback(Callback):
    """Saves at intervals, at fixed steps, at the end and on a stop; keeps and removes by rule.

    Args:
        folder: where checkpoints live, each in a directory `step{N}`.
        identity: the run they belong to. By default a new run, or the one that `folder` already holds.
        settings: the fields of `CheckpointConfig` by name, for example `save_interval=250`.
    """

    def __init__(
        self, folder: str | Path = "checkpoints", *, identity: RunIdentity | None = None, **settings: Any
    ) -> None:
        self.settings = CheckpointConfig(**settings)
        self.settings.remove = _removal(self.settings.remove)
        self.folder = Path(folder)
        self.identity = identity or RunIdentity(run_id=self._found_run_id() or uuid4().hex)
        self.storage = LocalStorage(self.folder, run_id=self.identity.run_id, attempt=self.identity.attempt)
        self.catalog = Catalog(self.storage)
        self.checkpointer = make_sync_checkpointer(storage=self._storage_at, digest=self.settings.digest)
        self._rules: SaveRules | None = None
        self._last_saved_step: int | None = None

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
        settings = self.settings
        cooldown = settings.ephemeral_cooldown
        save_interval = loop.cadence(settings.save_interval)
        self._rules = SaveRules(
            save_interval=save_interval,
            ephemeral_save_interval=loop.cadence(settings.ephemeral_save_interval),
            ephemeral_cooldown=None if cooldown is None else Duration.parse(cooldown),
            fixed_steps=frozenset(settings.fixed_steps),
            pre_train=settings.pre_train_checkpoint,
            save_final=settings.save_final,
            save_on_stop=settings.save_on_stop,
        )
        self._retention = RetentionRules(
            remove=settings.remove,
            max_checkpoints=settings.max_checkpoints,
            fixed_steps=frozenset(settings.fixed_steps),
            save_interval=save_interval,
        )
        if not settings.enabled:
            return
        self.checkpointer.format.trial(trainer.checkpoint_state())
        self.storage.sweep()
        saved = [entry.step for entry in self._own()]
        if saved and not self._is_gone_on_from(trainer):
            raise UserError(
                f"{self.folder} holds checkpoints of this run (the newest is step {max(saved)}), but this training "
                "does not go on from them, and they would not be replaced",
                cure="Leave ckpt_path out to go on from the newest, or save into another folder.",
            )
        self._last_saved_step = max((step for step in saved if step <= trainer.progress.step), default=None)
        self._retire()

    def next_step(self, trainer: Trainer) -> int | None:
        if not self.settings.enabled or self._rules is None:
            return None
        return next_save_step(self._rules, trainer.progress)

    def on_checkpoint(self, trainer: Trainer, occasion: Occasion) -> None:
        if not self.settings.enabled or self._rules is None:
            return
        decision = why_save(
            self._rules,
            trainer.progress,
            self._last_saved_step,
            moment=occasion,
            loaded=trainer.loaded_from is not None,
        )
        if decision is not None:
            self.save(trainer, decision, finished=trainer.stop_reason if occasion is Occasion.final else None)

    def save(self, trainer: Trainer, decision: Decision, *, finished: str | None = None) -> Path:
        """Save this step, durably, and remove what may go now. Returns the checkpoint's path."""
        progress, identity = trainer.progress, self.identity
        path = self.folder / checkpoint_name(progress.step)
        state = trainer.checkpoint_state()
        trainer.journal.make_durable()
        facts = Facts(
            run_id=identity.run_id,
            attempt=identity.attempt,
            step=progress.step,
            epoch=progress.epoch,
            kind=decision.kind,
            reason=decision.reason,
            finished=finished,
            metrics=dict(trainer.journal.last),
            finite=is_finite(trainer.model),
            config_digest=identity.config_digest,
            target_packages=identity.target_packages,
            files=dict(identity.extra_files),
        )
        self.checkpointer.save(state, path, facts=facts)
        self._last_saved_step = progress.step
        log.info("committed step %d (%s)", progress.step, decision.reason)
        trainer.hooks.call("on_after_save_checkpoint", trainer, path)
        self._retire()
        return path

    def kept(self) -> dict[str, str]:
        """Each checkpoint of this run on the disk now, and why it is kept."""
        return why_keep(self._facts(), self._retention) if self._rules is not None else {}

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
        """The finite ones, for retention. One newer than the last that was saved or gone on from was passed over,
        since it cannot be read: it has no say in whether others go."""
        newest = self._last_saved_step
        own = [entry for entry in self._own() if newest is None or entry.step <= newest]
        return [saved for entry in own if (saved := entry.saved()) is not None]

    def _found_run_id(self) -> str | None:
        newest = catalog_of(self.folder).newest_valid()
        return newest.manifest.run_id if newest is not None and newest.manifest is not None else None

    def _storage_at(self, root: Path) -> LocalStorage:
        if root == self.folder.absolute():
            return self.storage
        return LocalStorage(root, run_id=self.identity.run_id, attempt=self.identity.attempt)


def _removal(name: str) -> Removal:
    """The rule of that name; from python it may come as a plain string."""
    try:
        return Removal(name)
    except ValueError:
        known = ", ".join(Removal)
        raise ConfigError(
            f"checkpoint.remove is {name!r}, but it is one of {known}", where="checkpoint.remove"
        ) from None
