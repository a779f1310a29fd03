"""SaveCheckpointState: save a part of some checkpoints beside them, such as the weights alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.catalog import Catalog
from trainer_cli.checkpoint import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.errors import ConfigError, SaveError, UserError
from trainer_cli.files import as_path
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.loads import STATES, LoadOptions
from trainer_cli.manifest import Manifest
from trainer_cli.parallel import ALONE
from trainer_cli.policy import CheckpointKind
from trainer_cli.state import select_weights
from trainer_cli.steps import Interval, Progress
from trainer_cli.tensor_files import read_verified
from trainer_cli.trainer import Callback
from trainer_cli.values import check_duration

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer, TrainingLoop

log = logging.getLogger(__name__)


class SaveCheckpointState(Callback):
    """Copies chosen states of regular checkpoints into another folder, once each is committed: a checkpoint of the
    same name, for `ckpt=` and `train validate`. Retention never removes it.

    Args:
        states: of model, optimizer, schedulers, progress, callbacks and rng.
        every: a duration: which regular checkpoints, those at whose step this is due; null: each. The one at the
            end of the run is always copied.
        folder: where, relative to the run directory.
    """

    measures_only = True
    writes = ("folder",)

    def __init__(
        self, states: Sequence[str] = ("model",), every: int | str | None = None, folder: str = "states"
    ) -> None:
        self._options = LoadOptions(states=[states] if isinstance(states, str) else list(states))
        if self._options.whole:
            raise ConfigError("states is all, which every checkpoint has already", location="states")
        self._every = check_duration("every", every)
        self.folder = as_path(folder)
        self._interval: Interval | None = None
        self._newest: Path | None = None
        """The last checkpoint that the run has committed."""
        self._copied: Path | None = None
        """The last checkpoint of which states were copied."""

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Find the steps to copy at. Refuse a trainer that saves nothing."""
        if trainer.checkpoint is None:
            raise UserError(
                "SaveCheckpointState copies checkpoints, and this trainer saves none",
                cure="Give the trainer a CheckpointerCallback, as checkpoint=.",
            )
        self._newest = self._copied = None
        self._interval = loop.checkpoint_interval("every", self._every)

    def on_after_save_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Copy the states of a regular checkpoint of this run, if the interval is due at its step."""
        saver = trainer.checkpoint
        # A checkpoint that was saved by hand elsewhere does not belong to the run.
        if saver is None or path.absolute().parent != saver.folder.absolute():
            return
        self._newest = path
        manifest = Catalog.of(path.parent).entry(path.name).manifest
        if manifest is None or manifest.kind is not CheckpointKind.regular:
            return
        progress = Progress.of(manifest.progress or {})
        is_due = self._interval is None or (progress is not None and self._interval.due(progress))
        if is_due:
            self._copy(trainer, path, manifest)

    def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
        """Copy the states of the last checkpoint of a finished run, if that was not done."""
        stop = loop.why_stop(trainer)
        is_finished = stop is not None and stop.finished
        if not is_finished or self._newest is None or self._newest == self._copied:
            return
        manifest = Catalog.of(self._newest.parent).entry(self._newest.name).manifest
        if manifest is not None:
            self._copy(trainer, self._newest, manifest)

    def _copy(self, trainer: Trainer, path: Path, manifest: Manifest) -> None:
        """Save the chosen states of the checkpoint at `path` under its name in the other folder; log a failure."""
        # The committed files have the parts of all ranks; rank 0 reads them.
        if trainer.strategy.group.rank != 0:
            return
        target = (self.folder if trainer.run_dir is None else trainer.run_dir / self.folder) / path.name
        options, average = self._options, manifest.average
        keeps_average = average is not None and options.takes_callback(average)
        # Metrics of an average belong to a copy that has it, in the place of the weights or beside them.
        has_metrics = average is None or keeps_average or options.weights_alone
        metadata = CheckpointMetadata(
            run_id=manifest.run_id,
            step=manifest.step,
            epoch=manifest.epoch,
            reason=f"{', '.join(options.states)} of {path}"[:500],
            metrics=manifest.metrics if has_metrics else {},
            average=average if keeps_average else None,
            left_out=tuple(state for state in STATES if state in manifest.left_out or not options.takes(state)),
            config_digest=manifest.config_digest,
            target_packages=manifest.target_packages,
            files=_config(path, manifest),
            progress=dict(manifest.progress or {}),
            samples=manifest.samples,
            source=manifest.source,
        )
        try:
            keys = list(options.keys() or ())
            # Without its callback the average takes the place of the weights, so that evaluations see it.
            replaces_weights = average is not None and options.weights_alone
            if replaces_weights:
                keys.append("callbacks")
            state = trainer.checkpointer.read(path, keys)
            if options.named_callbacks:
                callbacks = state.get("callbacks", {})
                chosen = {name: saved for name, saved in callbacks.items() if options.takes_callback(name)}
                state = {**state, "callbacks": chosen}
            if replaces_weights:
                state = {**state, "model": select_weights(state, str(path), average)}
                del state["callbacks"]
            # Not with the group: the other ranks do not take part.
            make_sync_checkpointer(group=ALONE).save(state, target, metadata=metadata, overwrite=False)
        except SaveError as error:
            log.error("%s; training continues", error)
            return
        self._copied = path
        log.info("saved %s of step %d to %s", ", ".join(options.states), manifest.step, target)


def _config(path: Path, manifest: Manifest) -> dict[str, bytes]:
    """The config in a checkpoint, for `train validate` of the copy."""
    if CONFIG_FILE not in manifest.files:
        return {}
    with Catalog.of(path.parent).storage.reading(path.name) as folder:
        return {CONFIG_FILE: read_verified(folder, manifest, CONFIG_FILE)}
