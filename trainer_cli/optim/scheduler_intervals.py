"""When a scheduler steps: after each optimizer step, each epoch, each evaluation, or each log of a training metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import lr_scheduler

from trainer_cli.errors import ConfigError, UserError
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.optim.optimizers import TaggedGroups
from trainer_cli.schema import SchedulerInterval

_BY_STEP = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
_OF_FUNCTIONS = (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR)
METRIC = "val/loss"
"""The default metric of a schedule that takes one."""
_COUNTS = ("epoch", "num_updates", "step", "t")
"""Names of a required argument of `step` that takes the number of steps so far. It is of epochs if it is `epoch`."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule with the interval at which it steps.

    Args:
        schedule: a schedule, or a function `optimizer -> schedule`. A function may also return a Scheduled itself.
        interval: `step`, `epoch`, `evaluation` or `log`. None: `evaluation` for schedules that take a metric, or `log`
            for a metric of training; `epoch` for torch's own schedules except OneCycleLR and CyclicLR, as torch
            documents them, and for schedules whose `step` requires the epoch; `step` for all others, and for a LambdaLR
            or MultiplicativeLR that a function returns.
        metric: passed to schedules that take one, such as ReduceLROnPlateau; None: `val/loss`. `train/loss` is the mean
            over the steps since the previous log (`loop.log_interval`).
        groups: a `tag`, or several, of the parameter groups that a function makes a schedule of; None: all groups.
    """

    schedule: Any
    interval: str | None = None
    metric: str | None = None
    groups: str | Sequence[str] | None = None

    def __call__(self, optimizer: Any) -> Any:
        """Make the schedule of an optimizer, or of the groups with the tags in `groups`.

        Raises:
            ConfigError: no group of the optimizer has the tag.
        """
        if not is_function(self.schedule):
            return self.schedule
        if self.groups is not None:
            tags = [self.groups] if isinstance(self.groups, str) else self.groups
            optimizer = TaggedGroups(optimizer, tags)
        return self.schedule(optimizer)

    def resolve(self, schedule: Any, where: str) -> Scheduled:
        """Fill in the default interval and metric for this schedule, or for this class of schedules.

        Raises:
            ConfigError: the interval is unknown, or is not one at which the schedule's metric is reported.
        """
        takes_a_metric = takes_metric(schedule)
        metric = (self.metric or METRIC) if takes_a_metric else None
        default = default_interval(schedule, metric, from_function=is_function(self.schedule))
        interval = self.interval or default
        name = (schedule if isinstance(schedule, type) else type(schedule)).__name__
        if interval not in set(SchedulerInterval):
            raise ConfigError(
                f"interval is {interval!r}", location=where, hint=f"Choose {', '.join(SchedulerInterval)}."
            )
        if _required_arguments(schedule) and interval in (SchedulerInterval.evaluation, SchedulerInterval.log):
            raise ConfigError(
                f"the step of {name} takes a number of steps or epochs, so its interval is not {interval}",
                location=where,
                hint="Choose step or epoch.",
            )
        if takes_a_metric and interval != default:
            raise ConfigError(
                f"{name} takes the metric {metric}, so its interval is {default}, not {interval}",
                location=where,
                hint="Leave `interval` out.",
            )
        if not takes_a_metric and interval == SchedulerInterval.log:
            raise ConfigError(
                f"{name} takes no metric, so its interval is not log",
                location=where,
                hint="Choose step, epoch or evaluation.",
            )
        if self.metric is not None and not takes_a_metric:
            raise ConfigError(f"{name} takes no metric", location=where, hint="Leave `metric` out.")
        return replace(self, interval=str(interval), metric=metric)


def is_function(schedule: Any) -> bool:
    """Whether a value is a function that makes a schedule, rather than a schedule."""
    # A schedule may be callable, too, but a function has no `step`.
    return callable(schedule) and not hasattr(schedule, "step")


def default_interval(schedule: Any, metric: str | None = None, *, from_function: bool = False) -> SchedulerInterval:
    """The interval that a schedule, or a class of schedules, is documented for.

    Args:
        metric: the metric that is passed to a schedule which takes one; None: a metric of the evaluations.
        from_function: whether a user's function made it, which then counts optimizer steps.
    """
    kind = schedule if isinstance(schedule, type) else type(schedule)
    if takes_metric(schedule):
        return SchedulerInterval.log if str(metric).startswith(TRAIN_PREFIX) else SchedulerInterval.evaluation
    if _required_arguments(schedule) == ["epoch"]:
        return SchedulerInterval.epoch
    torch_bases = [base for base in kind.__mro__ if base.__module__ == lr_scheduler.__name__]
    # A direct subclass of LRScheduler is a schedule of the user's own.
    if kind.__module__ != lr_scheduler.__name__ and torch_bases[:1] == [lr_scheduler.LRScheduler]:
        return SchedulerInterval.step
    is_users_function = from_function and issubclass(kind, _OF_FUNCTIONS)
    if not torch_bases or issubclass(kind, _BY_STEP) or is_users_function:
        return SchedulerInterval.step
    return SchedulerInterval.epoch


def takes_metric(schedule: Any) -> bool:
    """Whether the `step` of a schedule, or of its class, takes a metric."""
    # By the name of the argument, as torch has no base class for schedules of a metric.
    return "metrics" in _step_parameters(schedule)


def step_function(schedule: Any) -> Callable[..., Any]:
    """A function that steps a schedule, given the number of steps or epochs, or the metric that its `step` takes."""
    if takes_metric(schedule) or _required_arguments(schedule):
        return schedule.step  # type: ignore[no-any-return]
    return lambda _: schedule.step()


def update_function(schedule: Any) -> Callable[[int], Any] | None:
    """The `step_update` of a schedule as those of timm and fairseq, which takes the number of steps after each step,
    while their `step` takes the number of epochs; None for other schedules."""
    return getattr(schedule, "step_update", None) if _required_arguments(schedule) == ["epoch"] else None


def check_step(schedule: Any, where: str) -> None:
    """Raise UserError if the `step` of a schedule requires an argument that is neither a metric nor a count."""
    required = _required_arguments(schedule)
    is_count = len(required) == 1 and required[0] in _COUNTS and not takes_metric(schedule)
    if required and not is_count:
        raise UserError(
            f"schedulers: the step of {type(schedule).__name__} requires {', '.join(required)}",
            where=where,
            cure=f"A step takes no argument, `metrics`, or a number of steps or epochs called {' or '.join(_COUNTS)}.",
        )


def _required_arguments(schedule: Any) -> list[str]:
    """The arguments without a default of the `step` of a schedule, or of its class, except a metric."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in _step_parameters(schedule).items()
        if parameter.default is parameter.empty and parameter.kind not in kinds and name != "metrics"
    ]


def _step_parameters(schedule: Any) -> dict[str, inspect.Parameter]:
    """The parameters of the `step` of a schedule, or of its class, without `self`."""
    step: Callable[..., Any] | None = getattr(schedule, "step", None)
    try:
        parameters = {} if step is None else dict(inspect.signature(step).parameters)
    except (ValueError, TypeError):
        return {}
    if isinstance(schedule, type) and parameters:
        del parameters[next(iter(parameters))]
    return parameters
