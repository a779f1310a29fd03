"""What a model returns, and what becomes of each output: the one place that interprets it.

A model returns a loss, `(loss, outputs)`, or a mapping with `loss`. `OutputKind.of` says of each named output whether
it is a mean, a total, or a metric that accumulates itself; all other outputs are left to callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_cli.errors import UserError

_LOSS = "Compute it in forward, such as `return torch.nn.functional.cross_entropy(outputs, labels)`."
_NUMBERS = (int, float, np.integer, np.floating)


class OutputKind(Enum):
    """What becomes of a named output of a model."""

    loss = "loss"
    """The loss itself, which has been read already."""
    total = "total"
    """The `weight` of the batch, or its `tokens`: summed."""
    mean = "mean"
    """A number, or a tensor without dimensions: averaged with the weight of the batch."""
    metric = "metric"
    """An object that accumulates over batches itself, as those of torchmetrics."""
    other = "other"
    """Anything else, such as a value for each sample: not logged."""

    @classmethod
    def of(cls, name: str, value: Any) -> OutputKind:
        """The kind of an output."""
        if name in _BY_NAME:
            return _BY_NAME[name]
        if isinstance(value, Tensor):
            is_number = value.ndim == 0 and not value.is_complex() and value.dtype is not torch.bool
            return cls.mean if is_number else cls.other
        if isinstance(value, _NUMBERS):
            return cls.other if isinstance(value, bool) else cls.mean
        return cls.metric if is_metric(value) else cls.other


_BY_NAME = {"loss": OutputKind.loss, "weight": OutputKind.total, "tokens": OutputKind.total}


def returned_weight(outputs: Any) -> float | Tensor | None:
    """The `weight` in outputs of a model, or in those of a pair `(loss, outputs)`; None without one.

    Raises:
        UserError: it is a tensor with more than one element.
    """
    if type(outputs) is tuple and len(outputs) == 2:
        outputs = outputs[1]
    weight: float | Tensor | None = outputs.get("weight") if isinstance(outputs, Mapping) else None
    if not isinstance(weight, Tensor):
        return weight
    if weight.numel() != 1:
        raise UserError(
            f"the weight in the outputs has the shape {tuple(weight.shape)}, expected a number for the batch",
            cure="Call that output by another name.",
        )
    # A sum of weights in 16 bits would be wrong by whole samples.
    weight = weight.detach().reshape(())
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight


def read_outputs(outputs: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """The loss and the named outputs of a model that returns a loss, `(loss, outputs)`, or a mapping with `loss`.

    Raises:
        UserError: the outputs are something else, or the loss is not a scalar tensor.
    """
    named: Mapping[str, Any] = {}
    if isinstance(outputs, Tensor):
        loss = outputs
    elif isinstance(outputs, Mapping):
        if "loss" not in outputs:
            names = sorted(map(str, outputs))
            raise UserError(f"the model returned a mapping without 'loss'; it has {names}", cure=_LOSS)
        loss, named = outputs["loss"], outputs
    elif isinstance(outputs, tuple) and len(outputs) == 2:
        loss = outputs[0]
        if isinstance(outputs[1], Mapping):
            named = outputs[1]
    else:
        raise UserError(
            f"the model returned {type(outputs).__name__}, expected a loss, (loss, outputs), or a mapping with 'loss'",
            cure=_LOSS,
        )
    if not _is_scalar(loss):
        if isinstance(outputs, tuple) and _is_scalar(outputs[1]):
            raise UserError(
                "the model returned a pair whose second part is the loss, expected (loss, outputs)",
                cure="Return the loss first: `return loss, outputs`.",
            )
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"the model's loss is {kind}, expected a scalar tensor", cure=_LOSS)
    return loss, named


def read_evaluation(outputs: Any) -> tuple[Tensor | None, Mapping[str, Any]]:
    """The loss and the named outputs of a model in an evaluation, where it need not return a loss.

    Without one it returns a mapping without `loss`, a list (as detectors of torchvision, a mapping for each image), or
    `(None, outputs)`.

    Raises:
        UserError: as from `read_outputs`.
    """
    if isinstance(outputs, Mapping) and outputs.get("loss") is None:
        return None, outputs
    if isinstance(outputs, list):
        return None, {}
    if isinstance(outputs, tuple) and len(outputs) == 2 and outputs[0] is None:
        return None, outputs[1] if isinstance(outputs[1], Mapping) else {}
    return read_outputs(outputs)


def _is_scalar(value: Any) -> bool:
    """Whether a value is a tensor with one element, of any number of dimensions."""
    return isinstance(value, Tensor) and value.numel() == 1


def is_metric(value: Any) -> bool:
    """Whether a value is a metric that accumulates over batches itself, as those of torchmetrics do."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))
