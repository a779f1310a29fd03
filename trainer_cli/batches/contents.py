"""The tensors in a batch, which may be any container of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_cli.containers import container_of, rebuild, values_of

_MAX_SHOWN = 8


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor in a batch to `device`.

    Containers keep their type: mappings, lists, tuples, named tuples, dataclasses, and objects with a method `to`, such
    as PackedSequence. Other objects are returned as they are.
    """
    if isinstance(batch, Tensor):
        # From pinned memory the host does not wait for the copy.
        return batch.to(device, non_blocking=True)
    # First what most batches are, and what most of them hold: this is done in every step.
    if type(batch) is dict:
        return {key: to_device(value, device) for key, value in batch.items()}
    if batch is None or isinstance(batch, str | int | float):
        return batch
    if hasattr(batch, "to"):
        return batch.to(device)
    return rebuild(batch, [to_device(value, device) for value in values_of(batch)])


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for value in contents_of(batch):
            yield from tensors_of(value)


def is_dense(tensor: Tensor) -> bool:
    """Whether every value of a tensor can be read: it is not sparse, not nested, and not on the device `meta`."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


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
    if hasattr(batch, "to") and hasattr(batch, "__dict__") and container_of(batch) is None:
        return list(vars(batch).values())
    return values_of(batch)


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
