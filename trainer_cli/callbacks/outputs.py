"""Find predictions and targets in what a model returned, or in its batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainer_cli.errors import UserError


def value_of(key: str | int, outputs: Any, batch: Any) -> Tensor:
    """The tensor `key` of a model's outputs, else of the batch; a number is a place in a batch that is a sequence.

    Raises:
        UserError: there is none.
    """
    if isinstance(outputs, tuple) and len(outputs) == 2:
        outputs = outputs[1]
    for place in (outputs, batch):
        if isinstance(place, Mapping) and isinstance(place.get(key), Tensor):
            found: Tensor = place[key]
            return found
    if isinstance(key, int) and isinstance(batch, list | tuple) and -len(batch) <= key < len(batch):
        value: Tensor = batch[key]
        return value
    known = [str(name) for place in (outputs, batch) if isinstance(place, Mapping) for name in place]
    raise UserError(
        f"neither the model's outputs nor the batch has a tensor '{key}'",
        cure=f"There are {', '.join(known)}." if known else "Return a mapping with it from the model's forward.",
    )
