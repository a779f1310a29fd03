"""One batch of each validation loader before the first step: is every metric reported that a callback needs?"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint import model_state
from trainer_cli.config.schema import OF_TRAINING
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import UserError
from trainer_cli.trainer.forward_state import ForwardState
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.lengths import length_of
from trainer_cli.trainer.validation_loop import EvaluationInterruptedError, ValidationLoop, exceptions_reported

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

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
    of_training = {setting: metric for setting, metric in wanted.items() if metric.startswith(OF_TRAINING)}
    trainer.loop.expect_metrics(of_training)
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
    trainer.sanity_checking = True
    try:
        yield
    finally:
        trainer.sanity_checking = False
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
