"""Callbacks that finish a run.

`EarlyStopping`: a metric has not improved for some time. `ThresholdStopper`: a metric has reached a value. `EarlyExit`:
a function says so.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_cli.errors import ConfigError
from trainer_cli.metric_names import TRAIN_PREFIX, Mode, choose_mode, find_usual_mode
from trainer_cli.steps import COUNTERS, Duration, Interval, Unit
from trainer_cli.terminal import format_count
from trainer_cli.trainer import Callback
from trainer_cli.values import check_at_least

if TYPE_CHECKING:
    from trainer_cli.steps import Progress
    from trainer_cli.trainer import Trainer, TrainingLoop

log = logging.getLogger(__name__)

Condition = Callable[["Trainer"], object]


class EarlyExit(Callback):
    """Calls functions after each optimizer step, with the trainer; the first that returns something true finishes the
    run. A string is the reason that is logged and saved. The run stays finished when started again, unless
    `max_duration` is larger.

    Args:
        conditions: the first functions; in a config, nodes with `_partial_: true`. `register` adds others.
    """

    def __init__(self, conditions: Iterable[Condition] = ()) -> None:
        # A RemovableHandle refers to it weakly, which torch does for an OrderedDict alone.
        self._conditions: OrderedDict[int, Condition] = OrderedDict()
        for condition in conditions:
            self.register(condition)

    def register(self, condition: Condition) -> RemovableHandle:
        """Add a function; the handle's `remove` takes it away.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(condition):
            raise ConfigError(
                f"{condition!r} is not a function of the trainer",
                location="conditions",
                hint="In a config, write {_target_: …, _partial_: true}.",
            )
        handle = RemovableHandle(self._conditions)
        self._conditions[handle.id] = condition
        return handle

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a step, finish the run if a condition says so."""
        if not trainer.is_step_complete:
            return
        # A copy: a function may remove its own handle.
        for condition in list(self._conditions.values()):
            answer = condition(trainer)
            if answer:
                name = getattr(condition, "__name__", type(condition).__name__)
                trainer.stop(answer if isinstance(answer, str) else f"{name} asked for it", by=self)
                return


_EPOCHS = "part_epochs"
"""Key of the epochs passed, with the fraction of the present one, as numerator and denominator."""


class EarlyStopping(Callback):
    """Finishes the run after `patience` evaluations without an improvement, or at the first after a `patience` that is
    a duration. A value that is not finite is never best. The run stays finished when started again. With a larger
    `max_duration` or other settings it trains further: up to the next evaluation that is not better, until a larger
    `patience` is over, or, with another metric, as if none had been evaluated. It does not act before
    `loop.min_duration`. An evaluation or log that is made only because the run ends does not count.

    Args:
        metric: `LOADER/NAME` of an evaluation, such as `val/loss`; or `train/NAME` as it is logged: the mean over the
            steps since the log before (`loop.log_interval`).
        mode: `min` where less is better, `max` where more is; `auto`: as usual for the name of the metric.
        patience: a number of evaluations of the metric (of logs, for one of the training); or, with a unit, the
            duration since the best, such as 2ep or 500st.
        min_delta: what is better by no more than this is not better.
        check_finite: finish the run at once if the metric is NaN or infinite.
    """

    def __init__(
        self,
        metric: str = "val/loss",
        mode: str = "auto",
        patience: int | str = 3,
        min_delta: float = 0.0,
        check_finite: bool = True,
    ) -> None:
        check_at_least("min_delta", min_delta, 0)
        self.metric, self.mode = metric, _mode_if_known(metric, mode)
        self.min_delta, self.check_finite = float(min_delta), check_finite
        self.patience = self._patience = _read_patience(patience)
        self.best: float | None = None
        self.waited = 0
        """Evaluations since the best."""
        self.since: dict[str, Any] | None = None
        """The position of the best evaluation; of the first, as long as none had a number."""
        self._loop: TrainingLoop | None = None

    def wanted_metrics(self) -> Mapping[str, str]:
        return {"metric": self.metric}

    def check_wanted_metrics(self, where: str) -> None:
        choose_mode(self.metric, self.mode, f"{where}.mode")

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Convert the patience to steps, and warn if the run may end before it stops anything."""
        self._loop = loop
        if isinstance(self.patience, Duration):
            self._patience = loop.resolved(self.patience)
        # A plan, which is not fitting, calls this hook for each size of a checkpoint.
        warning = self.why_short(loop, val_loaders) if trainer.fitting else None
        if warning is not None:
            log.warning("%s", warning)

    def why_short(self, loop: TrainingLoop, val_loaders: Iterable[str]) -> str | None:
        """A warning if `patience` is over before two evaluations, as far as that is known beforehand; else None."""
        is_of_training = self.metric.startswith(TRAIN_PREFIX)
        interval = loop.log_interval if is_of_training else loop.evaluations.interval_of(self.metric, val_loaders)
        if interval is None:
            return None
        patience = self.patience
        count = patience if isinstance(patience, int) else _count_intervals(loop.resolved(patience), interval)
        if count is None or count >= 2:
            return None
        events, ordinal = "logs" if is_of_training else "evaluations", "first" if count <= 1 else "second"
        return (
            f"EarlyStopping: a patience of {self._describe_patience()} is shorter than two {events} ({interval}): "
            f"the {ordinal} {self.metric} that is no better ends the run"
        )

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare a metric of the training."""
        if self.metric.startswith(TRAIN_PREFIX) and trainer.loop.training_log.is_due:
            self._compare_with_best(trainer, metrics)

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare a metric of an evaluation that has just measured it."""
        if not self.metric.startswith(TRAIN_PREFIX) and trainer.loop.evaluations.present.counts(self.metric):
            self._compare_with_best(trainer, metrics)

    def _compare_with_best(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare the metric with its best value, and finish the run if `patience` is over."""
        if self.metric not in metrics:
            return  # Its loader has an interval of its own, and is not due.
        value, progress = metrics[self.metric], trainer.progress
        if self.check_finite and not math.isfinite(value):
            trainer.stop(f"{self.metric} is {value}", by=self)
            return
        is_better = self._is_better(value)
        if is_better:
            self.best = value
        self.waited = 0 if is_better else self.waited + 1
        if is_better or self.since is None:
            self.since = self._position(progress)
        if not is_better and self._is_over(progress, self.since):
            trainer.stop(self._describe_end(self.since["step"]), by=self)

    def _describe_end(self, best_step: int) -> str:
        """The reason for the end of the run."""
        if self.best is None:
            return f"{self.metric} has been no number for {self._describe_patience()}"
        than = "below" if self.mode == "min" else "above"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{self.metric} has not been {than} {self.best:.6g} (step {best_step}){by} for {self._describe_patience()}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The metric, its best value, the position of that value, and the number of evaluations since then."""
        return {"metric": self.metric, "best": self.best, "since": self.since, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the best value and the wait since then, unless they are of another metric."""
        # Values of two metrics cannot be compared. An old checkpoint does not name its metric.
        if state.get("metric", self.metric) != self.metric:
            return
        self.best, self.since, self.waited = state["best"], state["since"], state.get("waited", 0)
        if "waited" not in state and isinstance(self.patience, int):
            log.warning(
                "EarlyStopping: a patience of %d is now %s, from here on; the checkpoint is of a version that counted "
                "steps, which is patience=%dst",
                self.patience, self._describe_patience(), self.patience,
            )  # fmt: skip

    def end_rule(self) -> Sequence[str | float]:
        return [self.metric, self.mode, self._describe_patience(), self.min_delta, self.check_finite]

    def _describe_patience(self) -> str:
        """The patience for a person, such as `3 evaluations` or `2ep`."""
        if isinstance(self.patience, Duration):
            return str(self.patience)
        return format_count(self.patience, "log" if self.metric.startswith(TRAIN_PREFIX) else "evaluation")

    def _is_over(self, progress: Progress, since: dict[str, Any]) -> bool:
        """Whether `patience` has passed since the position of the best evaluation."""
        if isinstance(self._patience, int):
            return self.waited >= self._patience
        return self._count_since(since, progress, self._patience.unit) >= self._patience.value

    def _is_better(self, value: float) -> bool:
        """Whether a value is finite, and better than the best one by more than `min_delta`."""
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        return value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta

    def _position(self, progress: Progress) -> dict[str, Any]:
        """The step, and the count in the unit of `patience`. Without seconds unless they are needed: they differ from
        run to run, and the position is saved."""
        counts, epochs = progress.state_dict(), self._epochs(progress)
        unit = Unit.STEP if isinstance(self._patience, int) else self._patience.unit
        position = {name: counts[name] for name in ("step", COUNTERS[unit])}
        return position if epochs is None else {**position, _EPOCHS: [epochs.numerator, epochs.denominator]}

    def _epochs(self, progress: Progress) -> Fraction | None:
        """The epochs that have passed, with the part of the present one, if the patience is in epochs of known length.

        A fraction is exact: a patience of 0.1ep must end at a step, not at a rounding error before it.
        """
        loop, patience = self._loop, self._patience
        if loop is None or loop.steps_per_epoch is None:
            return None
        if isinstance(patience, int) or patience.unit is not Unit.EPOCH:
            return None
        return Fraction(progress.step + loop.epoch_offset, loop.steps_per_epoch)

    def _count_since(self, since: dict[str, Any], progress: Progress, unit: Unit) -> Fraction:
        """How much has passed since a position, in the unit of `patience`; fractions of epochs if their length is
        known."""
        epochs = self._epochs(progress)
        if epochs is not None and _EPOCHS in since:
            return epochs - Fraction(*since[_EPOCHS])
        if epochs is not None:
            # An old checkpoint has the step alone: its epochs have one length.
            assert self._loop is not None
            assert self._loop.steps_per_epoch is not None
            return Fraction(progress.step - since["step"], self._loop.steps_per_epoch)
        count = progress.state_dict()[COUNTERS[unit]]
        # A patience in another unit than that of the checkpoint begins to count at its first evaluation.
        return Fraction(count - since.setdefault(COUNTERS[unit], count))


def _mode_if_known(metric: str, mode: str) -> str:
    """The mode, or auto for a metric of unknown mode: whether such a metric exists is known once it was evaluated."""
    if mode == Mode.auto and find_usual_mode(metric) is None:
        return Mode.auto.value
    return choose_mode(metric, mode, "mode").value


def _read_patience(value: int | str) -> int | Duration:
    """A number of evaluations, or a duration with a unit."""
    if isinstance(value, bool) or not isinstance(value, int):
        try:
            return Duration.parse(value)
        except ValueError as error:
            message = str(error).replace("a number of steps", "a number of evaluations")
            raise ConfigError(f"patience: {message}", location="patience") from None
    if value < 1:
        raise ConfigError(
            f"patience is {value}, but it must be at least 1, which ends the run at the first evaluation that is not "
            "better",
            location="patience",
        )
    return value


def _count_intervals(patience: Duration, interval: Interval) -> Fraction | None:
    """How many intervals a duration lasts; None if that is unknown."""
    if patience.unit is interval.duration.unit:
        return patience.value / interval.duration.value
    steps = patience.steps(interval.steps_per_epoch)
    return None if steps is None or interval.steps is None else steps / interval.steps


class ThresholdStopper(Callback):
    """Finishes the run once a metric is at its threshold or beyond it. NaN never is. A run that it finished stays
    finished when started again, unless its settings changed.

    Args:
        metric: `LOADER/NAME` of an evaluation, or `train/NAME`, which is looked at on log steps.
        mode: `min`: the metric is to fall to the threshold; `max`: to rise to it; `auto`: as usual for its name.
    """

    def __init__(self, metric: str, threshold: float, mode: str = "auto") -> None:
        if not math.isfinite(threshold):
            raise ConfigError(f"threshold is {threshold!r}, but it must be a finite number", location="threshold")
        self.metric, self.threshold, self.mode = metric, float(threshold), _mode_if_known(metric, mode)

    def wanted_metrics(self) -> Mapping[str, str]:
        return {"metric": self.metric}

    def check_wanted_metrics(self, where: str) -> None:
        choose_mode(self.metric, self.mode, f"{where}.mode")

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._compare_with_threshold(trainer, metrics)

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._compare_with_threshold(trainer, metrics)

    def end_rule(self) -> Sequence[str | float]:
        return [self.metric, self.mode, self.threshold]

    def _compare_with_threshold(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Finish the run if the metric is there and has reached the threshold."""
        # NaN is neither below nor above any threshold.
        value = metrics.get(self.metric, math.nan)
        is_reached = value <= self.threshold if self.mode == "min" else value >= self.threshold
        if is_reached:
            trainer.stop(f"{self.metric} is {value:.6g}, but {self.threshold:g} is required", by=self)
