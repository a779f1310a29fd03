"""ThresholdStopper: finish the run when a metric reaches a value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer


class ThresholdStopper(Callback):
    """Finishes the run once a metric is at its threshold or beyond it. NaN never is. A run that it finished stays
    finished when started again, unless its settings changed.

    Args:
        metric: `LOADER/NAME` of an evaluation, or `train/NAME`, which is looked at on log steps.
        mode: `min`: the metric is to fall to the threshold; `max`: to rise to it.
    """

    def __init__(self, metric: str, threshold: float, mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"mode is {mode!r}, but it is min or max", location="mode")
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
            raise ConfigError(f"threshold is {threshold!r}, but it is a finite number", location="threshold")
        self.metric, self.threshold, self.mode = metric, float(threshold), mode

    def wanted_metrics(self) -> Mapping[str, str]:
        return {"metric": self.metric}

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._look(trainer, metrics)

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._look(trainer, metrics)

    def end_rule(self) -> Sequence[str | float]:
        return [self.metric, self.mode, self.threshold]

    def _look(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        value = metrics.get(self.metric, math.nan)
        if value <= self.threshold if self.mode == "min" else value >= self.threshold:
            trainer.stop(f"{self.metric} is {value:.6g}, and {self.threshold:g} was wanted", by=self)
