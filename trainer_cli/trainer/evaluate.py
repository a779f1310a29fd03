"""Evaluate the model on loaders: in the middle of a training, at its end, and of checkpoints."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint import model_state
from trainer_cli.checkpoint.load_options import LoadOptions
from trainer_cli.config.schema import SchedulerInterval
from trainer_cli.trainer.forward_state import ForwardState
from trainer_cli.trainer.metric_logger import EVALUATING, metrics_in
from trainer_cli.trainer.progress import Progress
from trainer_cli.trainer.state import load_for_evaluation
from trainer_cli.trainer.validation_loop import Due, EvaluationInterruptedError, ValidationLoop, exceptions_reported

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metrics of one checkpoint on one validation loader."""

    path: Path | None
    step: int
    loader: str
    metrics: dict[str, float]


def evaluate(trainer: Trainer, due: Due, *, is_last: bool) -> bool:
    """Evaluate on the loaders that are due and log `LOADER/K`. False if a stop was requested meanwhile."""
    record = trainer.metric_logger.record
    before, of_model, of_step = dict(record), ForwardState(trainer.model), copy.deepcopy(trainer.step.state_dict())
    try:
        with trainer.metric_logger.pause(EVALUATING, trainer.progress):
            _run(trainer, due, is_last=is_last)
            if trainer.hooks["on_after_evaluation"] or trainer.schedulers.has(SchedulerInterval.evaluation):
                own = metrics_in({key: value for key, value in record.items() if before.get(key) is not value})
                # An evaluation of a callback's own may differ between ranks, and no decision may.
                metrics = trainer.strategy.group.broadcast(own)
                trainer.hooks.call("on_after_evaluation", trainer, metrics)
                trainer.schedulers.step(trainer, SchedulerInterval.evaluation, metrics, all_metrics=due.is_all)
    except EvaluationInterruptedError:
        # The next attempt makes the whole evaluation with the model as it is now.
        of_model.restore()
        if of_step:
            trainer.step.load_state_dict(of_step)
        record.clear()
        record.update(before)
        return False
    trainer.progress.evaluated_step = trainer.progress.step
    return True


def evaluate_rest(trainer: Trainer, due: Due) -> None:
    """At an end that the last evaluation caused: evaluate on the loaders that were not due, and let callbacks make
    their last evaluations."""
    try:
        with trainer.metric_logger.pause(EVALUATING, trainer.progress):
            _run(trainer, due, is_last=True)
    except EvaluationInterruptedError:
        log.warning("the run was stopped before its last evaluation on %s", ", ".join(due.loaders) or "callbacks")


def evaluate_checkpoint(
    trainer: Trainer, loaders: Mapping[str, Any], path: Path | None, load: LoadOptions, loop: ValidationLoop | None
) -> list[Evaluation]:
    """The metrics of a checkpoint on each loader; None: of the present weights.

    Outside of a fit the loggers get them, and what callbacks logged meanwhile, as a record of the checkpoint's step.

    Args:
        loop: evaluates each loader; None: those of the training loop.
    """
    at, epoch = trainer.progress, trainer.epoch_reached()
    if path is not None:
        evaluating = any(callback.evaluates for callback in trainer.callbacks.values())
        state = trainer.read_checkpoint(path, load, *(["callbacks"] if evaluating else []))
        load_for_evaluation(trainer, state, load, path)
        at = Progress(trainer.loaded_step, int(state.get("progress", {}).get("epoch", 0)))
        epoch = float(at.epoch)
    record = trainer.metric_logger.record
    before = dict(record)
    record.clear()
    _run(trainer, Due(loaders), is_last=True, loop=loop)
    rows: dict[str, dict[str, float]] = {name: {} for name in loaders}
    for key, value in metrics_in(record).items():
        # The longest: one loader may be called `easy`, and another `easy/long`.
        fitting = [name for name in loaders if key.startswith(f"{name}/")]
        name = max(fitting, key=len, default=key.partition("/")[0])
        rows.setdefault(name, {})[key.removeprefix(f"{name}/")] = value
    if not trainer.fitting:
        trainer.metric_logger.flush_evaluation(at, epoch)
    record.clear()
    record.update(before)
    return [Evaluation(path, trainer.loaded_step, name, metrics) for name, metrics in rows.items()]


def _run(trainer: Trainer, due: Due, *, is_last: bool, loop: ValidationLoop | None = None) -> None:
    """Evaluate on the loaders, and let callbacks evaluate; random numbers drawn meanwhile change no training."""
    rng = model_state.capture_rng()
    if trainer.rng is not None:
        # A pending evaluation of an earlier attempt: use the random state that it would have had.
        model_state.restore_rng(trainer.rng)
    try:
        with trainer.modes.evaluating(), exceptions_reported(trainer), ExitStack() as stack:
            trainer.hooks.call("on_enter_validate_all", trainer, stack, due.loaders)
            for name, loader in due.loaders.items():
                trainer.evaluating = loop or trainer.loop.validation_of(name)
                with trainer.name_scope(name):
                    means = trainer.evaluating.run(trainer, loader, name)
                trainer.metric_logger.add({f"{name}/{key}": value for key, value in means.items()})
            if due.callbacks:
                trainer.hooks.call("run_validation", trainer, is_last)
    finally:
        model_state.restore_rng(rng)
