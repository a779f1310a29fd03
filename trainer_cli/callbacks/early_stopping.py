"""Callbacks that finish a run.

`EarlyStopping`: a metric has not improved for some time. `ThresholdStopper`: a metric has reached a value. `EarlyExit`:
a function says so.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_cli.core.field_rules import parse_duration
from trainer_cli.core.intervals import Unit
from trainer_cli.core.metric_modes import choose_mode
from trainer_cli.core.schema import TRAIN_PREFIX
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.core.progress import Progress
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop

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
        if not trainer.is_step_complete:
            return
        # A copy: a function may remove its own handle.
        for condition in list(self._conditions.values()):
            if answer := condition(trainer):
                name = getattr(condition, "__name__", type(condition).__name__)
                trainer.stop(answer if isinstance(answer, str) else f"{name} asked for it", by=self)
                return


_COUNTS = {
    Unit.STEP: "step", Unit.EPOCH: "epoch", Unit.SAMPLE: "samples", Unit.TOKEN: "tokens", Unit.SECOND: "seconds",
}  # fmt: skip
_PART = "part_epochs"
"""Epochs with the part of the present one, as numerator and denominator: epochs may have several lengths."""


class EarlyStopping(Callback):
    """Finishes the run if `patience` has passed since the best evaluation. A value that is not finite is never best.
    The run stays finished when started again. With a larger `max_duration`, another metric or patience it trains up to
    the next evaluation that is not better. It does not act before `loop.min_duration`. An evaluation or log that is
    made only because the run ends does not count.

    Args:
        metric: `LOADER/NAME` of an evaluation, such as `val/loss`; or `train/NAME` as it is logged: the mean over the
            steps since the log before (`loop.log_interval`).
        mode: `min` where less is better, `max` where more is; `auto`: as usual for the name of the metric.
        patience: a duration; an int means optimizer steps.
        min_delta: what is better by no more than this is not better.
        check_finite: finish the run at once if the metric is NaN or infinite.
    """

    def __init__(
        self,
        metric: str = "val/loss",
        mode: str = "auto",
        patience: int | str = "3ep",
        min_delta: float = 0.0,
        check_finite: bool = True,
    ) -> None:
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise ConfigError(
                f"min_delta is {min_delta}, but it must be a finite number of at least 0", location="min_delta"
            )
        if not isinstance(check_finite, bool):
            raise ConfigError(
                f"check_finite is {check_finite!r}, but it must be true or false", location="check_finite"
            )
        self.metric, self.mode = metric, choose_mode(metric, mode, "mode").value
        self.min_delta, self.check_finite = float(min_delta), check_finite
        self.patience = self._patience = parse_duration("patience", patience)
        self.best: float | None = None
        self.since: dict[str, Any] | None = None
        """The position of the best evaluation; of the first, as long as none had a number."""
        self._loop: TrainingLoop | None = None

    def wanted_metrics(self) -> Mapping[str, str]:
        return {"metric": self.metric}

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        self._loop, self._patience = loop, loop.resolved(self.patience)

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if self.metric.startswith(TRAIN_PREFIX) and trainer.loop.training_log.is_due:
            self._look(trainer, metrics)

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if not self.metric.startswith(TRAIN_PREFIX) and trainer.loop.evaluations.present.counts(self.metric):
            self._look(trainer, metrics)

    def _look(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            return  # Its loader has an interval of its own, and is not due.
        value, now = metrics[self.metric], trainer.progress
        if self.check_finite and not math.isfinite(value):
            trainer.stop(f"{self.metric} is {value}", by=self)
            return
        better = self._is_better(value)
        if better:
            self.best = value
        if better or self.since is None:
            self.since = self._place(now)
        elif self._passed(now, self.since) >= self._patience.value:
            if self.best is None:
                reason = f"{self.metric} has been no number for {self.patience}"
            else:
                than = "below" if self.mode == "min" else "above"
                by = f" by more than {self.min_delta:g}" if self.min_delta else ""
                reason = (
                    f"{self.metric} has not been {than} {self.best:.6g} (step {self.since['step']}){by} "
                    f"for {self.patience}"
                )
            trainer.stop(reason, by=self)

    def state_dict(self) -> dict[str, Any]:
        """The best value and its position."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.since = state["best"], state["since"]

    def end_rule(self) -> Sequence[str | float]:
        return [self.metric, self.mode, str(self.patience), self.min_delta, self.check_finite]

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        return value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta

    def _place(self, now: Progress) -> dict[str, Any]:
        """The step, and the count that `patience` is in; no clock where none is needed."""
        counts, epochs = now.state_dict(), self._epochs(now)
        place = {name: counts[name] for name in ("step", _COUNTS[self._patience.unit])}
        return place if epochs is None else {**place, _PART: [epochs.numerator, epochs.denominator]}

    def _epochs(self, now: Progress) -> Fraction | None:
        """The epochs that have passed, with the part of the present one, if the patience is in epochs of known length.

        A fraction is exact: a patience of 0.1ep must end at a step, not at a rounding error before it.
        """
        loop = self._loop
        if self._patience.unit is not Unit.EPOCH or loop is None or loop.steps_per_epoch is None:
            return None
        return Fraction(now.step + loop.epoch_offset, loop.steps_per_epoch)

    def _passed(self, now: Progress, since: dict[str, Any]) -> Fraction:
        """How much has passed, in the unit of `patience`; part epochs where it is known how long one is."""
        if (epochs := self._epochs(now)) is not None:
            assert self._loop is not None
            assert self._loop.steps_per_epoch is not None
            # In an old checkpoint epochs have one length.
            return (
                epochs - Fraction(*since[_PART])
                if _PART in since
                else Fraction(now.step - since["step"], self._loop.steps_per_epoch)
            )
        unit = self._patience.unit
        count = now.state_dict()[_COUNTS[unit]]
        # A patience in another unit than that of the checkpoint begins to count at its first evaluation.
        return Fraction(count - since.setdefault(_COUNTS[unit], count))


class ThresholdStopper(Callback):
    """Finishes the run once a metric is at its threshold or beyond it. NaN never is. A run that it finished stays
    finished when started again, unless its settings changed.

    Args:
        metric: `LOADER/NAME` of an evaluation, or `train/NAME`, which is looked at on log steps.
        mode: `min`: the metric is to fall to the threshold; `max`: to rise to it; `auto`: as usual for its name.
    """

    def __init__(self, metric: str, threshold: float, mode: str = "auto") -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
            raise ConfigError(f"threshold is {threshold!r}, but it must be a finite number", location="threshold")
        self.metric, self.threshold, self.mode = metric, float(threshold), choose_mode(metric, mode, "mode").value

    def wanted_metrics(self) -> Mapping[str, str]:
        return {"metric": self.metric}

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._look(trainer, metrics)

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._look(trainer, metrics)

    def end_rule(self) -> Sequence[str | float]:
        return [self.metric, self.mode, self.threshold]

    def _look(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        # NaN is neither below nor above any threshold.
        value = metrics.get(self.metric, math.nan)
        if value <= self.threshold if self.mode == "min" else value >= self.threshold:
            trainer.stop(f"{self.metric} is {value:.6g}, but {self.threshold:g} is required", by=self)
