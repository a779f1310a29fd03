"""The tensors in a batch, which may be any container of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_cli.dtensor import local_of

_MAX_SHOWN = 8


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor in a batch to `device`.

    Containers keep their type: mappings, lists, tuples, named tuples, dataclasses, and objects with a method `to`, such
    as PackedSequence. Other objects are returned as they are.
    """
    if isinstance(batch, Tensor):
        # From pinned memory the host does not wait for the copy.
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
            # setattr would fail for a frozen dataclass.
            object.__setattr__(moved, field.name, to_device(getattr(batch, field.name), device))
        return moved
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for value in contents_of(batch):
            yield from tensors_of(value)


def is_dense(tensor: Tensor) -> bool:
    """Whether each value of a tensor can be looked at: it is not sparse, not nested, and not on the device `meta`."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def named_leaves(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in the mappings and sequences of a batch or sample with its name: `image`, `views[0].image`."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from named_leaves(value, f"{name}.{key}".lstrip("."))
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from named_leaves(value, f"{name}[{index}]")
    elif _is_dataclass(batch):
        yield from named_leaves(vars(batch), name)
    else:
        yield name, batch


def leading_size(batch: Any) -> int | None:
    """The leading size of the first tensor in a batch, or None if no tensor has one."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, PackedSequence):
        # Packed by time step, and every sequence has a first step. These sizes are in host memory.
        return int(batch.batch_sizes[0])
    return next((size for size in map(leading_size, contents_of(batch)) if size is not None), None)


def contents_of(batch: Any) -> Iterable[Any]:
    """The values in a container of a batch; empty for other objects."""
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
    """Make a mapping with other values, and with the type and attributes of `batch`."""
    if not hasattr(batch, "__setitem__"):
        return type(batch)(values)  # type: ignore[call-arg]
    moved: Any = copy.copy(batch)
    for key, value in values.items():
        moved[key] = value
    return moved


def describe_batch(batch: Any) -> str:
    """Describe the structure of a batch: containers, types and shapes."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}[{', '.join(map(str, batch.shape))}]"
    if isinstance(batch, Mapping):
        entries = [f"{key}: {describe_batch(value)}" for key, value in list(batch.items())[:_MAX_SHOWN]]
        return "{" + ", ".join([*entries, *(["…"] if len(batch) > _MAX_SHOWN else [])]) + "}"
    if isinstance(batch, list | tuple):
        entries = [describe_batch(value) for value in batch[:_MAX_SHOWN]] + (["…"] if len(batch) > _MAX_SHOWN else [])
        return f"({', '.join(entries)})" if isinstance(batch, tuple) else f"[{', '.join(entries)}]"
    return type(batch).__name__


def rows_with_nan(batch: Any, size: int | None) -> dict[str, list[int]]:
    """The names of the tensors in a batch that hold NaN, each with the rows that do. An infinity is none: a mask may
    consist of it. A tensor is without rows if its leading size is not `size`, the number of samples, and if all of them
    hold NaN, as padded targets do: then none is to blame. A tensor that is not dense is left out."""
    rows: dict[str, list[int]] = {}
    for name, leaf in named_leaves(batch):
        for value in tensors_of(leaf):
            values = local_of(value).detach()
            if is_dense(values) and (values.is_floating_point() or values.is_complex()) and bool(values.isnan().any()):
                has_rows = values.ndim > 0 and values.shape[0] == size
                found = values.isnan().reshape(len(values), -1).any(1).nonzero().flatten().tolist() if has_rows else []
                rows[name] = found if len(found) != size else []
    return rows
