"""Evaluate the model on loaders: during a training, of checkpoints, and as a check before the first step."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.data import as_val_loaders, length_of
from trainer_cli.errors import UserError, second_to
from trainer_cli.loads import LoadOptions
from trainer_cli.loggers import loader_of
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.outputs import ForwardState
from trainer_cli.schema import SchedulerInterval
from trainer_cli.signatures import check_type
from trainer_cli.state import capture_rng, find_evaluated_average, restore_rng, rng_kept
from trainer_cli.steps import Progress
from trainer_cli.terminal import format_count, html_metrics
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.loading import Unset
from trainer_cli.trainer.metric_logger import Interruption, metrics_in, noting_set
from trainer_cli.trainer.setup import loader_settings
from trainer_cli.trainer.state import load_for_evaluation
from trainer_cli.trainer.validation_loop import (
    Due,
    EvaluationInterruptedError,
    ValidationLoop,
    exceptions_reported,
    unreported,
)

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_SAVER = "checkpoint"
_PACKAGE = "trainer_cli"
_EVALUATION = ("on_enter_validate_all", "on_enter_evaluation", "on_enter_validate", "run_validation")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metrics of one checkpoint on one validation loader."""

    path: Path | None
    step: int
    loader: str
    metrics: dict[str, float]
    average: str | None = None
    """Name of the callback whose average of the weights was evaluated; None: the weights themselves were."""


class Evaluations(list[Evaluation]):
    """The evaluations of checkpoints, in order; a table in a notebook."""

    def _repr_html_(self) -> str:
        rows = [(("present weights" if row.path is None else row.path.name, row.loader), row.metrics) for row in self]
        return html_metrics(["checkpoint", "loader"], rows)


class LoaderMetrics(dict[str, dict[str, float]]):
    """Loader -> metrics; a table in a notebook."""

    def _repr_html_(self) -> str:
        return html_metrics(["loader"], [((loader,), metrics) for loader, metrics in self.items()])


def evaluate(trainer: Trainer, due: Due, *, is_last: bool) -> bool:
    """Evaluate on the loaders that are due and log each metric as `LOADER/METRIC`; returns whether it was completed.

    If a stop is requested meanwhile, the record and the state of the step are as before the call.
    """
    record = trainer.metric_logger.record
    trainer.loop.evaluations.present = due
    record_before, step_state = dict(record), copy.deepcopy(trainer.step.state_dict())
    try:
        with trainer.metric_logger.pause(Interruption.evaluating, trainer.progress):
            with _evaluating(trainer, due.loaders) as generators:
                _run(trainer, due, generators, is_last=is_last)
            if trainer.hooks["on_after_evaluation"] or trainer.schedulers.has(SchedulerInterval.evaluation):
                for call in trainer.hooks["on_after_evaluation"]:
                    call(trainer, _metrics_since(trainer, record_before))
                metrics = _metrics_since(trainer, record_before)
                trainer.loop.evaluations.check_expected(metrics, due)
                counted = {name: value for name, value in metrics.items() if due.counts(name)}
                if counted:
                    is_all = counted.keys() == metrics.keys() and due.is_all
                    trainer.schedulers.step(trainer, SchedulerInterval.evaluation, counted, all_metrics=is_all)
    except EvaluationInterruptedError:
        # The next attempt makes the whole evaluation.
        if step_state:
            trainer.step.load_state_dict(step_state)
        record.clear()
        record.update(record_before)
        return False
    trainer.progress.evaluated_step = trainer.progress.step
    return True


