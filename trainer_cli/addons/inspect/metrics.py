"""Metrics of whole evaluations: those of torchmetrics, and a picture of the confusion matrix.

Predictions and targets are found in what the model returned, or in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer_cli.addons.inspect.matrix_picture import SMALLEST_CELL, draw_matrix
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.outputs import GatheredMetric, is_metric
from trainer_cli.terminal import format_count
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer, ValidationLoop


def value_of(key: str | int | None, outputs: Any, batch: Any) -> Any:
    """The value `key` of a model's outputs, else of the batch; a number is a place in a batch that is a sequence, and
    None stands for all that the model returned beside a loss.

    Raises:
        UserError: neither has one.
    """
    if isinstance(outputs, tuple) and len(outputs) == 2:
        # A loss, and what it was computed of.
        outputs = outputs[1]
    if key is None:
        return outputs
    for mapping in (outputs, batch):
        if isinstance(mapping, Mapping) and mapping.get(key) is not None:
            return mapping[key]
    if isinstance(key, int) and isinstance(batch, list | tuple) and -len(batch) <= key < len(batch):
        return batch[key]
    names = [str(name) for mapping in (outputs, batch) if isinstance(mapping, Mapping) for name in mapping]
    raise UserError(
        f"neither the model's outputs nor the batch has '{key}'",
        cure=f"There are {', '.join(names)}." if names else "Return a mapping with it from the model's forward.",
    )


class Metrics(Callback):
    """Logs `LOADER/NAME` for metrics of torchmetrics, or any objects with `update`, `compute` and `reset`. They are
    computed over all samples of an evaluation, not averaged over batches.

    Args:
        metrics: by name.
        predictions, targets: what `update` is given, by the name in the model's outputs or in the batch; a number is a
            place in a batch that is a sequence. Predictions None: all that the model returned beside a loss, such as
            the list of a detector.
    """

    measures_only = True

    def __init__(
        self, metrics: Mapping[str, Any], predictions: str | int | None = "logits", targets: str | int = "labels"
    ) -> None:
        for name, metric in metrics.items():
            if not is_metric(metric):
                raise ConfigError(
                    f"metrics.{name} is a {type(metric).__name__}, but it must have update, compute and reset",
                    location=f"metrics.{name}",
                )
        self.metrics, self.predictions, self.targets = dict(metrics), predictions, targets

    def setup(self, trainer: Trainer) -> None:
        """Refuse a metric that cannot be combined over the processes."""
        for name, metric in self.metrics.items():
            GatheredMetric(name, metric).check(trainer.strategy.group)

    def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: ValidationLoop) -> None:
        """Begin each metric anew."""
        self._loop = loop
        for name, metric in self.metrics.items():
            # A stop may have interrupted the last evaluation.
            GatheredMetric(name, metric).reset(trainer.strategy.group)
            if hasattr(metric, "to"):
                metric.to(trainer.device)

    def on_validate_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the metrics with a batch."""
        # A padding batch repeats samples of this rank, to keep collectives in step.
        if not self._loop.counts:
            return
        predictions, targets = value_of(self.predictions, outputs, batch), value_of(self.targets, outputs, batch)
        for metric in self.metrics.values():
            metric.update(predictions, targets)

    def on_validate_end(self, trainer: Trainer, model: nn.Module, loop: ValidationLoop) -> None:
        """Log the metrics, of the samples of all processes."""
        for name, metric in self.metrics.items():
            trainer.log_metrics(GatheredMetric(name, metric).compute(trainer.strategy.group))


