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
        self._copied: Path | None = None

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        if trainer.checkpoint is None:
            raise UserError(
                "SaveCheckpointState copies checkpoints, and this trainer saves none",
                cure="Give the trainer a CheckpointerCallback, as checkpoint=.",
            )
        self._newest = self._copied = None
        self._interval = loop.checkpoint_interval("every", self._every)

    def on_after_save_checkpoint(self, trainer: Trainer, path: Path) -> None:
        # One that was saved by hand elsewhere is none of the run's.
        if trainer.checkpoint is None or path.absolute().parent != trainer.checkpoint.folder.absolute():
            return
        self._newest = path
        manifest = Catalog.of(path.parent).entry(path.name).manifest
        if manifest is None or manifest.kind is not CheckpointKind.regular:
            return
        now = Progress.of(manifest.progress or {})
        if self._interval is None or (now is not None and self._interval.due(now)):
            self._copy(trainer, path, manifest)

    def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
        stop = loop.why_stop(trainer)
        if self._newest is None or self._newest == self._copied or stop is None or not stop.finished:
            return
        manifest = Catalog.of(self._newest.parent).entry(self._newest.name).manifest
        if manifest is not None:
            self._copy(trainer, self._newest, manifest)

    def _copy(self, trainer: Trainer, path: Path, manifest: Manifest) -> None:
        # The committed files have the parts of all ranks; rank 0 reads them.
        if trainer.strategy.group.rank != 0:
            return
        target = (self.folder if trainer.run_dir is None else trainer.run_dir / self.folder) / path.name
        options, average = self._options, manifest.average
        keeps_average = average is not None and options.takes_callback(average)
        # Metrics of an average belong to a copy that has it, in the place of the weights or beside them.
        measured = average is None or keeps_average or options.weights_alone
        metadata = CheckpointMetadata(
            run_id=manifest.run_id,
            step=manifest.step,
            epoch=manifest.epoch,
            reason=f"{', '.join(options.states)} of {path}"[:500],
            metrics=manifest.metrics if measured else {},
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
            alone = average is not None and options.weights_alone
            keys = [*(options.keys() or ()), *(["callbacks"] if alone else [])]
            state = trainer.checkpointer.read(path, keys)
            if options.named_callbacks:
                callbacks = state.get("callbacks", {}).items()
                state = {**state, "callbacks": {name: own for name, own in callbacks if options.takes_callback(name)}}
            if alone:
                state = {**state, "model": select_weights(state, str(path), average)}
                del state["callbacks"]
            # Alone: the other ranks do not take part.
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