def _metrics_since(trainer: Trainer, record_before: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that were logged since the record was `record_before`. Collective."""
    record = trainer.metric_logger.record
    rank_metrics = metrics_in({key: value for key, value in record.items() if record_before.get(key) is not value})
    # What a callback evaluates may differ between ranks, and no decision may.
    return trainer.strategy.group.broadcast(rank_metrics)


def evaluate_remaining(trainer: Trainer, due: Due) -> None:
    """Evaluate on the loaders that were not due, and let callbacks evaluate, after an evaluation that ended the run."""
    try:
        with (
            trainer.metric_logger.pause(Interruption.evaluating, trainer.progress),
            _evaluating(trainer, due.loaders) as generators,
        ):
            _run(trainer, due, generators, is_last=True)
    except EvaluationInterruptedError:
        log.warning("the run was stopped before its last evaluation on %s", ", ".join(due.loaders) or "callbacks")


def evaluate_all(
    trainer: Trainer,
    val_loaders: Any,
    ckpt_paths: str | Path | Iterable[str | Path | None] | Unset,
    load: LoadOptions,
    loop: ValidationLoop | None,
    *,
    every: bool,
) -> Evaluations:
    """Evaluate every checkpoint on every loader; arguments as in `Trainer.validate_all`.

    Args:
        every: if no paths are given, evaluate every checkpoint of this run, not only the newest.
    """
    with ExitStack() as stack:
        stack.callback(trainer.requests.clear)
        settings = loader_settings(trainer.seed, trainer.device, trainer.strategy.group)
        loaders = as_val_loaders(val_loaders, **settings)
        if not trainer.fitting:
            trainer.recording.loaders = tuple(loaders)
            stack.enter_context(trainer.recording.opened())
            stack.enter_context(finalized(trainer))
        paths = find_paths(trainer, ckpt_paths, every=every)
        refuse_average_of_present(trainer, paths, load)
        load = replace(load, states=("model",))
        if loop is not None:
            trainer.hooks.add_family(check_type("loop", loop, ValidationLoop).hook)
            trainer.hooks.refuse_in(loop)
        if not trainer.fitting:
            stack.enter_context(trainer.logging.shown())
        if any(path is not None for path in paths):
            stack.enter_context(training_kept(trainer))
        generators = stack.enter_context(_evaluating(trainer, loaders))
        return Evaluations(
            row for path in paths for row in _evaluate_checkpoint(trainer, loaders, path, generators, load, loop)
        )


@contextmanager
def finalized(trainer: Trainer) -> Iterator[None]:
    """Let callbacks clean up after the block; a second error becomes a note of the first."""
    try:
        yield
    except BaseException as error:
        with second_to(error):
            trainer.hooks.call_all("finalize")
        raise
    trainer.hooks.call_all("finalize")


def refuse_average_of_present(trainer: Trainer, paths: Sequence[Path | None], load: LoadOptions) -> None:
    """Refuse `average=False` for the present weights: only a checkpoint is loaded without its average.

    Raises:
        UserError: present weights would be evaluated, and a callback puts an average in their place.
    """
    average = find_evaluated_average(trainer.callbacks)
    if None in paths and not load.average and average is not None:
        raise UserError(
            f"average=False has no effect on the present weights: {average} evaluates its average of them",
            where="load",
            cure="Name a checkpoint by ckpt_path.",
        )


def find_paths(
    trainer: Trainer, ckpt_paths: str | Path | Iterable[str | Path | None] | Unset, *, every: bool = False
) -> Sequence[Path | None]:
    """The checkpoints that are named, globs expanded; None for the present weights. `every`: see `evaluate_all`."""
    if isinstance(ckpt_paths, Unset) and every and not trainer.fitting:
        paths = trainer.loading.find_all()
        if paths:
            log.info("evaluating each checkpoint in %s: %s", paths[0].parent, ", ".join(path.name for path in paths))
            return paths
    if isinstance(ckpt_paths, Unset):
        newest = trainer.loading.find_newest() if trainer.loading.is_untouched else None
        if newest is not None:
            log.info("using %s, the newest checkpoint of this run", newest)
        return [newest]
    # Not above: most evaluations are of the weights in memory.
    from trainer_cli.catalog import expanded

    patterns: Iterable[Any] = [ckpt_paths]
    if isinstance(ckpt_paths, Iterable) and not isinstance(ckpt_paths, str):
        patterns = ckpt_paths
    named: list[Path | None] = []
    for pattern in patterns:
        named += [None] if pattern is None else expanded(pattern)
    return named


def _evaluate_checkpoint(
    trainer: Trainer,
    loaders: Mapping[str, Any],
    path: Path | None,
    generators: Mapping[str, Any],
    load: LoadOptions,
    loop: ValidationLoop | None,
) -> list[Evaluation]:
    """The metrics of a checkpoint on each loader.

    Outside of a fit the loggers get them, and what callbacks logged meanwhile, as a record of the checkpoint's step.

    Args:
        path: the checkpoint, which is loaded; None: the present weights.
        generators: the random state in which the evaluation begins.
        loop: evaluates each loader; None: those of the training loop.
    """
    progress, epoch = trainer.progress, trainer.loop.epochs_at(trainer.progress)
    if path is not None:
        state = load_checkpoint(trainer, path, load)
        progress = Progress(trainer.loaded_step, int(state.get("progress", {}).get("epoch", 0)))
        epoch = float(progress.epoch)
    # Also after an error: what was measured until then belongs to no record of the trainer.
    with trainer.metric_logger.record_kept():
        _run(trainer, Due(loaders), generators, is_last=True, loop=loop)
        rows: dict[str, dict[str, float]] = {name: {} for name in loaders}
        for key, value in metrics_in(trainer.metric_logger.record).items():
            name = loader_of(key, loaders)
            rows.setdefault(name, {})[key.removeprefix(f"{name}/")] = value
        if not trainer.fitting:
            trainer.metric_logger.flush_evaluation(progress, epoch, loaders)
    average = find_evaluated_average(trainer.callbacks)
    return [Evaluation(path, trainer.loaded_step, name, metrics, average) for name, metrics in rows.items()]


@contextmanager
def training_kept(trainer: Trainer) -> Iterator[None]:
    """Restore after the block what `load_checkpoint` replaces of a training. Without one, what was loaded stays."""
    if not trainer.fitting and trainer.progress.step == 0:
        yield
        return
    weights = ForwardState(trainer.model, parameters=True)
    states = {
        name: copy.deepcopy(callback.state_dict()) for name, callback in trainer.callbacks.items() if callback.evaluates
    }
    loaded = trainer.loading.path, trainer.loading.step
    try:
        yield
    finally:
        weights.restore()
        for name, state in states.items():
            trainer.callbacks[name].load_state_dict(state)
        trainer.loading.path, trainer.loading.step = loaded


def load_checkpoint(trainer: Trainer, path: Path, load: LoadOptions) -> dict[str, Any]:
    """Load what an evaluation of a checkpoint needs, and return the state that was read."""
    # Averages of weights, for example, are in the states of callbacks.
    needs_callbacks = any(callback.evaluates for callback in trainer.callbacks.values())
    state = trainer.loading.read(path, load, *(["callbacks"] if needs_callbacks else []))
    load_for_evaluation(trainer, state, load, path)
    return state


@contextmanager
def _evaluating(trainer: Trainer, loaders: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Evaluate inside the block: random numbers drawn meanwhile change no training. Yields the random state in which
    each evaluation is to begin."""
    with rng_kept():
        if (kept := trainer.loading.kept_generators()) is not None:
            # A pending evaluation of an earlier attempt, or one outside of a fit: use the random state that it would
            # have had.
            restore_rng(kept)
        with trainer.modes.evaluating(), exceptions_reported(trainer), ExitStack() as stack:
            trainer.hooks.call("on_enter_validate_all", trainer, stack, loaders)
            yield capture_rng()


def _run(
    trainer: Trainer, due: Due, generators: Mapping[str, Any], *, is_last: bool, loop: ValidationLoop | None = None
) -> None:
    """Evaluate the present weights on the loaders, and let callbacks evaluate."""
    # Loading a checkpoint may have drawn numbers.
    restore_rng(generators)
    with buffers_kept(trainer), ExitStack() as stack:
        trainer.hooks.call("on_enter_evaluation", trainer, stack, due.loaders)
        for name, loader in due.loaders.items():
            loader_loop = loop or trainer.loop.evaluations.of(name)
            trainer.set_evaluating(loader_loop)
            with trainer.name_scope(name), noting_set(name, trainer.progress):
                means = loader_loop.run(trainer, loader, name)
            trainer.metric_logger.add({f"{name}/{key}": value for key, value in means.items()})
        if due.callbacks:
            trainer.hooks.call("run_validation", trainer, is_last)


@contextmanager
def buffers_kept(trainer: Trainer) -> Iterator[None]:
    """Restore buffers and extra states of the model after the block, whose forwards may write them in evaluation mode,
    as observers of quantization-aware training do."""
    forward_state, evaluations = ForwardState(trainer.model), trainer.loop.evaluations
    try:
        yield
    finally:
        written = forward_state.restore()
        if written and not evaluations.buffers_named:
            evaluations.buffers_named = True
            log.info(
                "evaluations write %s of the model, such as %s: restored after each, so that it changes no training. "
                "What on_after_evaluation of a callback writes stays",
                format_count(len(written), "buffer"),
                written[0],
            )


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
    refuse_absent_loaders(trainer, val_loaders, {})
    needed = _needed_metrics(trainer)
    of_training = {setting: metric for setting, metric in needed.items() if metric.startswith(TRAIN_PREFIX)}
    trainer.loop.training_log.expect_metrics(of_training, trainer.loop.log_interval)
    needed = {setting: metric for setting, metric in needed.items() if setting not in of_training}
    if needed or trainer.loop.settings.eval_sanity_steps is not None:
        _check_reported(trainer, val_loaders, needed)
    # After the check that they exist: the mode of a mistyped metric is not what is wrong.
    for name, callback in trainer.callbacks.items():
        callback.check_wanted_metrics(f"callbacks.{name}")


def refuse_absent_loaders(trainer: Trainer, val_loaders: Mapping[str, Any], more: Mapping[str, str]) -> None:
    """Refuse a needed metric of a validation loader that does not exist, as far as no callback of another package may
    log it.

    Args:
        more: setting -> metric of parts that the trainer lacks.

    Raises:
        UserError: naming the setting and the loaders.
    """
    loggers = (trainer.step, *trainer.callbacks.values())
    packages = {type(logger).__module__.partition(".")[0] for logger in loggers}
    if not val_loaders or trainer.hooks["run_validation"] or packages != {_PACKAGE}:
        return
    for setting, metric in {**_needed_metrics(trainer), **more}.items():
        loader, _, name = metric.rpartition("/")
        is_of_loader = loader and not metric.startswith(TRAIN_PREFIX)
        if not is_of_loader or loader_of(metric, val_loaders) in val_loaders:
            continue
        named = [f"{loader}/{name}" for loader in val_loaders]
        raise UserError(
            f"{setting} is '{metric}', but there is no validation loader '{loader}'",
            cure=f"Write {' or '.join(named)}.",
        )


def _check_reported(trainer: Trainer, val_loaders: Mapping[str, Any], needed: Mapping[str, str]) -> None:
    """Evaluate on the first batches, and refuse a needed metric that nothing reports."""
    try:
        with _undone(trainer):
            reported = _find_reported_metrics(trainer, val_loaders, set(needed.values()))
    except EvaluationInterruptedError:
        # The run stops before its first step; the next attempt checks again.
        return
    trainer.loop.evaluations.expected = missing = {
        setting: metric for setting, metric in needed.items() if metric not in reported
    }
    may_log = [name for name, callback in trainer.callbacks.items() if _may_log_after_evaluation(callback)]
    reported |= {metric for callback in trainer.callbacks.values() for metric in callback.logged_metrics()}
    for setting, metric in missing.items():
        if metric in reported:
            continue
        if not may_log:
            raise unreported(setting, metric, reported)
        log.warning(
            "%s is '%s', which no validation loader reports: callbacks.%s must log it in on_after_evaluation of the "
            "first evaluation (logged_metrics of a callback names what it logs)",
            setting, metric, ", ".join(may_log),
        )  # fmt: skip


def _may_log_after_evaluation(callback: Callback) -> bool:
    """Whether a callback may log a metric after an evaluation that it has not named."""
    kind = type(callback)
    # One that wants metrics, or names those that it logs, has said what it does in `on_after_evaluation`.
    names_metrics = (
        kind.wanted_metrics is not Callback.wanted_metrics or kind.logged_metrics is not Callback.logged_metrics
    )
    return kind.on_after_evaluation is not Callback.on_after_evaluation and not names_metrics


def _needed_metrics(trainer: Trainer) -> dict[str, str]:
    """Setting -> the metric that it needs."""
    needed = trainer.schedulers.wanted_metrics()
    for name, callback in trainer.callbacks.items():
        section = name if name == _SAVER else f"callbacks.{name}"
        needed.update({f"{section}.{key}": metric for key, metric in callback.wanted_metrics().items()})
    return needed


def _find_reported_metrics(trainer: Trainer, val_loaders: Mapping[str, Any], needed: set[str]) -> set[str]:
    """Evaluate on the first batches, and return the names of all metrics.

    Callbacks evaluate only if `eval_sanity_steps` is set, or the loaders do not report all that is needed.
    """
    hooks, steps = trainer.hooks, trainer.loop.settings.eval_sanity_steps
    reported = set()
    with exceptions_reported(trainer), ExitStack() as stack:
        hooks.call("on_enter_validate_all", trainer, stack, val_loaders)
        hooks.call("on_enter_evaluation", trainer, stack, val_loaders)
        for name, loader in val_loaders.items():
            configured = trainer.loop.evaluations.of(name)
            # Never more batches than an evaluation has: the check must be the shorter of the two.
            batches = steps or 1
            if configured.eval_steps is not None:
                batches = min(batches, configured.eval_steps)
            loop = ValidationLoop(batches, hook=configured.hook)
            with trainer.name_scope(name):
                reported |= {f"{name}/{key}" for key in loop.run(trainer, loader, name)}
        lacks_metric = not needed <= reported | set(trainer.metric_logger.record)
        if steps is not None or lacks_metric:
            hooks.call("run_validation", trainer, False)
        reported |= set(trainer.metric_logger.record)
    return reported


@contextmanager
def _undone(trainer: Trainer) -> Iterator[None]:
    """Undo what the block changes of the trainer."""
    # Around all: copying and restoring the states may draw numbers.
    with rng_kept():
        states = {
            name: copy.deepcopy(callback.state_dict())
            for name, callback in trainer.callbacks.items()
            if _is_called_by_evaluations(trainer, callback)
        }
        step_state = copy.deepcopy(trainer.step.state_dict())
        forward_state = ForwardState(trainer.model, parameters=True)
        began = time.monotonic()
        trainer.set_sanity_checking(True)
        try:
            with trainer.metric_logger.record_kept():
                yield
        finally:
            trainer.set_sanity_checking(False)
            for name, state in states.items():
                if state:
                    trainer.callbacks[name].load_state_dict(state)
            forward_state.restore()
            if step_state:
                trainer.step.load_state_dict(step_state)
            trainer.metric_logger.exclude_time(time.monotonic() - began)


def _is_called_by_evaluations(trainer: Trainer, callback: Callback) -> bool:
    """Whether an evaluation calls hooks of a callback, which may change its state.

    False for a callback whose state is evaluated itself, such as an average of the weights.
    """
    kind, prefixes = type(callback), tuple(f"on_{hook}_" for hook in trainer.hooks.families)
    hooks = (*_EVALUATION, *(name for name in dir(kind) if name.startswith(prefixes)))
    overrides_hook = any(getattr(kind, hook, None) is not getattr(Callback, hook, None) for hook in hooks)
    return not callback.evaluates and overrides_hook
