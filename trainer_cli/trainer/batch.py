"""Batches: find and move the tensors in any container, and the number of samples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`.

    Containers keep their type: mappings, lists, tuples, named tuples, dataclasses, PackedSequence, and whatever has a
    method `to`. Everything else stays as it is.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if type(batch) is dict:
        return {key: to_device(value, device) for key, value in batch.items()}
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _mapping_like(batch, {key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    if _is_dataclass(batch):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # A frozen dataclass too.
            object.__setattr__(moved, field.name, to_device(getattr(batch, field.name), device))
        return moved
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor in a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for part in parts_of_batch(batch):
            yield from tensors_of(part)


def leading_size(batch: Any) -> int | None:
    """The leading size of the first tensor in a batch that has one: how many samples it holds. None without any."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, PackedSequence):
        # Packed by time step, and the first step has every sequence. These sizes are in host memory.
        return int(batch.batch_sizes[0])
    return next((size for size in map(leading_size, parts_of_batch(batch)) if size is not None), None)


def parts_of_batch(batch: Any) -> Iterable[Any]:
    """What a container of a batch holds; nothing for other objects."""
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if _is_dataclass(batch):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return vars(batch).values() if hasattr(batch, "to") and hasattr(batch, "__dict__") else ()


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _mapping_like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same type and attributes with other values."""
    if not hasattr(batch, "__setitem__"):
        return type(batch)(values)  # type: ignore[call-arg]
    moved: Any = copy.copy(batch)
    for key, value in values.items():
        moved[key] = value
    return moved
