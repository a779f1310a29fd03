"""Metrics of torchmetrics, over the whole of each validation loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_cli.callbacks.outputs import value_of
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.metrics import check_gathers, gather_among, is_metric, scalars

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.validation_loop import ValidationLoop


class Metrics(Callback):
    """Logs `LOADER/NAME` for metrics of torchmetrics, or any objects with `update`, `compute` and `reset`. They are
    computed over all samples of an evaluation, not averaged over batches.

    Args:
        metrics: by name.
        predictions, targets: what `update` is given, by the name in the model's outputs or in the batch; a number is a
            place in a batch that is a sequence.
    """

    def __init__(
        self, metrics: Mapping[str, Any], predictions: str | int = "logits", targets: str | int = "labels"
    ) -> None:
        for name, one in metrics.items():
            if not is_metric(one):
                raise ConfigError(
                    f"metrics.{name} is a {type(one).__name__}, but it must have update, compute and reset",
                    location=f"metrics.{name}",
                )
        self.metrics, self.predictions, self.targets = dict(metrics), predictions, targets

    def setup(self, trainer: Trainer) -> None:
        for name, one in self.metrics.items():
            check_gathers(name, one, trainer.strategy.group.data_size)

    def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: ValidationLoop) -> None:
        self._loop = loop
        for one in self.metrics.values():
            gather_among(one, trainer.strategy.group)
            one.reset()
            if hasattr(one, "to"):
                one.to(trainer.device)

    def on_validate_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._loop.counts:
            return
        predictions, targets = value_of(self.predictions, outputs, batch), value_of(self.targets, outputs, batch)
        for one in self.metrics.values():
            one.update(predictions, targets)

    def on_validate_end(self, trainer: Trainer, model: nn.Module, loop: ValidationLoop) -> None:
        for name, one in self.metrics.items():
            trainer.log_metrics(scalars(name, one.compute()))
