"""Save and load checkpoints of a trainer, and bring it to the step at which a fit begins.

What reads and writes checkpoints is imported where it is needed: a training without them loads none of it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.dtensor import Targets, distributed, targets_of
from trainer_cli.errors import CheckpointError, NoCheckpointError, UserError
from trainer_cli.goodput import Activity
from trainer_cli.loads import LOG_MARKS, VERSIONS, WHOLE, LoadOptions, check_load
from trainer_cli.parallel import check_same
from trainer_cli.schema import SchedulerInterval
from trainer_cli.state import capture_model, capture_rng, clean_name, restore_rng
from trainer_cli.steps import Progress
from trainer_cli.trainer.hooks import CheckpointSaver
from trainer_cli.trainer.lengths import begin_epoch
from trainer_cli.trainer.state import describe, load_all, load_weights, rank_state_of

if TYPE_CHECKING:
    from trainer_cli.checkpoint import Checkpointer
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


class Unset:
    """The default of `ckpt_path`: the newest checkpoint of this run, if there is one, or else the present weights."""


UNSET = Unset()


class Loading:
    """Loads checkpoints into a trainer, and remembers which one its state is from."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._run_id = uuid.uuid4().hex[:12]
        self.is_untouched = True
        """Whether no fit has begun and no checkpoint was read, so that the weights are the first ones."""
        self._has_begun = False
        """Whether a fit has begun."""
        self.start_samples = 0
        """Samples of the run before this fit."""
        self._first_generators: dict[str, Any] | None = None
        """The random state after the trainer was made; None without a seed, where the caller has seeded."""
        self._last_generators: dict[str, Any] | None = None
        """The random state after the trainer was made, or when the last fit ended."""
        self.clear()

    def clear(self) -> None:
        """Forget the checkpoint that was loaded."""
        self.path: Path | None = None
        """The checkpoint that the present state, or a part of it, was loaded from."""
        self.step = 0
        self.resumed = False
        """Whether the training continues from an earlier step."""
        self.rng: dict[str, Any] | None = None
        """The random state of a loaded checkpoint, until it is restored."""
        self._last_generators = self._first_generators

    def load_or_start(
        self, ckpt_path: str | Path | Unset | None, load: LoadOptions, keep_settings: Sequence[str], train_loader: Any
    ) -> None:
        """Bring model, optimizers, schedules and loop to the step at which a fit begins; arguments as in `fit`."""
        trainer = self._trainer
        group, loop = trainer.strategy.group, trainer.loop
        if isinstance(ckpt_path, Unset):
            # A checkpoint of step 0 is resumed only after a fit of this trainer that may have left it in a step.
            ckpt_path, load = self.find_newest(first=self._has_begun), WHOLE
            if ckpt_path is None:
                self._load_first_marks()
        elif ckpt_path is not None:
            from trainer_cli.catalog import refuse_foreign

            ckpt_path = trainer.checkpointer.locate(ckpt_path)
            refuse_foreign(ckpt_path, load.states)
        self._has_begun = True
        # The loop needs the progress before the state is loaded: schedules are made with its lengths.
        progress: Progress | None = trainer.progress
        if ckpt_path is not None and load.resumes:
            progress = Progress.of(trainer.checkpointer.progress(ckpt_path) or {})
        # Before the lengths are learned: all ranks need the same ones.
        loop.learn_first_epoch(train_loader, group)
        if progress is not None and progress.epoch:
            begin_epoch(train_loader, progress.epoch)
            loop.agree_on_length(train_loader, group)
        loop.prepare(trainer, train_loader, progress)
        if ckpt_path is not None:
            self.load(ckpt_path, load, keep_settings, train_loader)
            check_same(group, {"step": trainer.progress.step, "number of samples": trainer.progress.samples})
        else:
            trainer.make_schedulers()
            # An earlier fit of this trainer, or a loaded state: the records up to this step stay.
            self.resumed = self.resumed or trainer.progress.step > 0
        epoch = trainer.progress.epoch
        loop.start_at(train_loader, trainer.progress)
        if trainer.progress.epoch != epoch:
            trainer.schedulers.step(trainer, SchedulerInterval.epoch)
        self.start_samples = trainer.progress.samples

    def _load_first_marks(self) -> None:
        """Let the loggers drop the records of a first try that has left no checkpoint after step 0."""
        try:
            first = self.find_newest()
        except CheckpointError:
            return  # It is damaged, so nothing tells which records are of this training.
        if first is not None:
            trainer = self._trainer
            trainer.metric_logger.load_state_dict(trainer.checkpointer.read(first, [LOG_MARKS]).get(LOG_MARKS))

    def find_newest(self, *, first: bool = True) -> Path | None:
        """The newest valid checkpoint of this run; None if there is no checkpoint, or no callback that saves.

        Args:
            first: see `CheckpointSaver.newest`.
        """
        trainer = self._trainer
        if trainer.checkpoint is None:
            return None

        from trainer_cli.checkpoint import GroupVerifier

        group = trainer.strategy.group
        # Rank 0 alone lists the folder, so that all ranks choose the same; all verify files.
        return group.on_main(partial(trainer.checkpoint.newest, first=first), GroupVerifier(group))

    def find_all(self) -> list[Path]:
        """The complete checkpoints in the folder of this run, in the order of their steps."""
        saver = self._trainer.checkpoint
        if saver is None:
            return []

        from trainer_cli.catalog import Catalog

        return self._trainer.strategy.group.on_main(Catalog.of(saver.folder).complete_paths)

    def newest_or_refuse(self) -> Path:
        """The newest valid checkpoint of this run.

        Raises:
            NoCheckpointError: the run has no valid checkpoint.
        """
        folder = self._saver().folder
        if (newest := self.find_newest()) is None:
            raise NoCheckpointError("this run has no checkpoint yet", where=str(folder))
        return newest

    def _saver(self) -> CheckpointSaver:
        """The callback that saves; raise UserError if the trainer has none."""
        if (saver := self._trainer.checkpoint) is None:
            raise UserError("this trainer has no folder of checkpoints", cure="Give a path, or checkpoint= to Trainer.")
        return saver

    def load(self, path: str | Path, load: LoadOptions, keep_settings: Sequence[str], train_loader: Any) -> None:
        """Load a checkpoint; see `Trainer.load_checkpoint`."""
        with self._trainer.metric_logger.time.during(Activity.loading):
            self._load(path, load, keep_settings, train_loader)

    def _load(self, path: str | Path, load: LoadOptions, keep_settings: Sequence[str], train_loader: Any) -> None:
        """Read a checkpoint, and load the weights alone or all states, as `load` says."""
        from trainer_cli.catalog import ForeignKind

        trainer = self._trainer
        path = trainer.checkpointer.locate(path)
        trainer.make_schedulers()
        average = None
        if load.average and load.weights_alone and ForeignKind.of(path) is None:
            average = trainer.checkpointer.average(path)
        # An average of the weights is in the state of its callback.
        state = self.read(path, load, *(["callbacks"] if average is not None else []))
        if load.weights_alone:
            load_weights(trainer, state, load, path, average)
        else:
            # A checkpoint has the optimizer's state of the training mode.
            if load.takes("optimizer"):
                trainer.modes.train()
            load_all(trainer, train_loader, state, load, keep_settings, path)
        if load.whole:
            trainer.hooks.call("on_load_checkpoint", trainer, state)
        self.resumed = load.resumes

    def read(self, path: Path, load: LoadOptions, *more: str) -> dict[str, Any]:
        """The state in a checkpoint, or what is to be loaded of it and `more` of its keys, as changed by hooks."""
        trainer = self._trainer
        # Before the hooks and the reading, either of which may change the model and then fail.
        self.is_untouched = False
        trainer.hooks.call("on_before_load_checkpoint", trainer, path)
        # If reading fails on one rank, all ranks must raise: the others would wait for it in the next collective.
        with trainer.strategy.group.checking("while a checkpoint was read"):
            state = self._read(path, load, more)
        trainer.hooks.call("preprocess_checkpoint", trainer, state)
        self.path, self.step = path, int(state.get("progress", {}).get("step", 0))
        return state

    def read_state(self, path: Path) -> dict[str, Any]:
        """The whole state in a checkpoint as this rank saved it, without hooks; nothing is loaded. Collective."""
        checkpointer, targets = self._trainer.checkpointer, self._sharded_targets(WHOLE)
        state = checkpointer.read(path) if targets is None else checkpointer.read(path, targets=targets)
        return dict(rank_state_of(state, self._trainer))

    def _read(self, path: Path, load: LoadOptions, more: Sequence[str]) -> dict[str, Any]:
        """Read a checkpoint; of what is for sharded tensors, read this rank's part.

        Raises:
            CheckpointError: the path is no checkpoint, or it is damaged, or lacks what is to be loaded.
            UserError: the checkpoint is of another program, and more than its weights is to be loaded.
        """

        from trainer_cli.catalog import ForeignKind

        checkpointer = self._trainer.checkpointer
        targets = self._sharded_targets(load)
        if ForeignKind.of(path) is not None:
            return _read_foreign_state(path, load, targets)
        left_out = checkpointer.left_out(path)
        check_load(str(path), left_out, load)
        if left_out and load.resumes:
            log.warning("%s was saved without %s: training continues with new ones", path, ", ".join(left_out))
        keys = load.keys()
        keys = None if keys is None else [*keys, *more]
        state = checkpointer.read(path, keys) if targets is None else checkpointer.read(path, keys, targets=targets)
        needed = (["model"] if load.takes("model") else []) + (["progress"] if load.resumes else [])
        if lacking := [name for name in needed if name not in state]:
            raise CheckpointError(
                f"the checkpoint has no {' and no '.join(lacking)}, so no run has saved it", where=str(path)
            )
        return state

    def _sharded_targets(self, load: LoadOptions) -> Targets | None:
        """The sharded tensors of the model, by their names in a checkpoint."""
        tensors = capture_model(self._trainer.model)
        return targets_of(tensors, lambda name: clean_name(load.renamed([name])[name], tensors))

    def last_metrics(self) -> dict[str, float]:
        """The last record of metrics. A finished run that was resumed has made no step: use that of its checkpoint."""
        trainer = self._trainer
        metrics: Mapping[str, float] = trainer.metric_logger.last
        made_no_step = self.resumed and trainer.progress.step == self.step
        if not metrics and made_no_step and self.path is not None:
            metrics = trainer.checkpointer.metrics(self.path)
        return dict(metrics)

    def save(self, path: str | Path | None) -> Path:
        """Save a checkpoint by hand; see `Trainer.save_checkpoint`."""
        trainer = self._trainer
        if path is None:
            if trainer.fitting:
                raise UserError(
                    "in a fit, the run's own checkpoints are saved at the end of a step",
                    cure="Call trainer.ask_for_save(), or give a path.",
                )
            return self._saver().save_now(trainer)

        from trainer_cli.catalog import path_to_save

        group = trainer.strategy.group
        counts = {**trainer.progress.state_dict(), "run_name": trainer.name, "world_size": group.world_size}
        path = path_to_save(path, counts, ranks=group.world_size)
        metadata = replace(describe(trainer), run_id=self._run_id)
        # Not the run's checkpointer, which may have a save in flight.
        checkpointer = self.new_checkpointer()
        checkpointer.save(trainer.checkpoint_state, path, metadata=metadata, trained=trainer.trained)
        # If a hook fails on rank 0, all ranks must raise: the others would wait for it in the next collective.
        with group.checking("in on_after_save_checkpoint"):
            if group.is_main:
                trainer.hooks.call("on_after_save_checkpoint", trainer, path)
        return path

    def new_checkpointer(self) -> Checkpointer:
        """A checkpointer without a background writer, for all ranks."""

        from trainer_cli.checkpoint import make_sync_checkpointer

        checkpointer = make_sync_checkpointer()
        checkpointer.join(self._trainer.strategy.group)
        return checkpointer

    def keep_rng(self, rng: dict[str, Any] | None) -> None:
        """Keep a random state until `restore_rng`."""
        self.rng = rng

    def keep_generators(self) -> None:
        """Keep the random state for the next fit, so that what other code draws before it changes no training."""
        if self._trainer.seed is not None:
            self._last_generators = capture_rng()
            self._first_generators = self._first_generators or self._last_generators

    def kept_generators(self) -> dict[str, Any] | None:
        """The random state that the training will continue with; None if it is the present one."""
        if self._trainer.fitting:
            return self.rng
        return self.rng or self._last_generators

    def restore_generators(self) -> None:
        """Restore the random state that `keep_generators` kept, if there is a seed.

        Also right before the first step, if a fit continues: its start may draw numbers, which a single fit draws once.
        """
        if self._last_generators is not None:
            restore_rng(self._last_generators)
            if self._trainer.progress.step > 0 and self.rng is None:
                self.rng = self._last_generators

    def restore_rng(self) -> None:
        """Restore the random state of the loaded checkpoint, last before the first step."""
        if self.rng is not None:
            restore_rng(self.rng, warn=True)
            self.rng = None
        # If the first step fails, the next fit makes it with the same numbers.
        self.keep_generators()


def _read_foreign_state(path: Path, load: LoadOptions, targets: Targets | None) -> dict[str, Any]:
    """Read the weights, and the step if known, of a checkpoint of another program."""
    from trainer_cli.catalog import refuse_foreign
    from trainer_cli.parts import READ_FOREIGN

    refuse_foreign(path, load.states)
    foreign = READ_FOREIGN.need(str(path))(path, allow_pickle=load.allow_pickle)
    state: dict[str, Any] = {"model": foreign.model if targets is None else distributed(dict(foreign.model), targets)}
    state[VERSIONS] = foreign.versions
    if foreign.step is not None:
        state["progress"] = {"step": foreign.step}
    log.info("%s is a %s", path, foreign.program)
    return state
