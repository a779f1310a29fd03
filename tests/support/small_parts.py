"""Small parts that tests of many folders share."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def present(value: T | None) -> T:
    """What a function returned that may return None, and does not here."""
    assert value is not None
    return value


def compiled(model: M) -> M:
    """The module around a model that torch compiles, without generating code."""
    return cast("M", torch.compile(model, backend="eager"))


def data_loader(samples: Any, *positional: Any, **settings: Any) -> DataLoader[Any]:
    """torch's loader of anything that has samples; the types of torch ask for a `Dataset`."""
    return DataLoader(samples, *positional, **settings)


def note(notes: list[Any], value: Any) -> Any:
    """Append to a list, in a lambda that goes on: `lambda key: note(keys, key) or get(key)`."""
    notes.append(value)