class ConfusionMatrix(Callback):
    """Logs `LOADER/confusion`, as a table and as an image with its numbers and a scale: a row for each class, a column
    for what it is taken for; shades are shares of the row. Counts are in `counts`, of the samples of all processes.

    Args:
        predictions: scores (N, classes) or classes (N), by their name in the model's outputs or the batch.
        targets: classes (N), by their name there or their place in a batch that is a sequence.
        cell: pixels of a cell's side in the image. Cells that are too small for their numbers are grey, without
            numbers, labels and scale: white where all of the class are, and black where none.
        labels: names of the classes, in order; classes without one have their number.
    """

    measures_only = True

    def __init__(
        self,
        predictions: str | int = "logits",
        targets: str | int = "labels",
        cell: int = 32,
        labels: Sequence[str] = (),
    ) -> None:
        self.predictions, self.targets, self.cell = predictions, targets, cell
        self.labels = [str(label) for label in labels]
        self.counts = torch.zeros(0, 0, dtype=torch.int64)

    def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: ValidationLoop) -> None:
        """Begin to count anew."""
        self._loop = loop
        self.counts = torch.zeros(0, 0, dtype=torch.int64)

    def on_validate_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples of a batch.

        Raises:
            UserError: predictions and targets are not classes of the same samples.
        """
        if not self._loop.counts:
            return
        predicted, targets = value_of(self.predictions, outputs, batch), value_of(self.targets, outputs, batch)
        for name, value in (("predictions", predicted), ("targets", targets)):
            if not isinstance(value, Tensor):
                got = type(value).__name__
                raise UserError(f"ConfusionMatrix: {name} '{getattr(self, name)}' is a {got}, and no tensor")
        classes = predicted.shape[1] if predicted.ndim > 1 else None
        if predicted.numel() == 0 and targets.numel() == 0:
            return
        if predicted.ndim > 1:
            # argmax takes neither bools nor the unsigned integers but uint8.
            has_argmax = predicted.is_floating_point() or predicted.is_complex()
            predicted = (predicted if has_argmax else predicted.long()).argmax(1)
        predicted, targets = predicted.flatten().cpu(), targets.flatten().cpu()
        if len(targets) != len(predicted):
            raise UserError(
                f"ConfusionMatrix: {format_count(len(predicted), 'prediction')} for "
                f"{format_count(len(targets), 'target')}",
                cure="Give scores of shape (N, classes) or classes of shape (N), and targets of shape (N).",
            )
        predicted, targets = self._to_classes("predictions", predicted), self._to_classes("targets", targets)
        if classes is not None and targets.max() >= classes:
            raise UserError(
                f"ConfusionMatrix: targets '{self.targets}' have the class {int(targets.max())}, but the scores are of "
                f"{format_count(classes, 'class')}",
                cure="Count classes from 0, and give the model an output for each.",
            )
        self._add(targets, predicted, classes or 0)

    def on_validate_end(self, trainer: Trainer, model: nn.Module, loop: ValidationLoop) -> None:
        """Add up the counts of all processes, and log them as a table and as an image."""
        group = trainer.strategy.group
        # The sum needs equal shapes, and a rank may not have seen the last classes.
        self._grow(max(group.gather(len(self.counts))))
        # All of a tensor group have counted the same samples.
        self.counts = group.sum(self.counts) // group.tensor_size
        if self.counts.numel():
            labels = [*self.labels, *map(str, range(len(self.labels), len(self.counts)))][: len(self.counts)]
            rows = [[label, *counts] for label, counts in zip(labels, self.counts.tolist(), strict=True)]
            trainer.log_table("confusion", ["class", *labels], rows, matrix=True)
            trainer.log_image("confusion", self.picture(labels))

    def picture(self, labels: Sequence[str]) -> NDArray[Any]:
        """The image: with labels of shape (3, height, width), else of grey values of shape (height, width)."""
        shares = (self.counts / self.counts.sum(1, keepdim=True).clamp(min=1)).numpy()
        if self.cell < SMALLEST_CELL:
            return np.kron(shares, np.ones((self.cell, self.cell)))
        return draw_matrix(self.counts.tolist(), shares.tolist(), labels, self.cell)

    def _to_classes(self, name: str, value: Tensor) -> Tensor:
        """The value as int64. Raise UserError unless it has whole numbers from 0 on."""
        floats = value.double() if value.is_floating_point() else None
        # The limit is that of exact whole numbers; nan is within none.
        is_whole = floats is None or (bool((floats.abs() <= 2**53).all()) and torch.equal(floats, floats.round()))
        if value.is_complex() or not is_whole:
            raise UserError(
                f"ConfusionMatrix: {name} '{getattr(self, name)}' are {value.dtype}, and no numbers of classes",
                cure="Round probabilities of two classes first, such as by (probabilities > 0.5).long().",
            )
        # Before the smallest is taken: torch has no min of the unsigned integers but uint8.
        value = value.long()
        if value.min() < 0:
            raise UserError(
                f"ConfusionMatrix: {name} '{getattr(self, name)}' have the class {int(value.min())}",
                cure="Leave samples without a class out of both, such as by mask = labels >= 0.",
            )
        return value

    def _add(self, targets: Tensor, predicted: Tensor, classes: int) -> None:
        """Count pairs of classes of two int64 tensors; the matrix gets room for at least `classes`."""
        size = max(classes, len(self.counts), int(torch.cat([targets, predicted]).max()) + 1)
        self._grow(size)
        # Each pair as one number: a single count, instead of a loop over the samples.
        self.counts += torch.bincount(targets * size + predicted, minlength=size * size).view(size, size)

    def _grow(self, size: int) -> None:
        """Enlarge the matrix to this many classes."""
        grown = torch.zeros(size, size, dtype=torch.int64)
        grown[: len(self.counts), : len(self.counts)] = self.counts
        self.counts = grown
