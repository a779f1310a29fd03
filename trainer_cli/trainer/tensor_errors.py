"""Help for errors of torch in a model: a batch of another dtype or device, or a label out of range."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_cli.batches import is_dense
from trainer_cli.errors import HELP

_MOST_SHOWN = 4
_OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")
_OTHER_DEVICE = re.compile(r"on the same device|not on the expected device")
_NEEDS_INTEGERS = re.compile(r"(dtype|scalar types?)( to be|:)? Long")
_OTHER_DTYPE = re.compile(
    r"must have the same dtype|type .* should be the same|expected scalar type|can't be cast to the desired output type"
)


def help_for(error: Exception, model: nn.Module, batch: Any) -> str | None:
    """A line for the user that names the tensors of the batch of the wrong dtype, device or range, and how to change
    them; None if the error is of another kind."""
    text, tensors = str(error), list(_tensors(batch, "batch"))
    float_parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    dtype = float_parameters[0].dtype if float_parameters else torch.float32
    dtypes = ", ".join(f"{name} is {_name(value.dtype)}" for name, value in tensors[:_MOST_SHOWN])
    if (label := _OUT_OF_BOUNDS.search(text)) is not None:
        names = [name for name, value in tensors if is_dense(value) and bool((value == int(label[1])).any())]
        where = f" of {names[-1]}" if names else ""
        return (
            f"{HELP} the label {label[1]}{where} is no class: with N scores the labels are 0 to N - 1. "
            "Give the model more classes, or let the labels begin at 0; ignore_index leaves one out."
        )
    if _OTHER_DEVICE.search(text):
        device = float_parameters[0].device if float_parameters else "the device of the run"
        return (
            f"{HELP} model and batch are on {device}. Make the tensors of forward there, as in "
            "torch.zeros(…, device=x.device), and register those that the model keeps by register_buffer."
        )
    if _NEEDS_INTEGERS.search(text):
        return (
            f"{HELP} class labels and indices must be int64, and {dtypes}. Make them so in the dataset: .long() of a "
            "tensor, .astype('int64') of a NumPy array."
        )
    other_dtypes = [name for name, value in tensors if value.dtype is not dtype]
    if not _OTHER_DTYPE.search(text) or not other_dtypes:
        return None
    return (
        f"{HELP} the model is {_name(dtype)}, and {dtypes}. Make what it computes with {_name(dtype)} in the dataset: "
        f".to(torch.{_name(dtype)}) of a tensor, .astype('{_name(dtype)}') of a NumPy array."
    )


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with the expressions that name them, such as batch[0] and batch['x']."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors(entry, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _tensors(entry, f"{name}[{index}]")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
