"""A picture of which classes a classifier takes for which others, after each evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer_cli.callbacks.outputs import value_of
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.validation_loop import ValidationLoop


class ConfusionMatrix(Callback):
    """Logs the image `LOADER/confusion`, with a row for each class and a column for what it is taken for; each row is
    white where all of the class are, and black where none. Counts are in `counts`, of the samples of all processes.

    Args:
        predictions: scores (N, classes) or classes (N), by their name in the model's outputs or the batch.
        targets: classes (N), by their name there or their place in a batch that is a sequence.
        cell: pixels of a cell's side.
    """

    def __init__(self, predictions: str | int = "logits", targets: str | int = "labels", cell: int = 16) -> None:
        self.predictions, self.targets, self.cell = predictions, targets, cell
        self.counts = torch.zeros(0, 0, dtype=torch.int64)

    def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: ValidationLoop) -> None:
        self._loop = loop
        self.counts = torch.zeros(0, 0, dtype=torch.int64)

    def on_validate_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._loop.counts:
            return
        predicted, targets = value_of(self.predictions, outputs, batch), value_of(self.targets, outputs, batch)
        classes = predicted.shape[1] if predicted.ndim > 1 else 0
        predicted = (predicted.argmax(1) if predicted.ndim > 1 else predicted).flatten().cpu()
        self._add(targets.flatten().cpu().long(), predicted.long(), classes)

    def on_validate_end(self, trainer: Trainer, model: nn.Module, loop: ValidationLoop) -> None:
        group = trainer.strategy.group
        self._grow(max(group.gather(len(self.counts))))
        # All of a tensor group have counted the same samples.
        self.counts = group.sum(self.counts) // group.tensor_size
        if self.counts.numel():
            trainer.log_image("confusion", self.picture())

    def picture(self) -> NDArray[np.float64]:
        """The shares of each row, as grey values of shape (height, width)."""
        shares = (self.counts / self.counts.sum(1, keepdim=True).clamp(min=1)).numpy()
        return np.kron(shares, np.ones((self.cell, self.cell)))

    def _add(self, targets: Tensor, predicted: Tensor, classes: int) -> None:
        size = max(classes, len(self.counts), int(torch.cat([targets, predicted]).max()) + 1)
        self._grow(size)
        self.counts += torch.bincount(targets * size + predicted, minlength=size * size).view(size, size)

    def _grow(self, size: int) -> None:
        grown = torch.zeros(size, size, dtype=torch.int64)
        grown[: len(self.counts), : len(self.counts)] = self.counts
        self.counts = grown
