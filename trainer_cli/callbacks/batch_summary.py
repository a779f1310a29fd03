"""What the first batch of a fit holds, and what the model makes of it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

COLUMNS = ("tensor", "shape", "type", "min", "max", "mean", "not finite")


class BatchSummary(Callback):
    """Prints shape, type and range of every tensor in the first batch of a fit and in the model's outputs for it, and
    logs them as the table `debug/first_batch`.
    """

    def __init__(self) -> None:
        self._done = False

    def on_fit_start(self, *args: Any) -> None:
        self._done = False

    def on_after_forward(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if self._done or not model.training:
            return
        self._done = True
        rows = [_row(*one) for place, value in (("batch", batch), ("outputs", outputs)) for one in named(place, value)]
        for row in rows:
            log.info("%s: %s %s from %s to %s, mean %s, %s not finite", *row)
        trainer.log_table("debug/first_batch", COLUMNS, rows)


def named(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in mappings, lists, tuples and dataclasses, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from named(f"{path}.{key}", one)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from named(f"{path}.{index}", one)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from named(f"{path}.{field.name}", getattr(value, field.name))


def _row(path: str, value: Tensor) -> tuple[str | float, ...]:
    value = value.detach()
    kind, shape = str(value.dtype).removeprefix("torch."), str(tuple(value.shape))
    if value.numel() == 0 or value.is_complex():
        return path, shape, kind, "", "", "", ""
    numbers = value.double().cpu()
    finite = numbers[numbers.isfinite()]
    if finite.numel() == 0:
        return path, shape, kind, "", "", "", numbers.numel()
    low, high, mean = (round(float(one), 6) for one in (finite.min(), finite.max(), finite.mean()))
    return path, shape, kind, low, high, mean, numbers.numel() - finite.numel()
