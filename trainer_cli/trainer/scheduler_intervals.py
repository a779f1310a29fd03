"""When a scheduler steps: after each optimizer step, each epoch, each evaluation, or each log of a training metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import lr_scheduler

from trainer_cli.core.schema import TRAIN_PREFIX, SchedulerInterval
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.optimizers import TaggedGroups

_BY_STEP = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
_OF_FUNCTIONS = (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR)
_METRIC = "val/loss"


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule with the interval at which it steps.

    Args:
        schedule: a schedule, or a function `optimizer -> schedule`.
        interval: `step`, `epoch`, `evaluation` or `log`. None: `evaluation` for schedules that take a metric, or `log`
            if it is one of the training; `epoch` for torch's own but OneCycleLR and CyclicLR, as torch documents them,
            and `step` for all others. A function that returns a LambdaLR or a MultiplicativeLR counts as another.
        metric: given to schedules that take one, such as ReduceLROnPlateau; None: `val/loss`. `train/loss` is the mean
            over the steps since the log before (`loop.log_interval`).
        groups: the parameter groups that a function makes a schedule of: those whose `tag` it is, or is in it. None:
            all.
    """

    schedule: Any
    interval: str | None = None
    metric: str | None = None
    groups: str | Sequence[str] | None = None

    def __call__(self, optimizer: Any) -> Any:
        """The schedule of an optimizer, or of some of its groups.

        Raises:
            ConfigError: it has no such group.
        """
        if not is_function(self.schedule):
            return self.schedule
        if self.groups is not None:
            tags = [self.groups] if isinstance(self.groups, str) else self.groups
            optimizer = TaggedGroups(optimizer, tags)
        return self.schedule(optimizer)

    def settled(self, schedule: Any, where: str) -> Scheduled:
        """The same with the interval and the metric that hold for this schedule, or for this class.

        Raises:
            ConfigError: the interval is unknown, or a metric is needed at another interval than evaluations.
        """
        takes = takes_metric(schedule)
        metric = (self.metric or _METRIC) if takes else None
        of_metric = SchedulerInterval.log if str(metric).startswith(TRAIN_PREFIX) else SchedulerInterval.evaluation
        natural = of_metric if takes else natural_interval(schedule, made=is_function(self.schedule))
        interval = self.interval or natural
        name = (schedule if isinstance(schedule, type) else type(schedule)).__name__
        if interval not in set(SchedulerInterval):
            raise ConfigError(
                f"interval is {interval!r}", location=where, hint=f"Choose {', '.join(SchedulerInterval)}."
            )
        if takes and interval != of_metric:
            raise ConfigError(
                f"{name} takes the metric {metric}, so its interval is {of_metric}, not {interval}", location=where
            )
        if not takes and interval == SchedulerInterval.log:
            raise ConfigError(f"{name} takes no metric, so its interval is not log", location=where)
        if self.metric is not None and not takes:
            raise ConfigError(f"{name} takes no metric", location=where, hint="Leave `metric` out.")
        return replace(self, interval=str(interval), metric=metric)


def is_function(schedule: Any) -> bool:
    """Whether it makes the schedule, and is none itself."""
    return callable(schedule) and not hasattr(schedule, "step")


def natural_interval(schedule: Any, *, made: bool = False) -> SchedulerInterval:
    """The interval that a schedule, or its class, is documented for.

    Args:
        made: by a function, which may count steps where torch's documentation counts epochs.
    """
    kind = schedule if isinstance(schedule, type) else type(schedule)
    if takes_metric(schedule):
        return SchedulerInterval.evaluation
    torchs = [one for one in kind.__mro__ if one.__module__ == lr_scheduler.__name__]
    if kind.__module__ != lr_scheduler.__name__ and torchs[:1] == [lr_scheduler.LRScheduler]:
        torchs = []
    if not torchs or issubclass(kind, _BY_STEP) or (made and issubclass(kind, _OF_FUNCTIONS)):
        return SchedulerInterval.step
    return SchedulerInterval.epoch


def takes_metric(schedule: Any) -> bool:
    """Whether the `step` of a schedule, or of its class, takes a metric."""
    step: Callable[..., Any] | None = getattr(schedule, "step", None)
    try:
        return step is not None and "metrics" in inspect.signature(step).parameters
    except (ValueError, TypeError):
        return False
