"""Split a batch into smaller ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, assert_never

from torch import Tensor

from trainer_cli.batches.contents import tensors_of
from trainer_cli.containers import Container, container_of, rebuild, values_of
from trainer_cli.errors import UserError
from trainer_cli.terminal import format_count


def split_batch(batch: Any, size: int, max_size: int) -> Iterator[tuple[Any, int]]:
    """Split a batch of `size` samples into microbatches of at most `max_size`, each with its number of samples.

    Raises:
        UserError: a tensor of the batch does not have that leading size.
    """
    if size <= max_size:
        yield batch, size
        return
    for start in range(0, size, max_size):
        stop = min(start + max_size, size)
        yield _slice_batch(batch, size, slice(start, stop)), stop - start


def _slice_batch(batch: Any, size: int, samples: slice) -> Any:
    """Slice every tensor and list of samples in a batch; containers keep their type."""
    if isinstance(batch, Tensor):
        if batch.ndim == 0:
            return batch
        if batch.shape[0] != size:
            raise UserError(
                f"a batch of {format_count(size, 'sample')} has a tensor of shape {tuple(batch.shape)}, which cannot "
                "be split",
                where="loop.microbatch",
            )
        return batch[samples]
    sliced = (_slice_batch(value, size, samples) for value in values_of(batch))
    match container_of(batch):
        case Container.sequence if len(batch) == size and _are_samples(batch, size):
            return batch[samples]
        case Container.named_tuple | Container.sequence:
            return rebuild(batch, sliced)
        # Not `rebuild`, in these two: what a constructor computes of the values is that of the slice.
        case Container.mapping:
            return type(batch)(dict(zip(batch, sliced, strict=True)))
        case Container.dataclass:
            names = (field.name for field in dataclasses.fields(batch))
            return dataclasses.replace(batch, **dict(zip(names, sliced, strict=True)))
        case None if batch is None or isinstance(batch, str | int | float | bool):
            return batch
        case None:
            raise UserError(
                f"a batch with a {type(batch).__name__} cannot be split",
                where="loop.microbatch",
                cure="Set it to null.",
            )
        case other:
            assert_never(other)


def _are_samples(batch: list[Any] | tuple[Any, ...], size: int) -> bool:
    """Whether each of the `size` items of a sequence is a sample, rather than a field of all samples.

    Raises:
        UserError: it could be either.
    """
    tensors = list(tensors_of(batch))
    fit_fields = bool(tensors) and all(tensor.ndim and tensor.shape[0] == size for tensor in tensors)
    dims = {tensor.ndim for tensor in tensors}
    is_square = all(isinstance(item, list | tuple) and len(item) == size for item in batch)
    # Tensors that differ in rank are fields, and so are vectors: a sample of a vector would be as long as the batch.
    is_ambiguous = len(dims) == 1 and dims != {1} if fit_fields else is_square
    if is_ambiguous:
        raise UserError(
            f"a batch of {format_count(size, 'sample')} is a {type(batch).__name__} of {format_count(size, 'item')}, "
            f"each of length {size}: it may hold samples, or fields of all samples",
            where="loop.microbatch",
            cure="Let the collate_fn return a mapping, or use another data.batch_size.",
        )
    return not fit_fields
