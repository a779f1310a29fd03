"""ThresholdStopper: finish the run when a metric reaches a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop


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
        self._stopped: dict[str, Any] | None = None

    def wanted_metrics(self) -> Mapping[str, str]:
        return {} if self.metric.startswith("train/") else {"metric": self.metric}

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        stopped, self._stopped = self._stopped, None
        if stopped is not None and stopped["step"] == trainer.progress.step and stopped["rule"] == self._rule(trainer):
            self._stop(trainer, stopped["reason"])

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._look(trainer, metrics)

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._look(trainer, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Whether it ended the run."""
        return {"stopped": self._stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stopped = state["stopped"]

    def _look(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        value = metrics.get(self.metric, math.nan)
        if value <= self.threshold if self.mode == "min" else value >= self.threshold:
            self._stop(trainer, f"{self.metric} is {value:.6g}, and {self.threshold:g} was wanted")

    def _stop(self, trainer: Trainer, reason: str) -> None:
        self._stopped = {"step": trainer.progress.step, "reason": reason, "rule": self._rule(trainer)}
        trainer.stop(reason)

    def _rule(self, trainer: Trainer) -> list[str | float]:
        return [self.metric, self.mode, self.threshold, str(trainer.loop.settings.max_duration)]
