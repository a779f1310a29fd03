"""A callback that ends a run whose loss has risen too far above the smallest one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_cli import Callback, Trainer


class StopAtRise(Callback):
    """Ends the run when a logged loss is more than `factor` times the smallest one before."""

    def __init__(self, factor: float = 10.0) -> None:
        self.factor = factor
        self.smallest = float("inf")

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare the loss of a record with the smallest one."""
        loss = metrics.get("train/loss")
        if loss is None:
            return
        if loss > self.factor * self.smallest:
            trainer.stop(f"train/loss {loss:.3g} is more than {self.factor:g} times {self.smallest:.3g}")
        self.smallest = min(self.smallest, loss)

    def state_dict(self) -> dict[str, Any]:
        """The smallest loss, so that a resume compares with it too."""
        return {"smallest": self.smallest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the smallest loss."""
        self.smallest = state["smallest"]
