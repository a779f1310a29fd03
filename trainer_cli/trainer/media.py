"""Texts, images, histograms and tables of a step, as arrays on the host that every logger takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer_cli.errors import UserError
from trainer_cli.loggers.base import Table


class Kind(StrEnum):
    """What is shown; the name is that of the field of a `Record`."""

    texts = "texts"
    images = "images"
    histograms = "histograms"
    tables = "tables"


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """One of them, in the record of a step."""

    kind: Kind
    name: str
    value: Any

    @property
    def key(self) -> str:
        """Its key among the metrics of the record, which may have the same name."""
        return f"{self.kind}: {self.name}"


def text_medium(name: str, value: str) -> Medium:
    """A text."""
    return Medium(Kind.texts, name, str(value))


def image_medium(name: str, value: Any) -> Medium:
    """An image as bytes of shape (height, width, channels); `value` as in `Trainer.log_image`.

    Raises:
        UserError: it has another shape.
    """
    given = _array(value)
    array = given[None] if given.ndim == 2 else given
    if array.ndim != 3 or array.shape[0] not in (1, 3, 4) or 0 in array.shape:
        raise UserError(
            f"image {name!r} has shape {given.shape}",
            cure="Give (height, width) or (channels, height, width), with 1, 3 or 4 channels.",
        )
    if array.dtype == np.bool_ or np.issubdtype(array.dtype, np.floating):
        array = np.nan_to_num(array.astype(np.float32), nan=0.0).clip(0, 1) * 255
    return Medium(Kind.images, name, np.ascontiguousarray(array.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)))


def histogram_medium(name: str, values: Any) -> Medium:
    """The finite ones of some values, flat."""
    array = _array(values).reshape(-1).astype(np.float64)
    return Medium(Kind.histograms, name, array[np.isfinite(array)])


def table_medium(name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Medium:
    """Rows under the names of their columns.

    Raises:
        UserError: a row has more or fewer values than there are columns, or something else than texts and numbers.
    """
    found = tuple(tuple(one.item() if hasattr(one, "item") else one for one in row) for row in rows)
    for row in found:
        if len(row) != len(columns) or not all(isinstance(one, str | int | float | None) for one in row):
            raise UserError(f"table {name!r} has the row {row!r} under the columns {list(columns)!r}")
    return Medium(Kind.tables, name, Table(tuple(map(str, columns)), found))


def _array(value: Any) -> NDArray[Any]:
    """Values on the host. A tensor is copied, since training goes on in place."""
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        # numpy has no bfloat16.
        value = (host.float() if host.is_floating_point() else host).numpy()
    return np.array(value)
