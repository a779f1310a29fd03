"""Evaluate the model on loaders: in the middle of a training, at its end, and of checkpoints.

One batch of each validation loader before the first step: is every metric reported that a callback needs?
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint import model_state
from trainer_cli.checkpoint.find import expanded
from trainer_cli.core.load_options import LoadOptions
from trainer_cli.core.patterns import did_you_mean
from trainer_cli.core.progress import Progress
from trainer_cli.core.schema import TRAIN_PREFIX, SchedulerInterval
from trainer_cli.errors import UserError
from trainer_cli.trainer.hooks import Callback, second_to
from trainer_cli.trainer.lengths import length_of
from trainer_cli.trainer.loading import Unset
from trainer_cli.trainer.metric_logger import EVALUATING, metrics_in
from trainer_cli.trainer.model_call import ForwardState
from trainer_cli.trainer.setup import check_type, loader_settings, name_loaders
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


def evaluate_remaining(trainer: Trainer, due: Due) -> None:
    """At an end that the last evaluation caused: evaluate on the loaders that were not due, and let callbacks make
    their last evaluations."""
    try:
        with trainer.metric_logger.pause(EVALUATING, trainer.progress):
            _run(trainer, due, is_last=True)
    except EvaluationInterruptedError:
        log.warning("the run was stopped before its last evaluation on %s", ", ".join(due.loaders) or "callbacks")


def evaluate_all(
    trainer: Trainer,
    val_loaders: Any,
    ckpt_paths: str | Path | Iterable[str | Path | None] | Unset,
    load: LoadOptions,
    loop: ValidationLoop | None,
) -> list[Evaluation]:
    """Evaluate every checkpoint on every loader; arguments as of `Trainer.validate_all`."""
    with ExitStack() as stack:
        stack.callback(trainer.requests.clear)
        if not trainer.fitting:
            stack.enter_context(trainer.recording.opened())
            stack.enter_context(_finalized(trainer))
        paths = _find_paths(trainer, ckpt_paths)
        settings = loader_settings(trainer.seed, trainer.device, trainer.strategy.group)
        loaders = name_loaders(val_loaders, settings)
        load = replace(load, states=("model",))
        if loop is not None:
            trainer.hooks.add_family(check_type("loop", loop, ValidationLoop).hook)
        stack.enter_context(trainer.logging.shown())
        return [row for path in paths for row in evaluate_checkpoint(trainer, loaders, path, load, loop)]


@contextmanager
def _finalized(trainer: Trainer) -> Iterator[None]:
    """Let callbacks clean up after the block; a second error becomes a note of the first."""
    try:
        yield
    except BaseException as error:
        with second_to(error):
            trainer.hooks.call_all("finalize")
        raise
    trainer.hooks.call_all("finalize")


def _find_paths(
    trainer: Trainer, ckpt_paths: str | Path | Iterable[str | Path | None] | Unset
) -> Sequence[Path | None]:
    """The checkpoints that are named, globs expanded; None for the present weights."""
    if isinstance(ckpt_paths, Unset):
        newest = trainer.loading.find_newest() if trainer.loading.is_untouched else None
        if newest is not None:
            log.info("evaluating %s, the newest checkpoint of this run", newest)
        return [newest]
    patterns: Iterable[Any] = [ckpt_paths]
    if isinstance(ckpt_paths, Iterable) and not isinstance(ckpt_paths, str):
        patterns = ckpt_paths
    paths: list[Path | None] = []
    for pattern in patterns:
        paths += [None] if pattern is None else expanded(pattern)
    return paths


def evaluate_checkpoint(
    trainer: Trainer, loaders: Mapping[str, Any], path: Path | None, load: LoadOptions, loop: ValidationLoop | None
) -> list[Evaluation]:
    """The metrics of a checkpoint on each loader; None: of the present weights.

    Outside of a fit the loggers get them, and what callbacks logged meanwhile, as a record of the checkpoint's step.

    Args:
        loop: evaluates each loader; None: those of the training loop.
    """
    at, epoch = trainer.progress, trainer.loop.epochs_at(trainer.progress)
    if path is not None:
        evaluating = any(callback.evaluates for callback in trainer.callbacks.values())
        state = trainer.loading.read(path, load, *(["callbacks"] if evaluating else []))
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
                loader_loop = loop or trainer.loop.validation_of(name)
                trainer.set_evaluating(loader_loop)
                with trainer.name_scope(name):
                    means = loader_loop.run(trainer, loader, name)
                trainer.metric_logger.add({f"{name}/{key}": value for key, value in means.items()})
            if due.callbacks:
                trainer.hooks.call("run_validation", trainer, is_last)
    finally:
        model_state.restore_rng(rng)


_SAVER = "checkpoint"
_NO_DATA = "There is no validation data: give some, or name a metric of the training, such as train/loss."
_EVALUATION = ("on_enter_validate_all", "on_enter_validate", "run_validation")


def sanity_check(trainer: Trainer, val_loaders: Mapping[str, Any]) -> None:
    """Refuse an empty validation loader, and a metric that a callback or scheduler needs and nothing reports.

    Nothing is evaluated if no metric is needed and `loop.eval_sanity_steps` is null. Metrics of the training are
    checked with its first batch.

    `run_validation` is called only if the loaders do not report all of them. The check has no lasting effect: its
    record is dropped; parameters, buffers and extra states of the model, the states of the step and of callbacks, and
    random generators are restored; and `trainer.sanity_checking` is True meanwhile, for callbacks that write or count
    elsewhere.

    Raises:
        UserError: naming the loader; or the setting, and the nearest metric that is reported.
    """
    for name, loader in val_loaders.items():
        # Otherwise it is found at the first evaluation, which may be at the end of the training.
        if length_of(loader) == 0:
            raise UserError(f"the validation loader '{name}' has no batches", cure="Check data and data.batch_size.")
    wanted = _wanted(trainer)
    of_training = {setting: metric for setting, metric in wanted.items() if metric.startswith(TRAIN_PREFIX)}
    trainer.loop.training_log.expect_metrics(of_training, trainer.loop.log_interval)
    wanted = {setting: metric for setting, metric in wanted.items() if setting not in of_training}
    if not wanted and trainer.loop.settings.eval_sanity_steps is None:
        return
    try:
        with _without_a_trace(trainer):
            reported = _reported(trainer, val_loaders, set(wanted.values()))
    except EvaluationInterruptedError:
        return
    for setting, metric in wanted.items():
        if metric not in reported:
            known = f"Reported are {', '.join(sorted(reported)[:12])}." if reported else _NO_DATA
            raise UserError(
                f"{setting} is '{metric}', which no validation loader or callback reports",
                cure=did_you_mean(metric, reported).strip() or known,
            )


def _wanted(trainer: Trainer) -> dict[str, str]:
    """Setting -> metric."""
    wanted = trainer.schedulers.wanted_metrics()
    for name, callback in trainer.callbacks.items():
        place = name if name == _SAVER else f"callbacks.{name}"
        wanted.update({f"{place}.{key}": metric for key, metric in callback.wanted_metrics().items()})
    return wanted


def _reported(trainer: Trainer, val_loaders: Mapping[str, Any], wanted: set[str]) -> set[str]:
    hooks, steps = trainer.hooks, trainer.loop.settings.eval_sanity_steps
    reported = set()
    with exceptions_reported(trainer), ExitStack() as stack:
        hooks.call("on_enter_validate_all", trainer, stack, val_loaders)
        for name, loader in val_loaders.items():
            own = trainer.loop.validation_of(name)
            # No more than an evaluation has: the check is the shorter one.
            loop = ValidationLoop(min(steps or 1, own.eval_steps or steps or 1), hook=own.hook)
            with trainer.name_scope(name):
                reported |= {f"{name}/{key}" for key in loop.run(trainer, loader, name)}
        if steps is not None or not wanted <= reported | set(trainer.metric_logger.record):
            hooks.call("run_validation", trainer, False)
        reported |= set(trainer.metric_logger.record)
    return reported


@contextmanager
def _without_a_trace(trainer: Trainer) -> Iterator[None]:
    generators, record = model_state.capture_rng(), dict(trainer.metric_logger.record)
    trainer.metric_logger.record.clear()
    states = {
        name: copy.deepcopy(callback.state_dict())
        for name, callback in trainer.callbacks.items()
        if _hears_of_it(trainer, callback)
    }
    of_step = copy.deepcopy(trainer.step.state_dict())
    of_model = ForwardState(trainer.model, parameters=True)
    began = time.monotonic()
    trainer.set_sanity_checking(True)
    try:
        yield
    finally:
        trainer.set_sanity_checking(False)
        for name, state in states.items():
            if state:
                trainer.callbacks[name].load_state_dict(state)
        of_model.restore()
        if of_step:
            trainer.step.load_state_dict(of_step)
        trainer.metric_logger.record.clear()
        trainer.metric_logger.record.update(record)
        trainer.metric_logger.exclude_time(time.monotonic() - began)
        model_state.restore_rng(generators)


def _hears_of_it(trainer: Trainer, callback: Callback) -> bool:
    """Whether an evaluation calls a callback, so that its state may change; not one whose state is evaluated itself."""
    own, families = type(callback), tuple(f"on_{hook}_" for hook in trainer.hooks.families)
    hooks = (*_EVALUATION, *(name for name in dir(own) if name.startswith(families)))
    overridden = (getattr(own, hook, None) is not getattr(Callback, hook, None) for hook in hooks)
    return not callback.evaluates and any(overridden)
