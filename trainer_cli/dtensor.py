"""Sharded tensors (torch's DTensor): the part of each rank, its position, and the ranks with the same part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trainer_cli.layout import Shard


_MODULE = "torch.distributed.tensor"
_REDISTRIBUTE = (
    "Distribute it by Shard or Replicate alone: tensor.redistribute(placements=[…]), before it becomes a part of the "
    "state."
)


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor."""
    # Without an import of torch's module, which takes a second: if it is not loaded, no DTensor exists.
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Any) -> Any:
    """This rank's part of a DTensor, sharing its memory; another value as it is."""
    if type(tensor) is torch.Tensor or not is_dtensor(tensor):
        return tensor
    # The private attribute, since this runs at each step: `detach` and `to_local` take a hundred times as long.
    local = getattr(tensor, "_local_tensor", None)
    return tensor.detach().to_local() if local is None else local


def whole_of(tensor: Any) -> Any:
    """The whole of a DTensor, which is collective; another value as it is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a tensor."""

    leaf: Any
    """A tensor or array."""
    shard: Shard
    ranks: tuple[int, ...]
    """The ranks that have the same part, including this one."""


def part_of(name: str, leaf: Any, tensor_size: int = 1) -> Part:
    """This rank's part of a DTensor.

    Args:
        tensor_size: number of consecutive ranks that form a tensor-parallel group. If the mesh of a tensor has only one
            rank of each group, the others have the same part.

    Raises:
        UnsavableState: its elements are partial sums, or this rank's part is not one contiguous box.
    """
    from torch.distributed.tensor import Partial, Replicate

    from trainer_cli.layout import Shard

    # Partial sums would have to be reduced first, which is a collective that a save does not have.
    if any(isinstance(placement, Partial) for placement in leaf.placements):
        raise _unsavable_error(
            f"{name} is a tensor whose ranks hold partial sums, which cannot be saved in a checkpoint",
            cure=_REDISTRIBUTE,
        )
    local = local_of(leaf)
    # The method that torch's own checkpoints call.
    boxes = leaf.__create_chunk_list__()
    # A shard is one box of the tensor in the manifest; strided shardings would need several.
    if len(boxes) != 1 or tuple(boxes[0].sizes) != tuple(local.shape):
        raise _unsavable_error(
            f"{name} is sharded in pieces, which cannot be saved in a checkpoint", cure=_REDISTRIBUTE
        )
    # An empty shard of an uneven division may begin beyond the end.
    offsets = (min(begin, size) for begin, size in zip(boxes[0].offsets, leaf.shape, strict=True))
    shard = Shard(tuple(leaf.shape), tuple(map(int, offsets)), tuple(local.shape))
    mesh, coordinate = leaf.device_mesh, leaf.device_mesh.get_coordinate()
    # All ranks along the dimensions of the mesh in which the tensor is replicated.
    replicas = tuple(
        slice(None) if isinstance(placement, Replicate) else index
        for placement, index in zip(leaf.placements, coordinate, strict=True)
    )
    ranks: list[int] = mesh.mesh[replicas].reshape(-1).tolist()
    has_whole_group = set(_tensor_group(ranks[0], tensor_size)) <= set(mesh.mesh.reshape(-1).tolist())
    if tensor_size > 1 and not has_whole_group:
        # The mesh has one rank of each tensor group; the other ranks of the group have the same part.
        ranks = [member for rank in ranks for member in _tensor_group(rank, tensor_size)]
    return Part(local, shard, tuple(ranks))


def _unsavable_error(message: str, cure: str) -> Exception:
    """An UnsavableState."""
    # Imported only for an error: nothing else of the manifest is needed.
    from trainer_cli.manifest import UnsavableState

    return UnsavableState(message, cure=cure)


def _tensor_group(rank: int, tensor_size: int) -> range:
    """The ranks of the tensor-parallel group of this rank."""
    first = rank - rank % tensor_size
    return range(first, first + tensor_size)


def undistributed(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors with each DTensor, of which this rank must have all, as a plain one.

    Raises:
        UnsavableState: this rank has only a part of a tensor.
    """
    if not any(map(is_dtensor, tensors.values())):
        return tensors
    plain = {}
    for name, leaf in tensors.items():
        if is_dtensor(leaf):
            local = part_of(name, leaf)
            if not local.shard.is_whole:
                raise _unsavable_error(
                    f"{name} is {local.shard} here; of several ranks only the formats tensors and archive save parts",
                    cure="Set checkpoint.format=tensors.",
                )
            leaf = local.leaf
        plain[name] = leaf
    return plain


@dataclass(frozen=True, slots=True)
class Target:
    """A DTensor that a tensor of a checkpoint is loaded into, and this rank's shard of it."""

    like: Any
    shard: Shard

    def wrap(self, local: torch.Tensor) -> Any:
        """A DTensor of the same placements with this local part."""
        # No check that all ranks agree: it would be a collective for each tensor.
        from torch.distributed.tensor import DTensor

        like = self.like
        return DTensor.from_local(
            local.to(local_of(like).device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def narrowed(self, whole: torch.Tensor) -> Any:
        """A DTensor with a copy of this rank's part of a plain tensor."""
        index = tuple(
            slice(begin, begin + size) for begin, size in zip(self.shard.offsets, self.shard.sizes, strict=True)
        )
        # A copy, so that the memory of the whole tensor is freed.
        return self.wrap(whole[index].clone())


Targets = Callable[[tuple[str, ...], tuple[int, ...]], Target | None]
"""The keys that lead to a tensor of a state, and its shape -> the DTensor that it is loaded into, or None."""


def targets_of(named: Mapping[str, Any], rename: Callable[[str], str] = str) -> Targets | None:
    """Targets for the tensors of a state that belong to a model: parameters, and averages of an optimizer or callback.

    The target of a tensor is the DTensor of the same shape whose name is one of the keys that lead to it.

    Args:
        named: the tensors of the model by name.
        rename: a name of the checkpoint -> its name in the model.

    Returns None if none of them is a DTensor.
    """
    by_name = {name: Target(like, part_of(name, like).shard) for name, like in named.items() if is_dtensor(like)}
    # Without sharded tensors the readers take their plain way, which reads each file once.
    if not by_name:
        return None

    def find_target(keys: tuple[str, ...], shape: tuple[int, ...]) -> Target | None:
        for key in keys:
            target = by_name.get(key) or by_name.get(rename(key))
            if target is not None and target.shard.shape == shape:
                return target
        return None

    return find_target


def targets_in(state: Mapping[Any, Any]) -> Targets | None:
    """The DTensors of a state as targets of the tensors with the same keys; None if it has no DTensor."""
    by_keys: dict[tuple[str, ...], Target] = {}

    def walk(value: Any, keys: tuple[str, ...]) -> None:
        if is_dtensor(value):
            by_keys[keys] = Target(value, part_of("/".join(keys), value).shard)
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                walk(entry, (*keys, str(key)))

    def find_target(keys: tuple[str, ...], shape: tuple[int, ...]) -> Target | None:
        target = by_keys.get(keys)
        return target if target is not None and target.shard.shape == shape else None

    walk(state, ())
    return find_target if by_keys else None


def distributed(value: Any, targets: Targets) -> Any:
    """Replace, in place, the plain tensors of a state that have a target by DTensors with this rank's part."""
    # Id of a plain tensor -> its DTensor, so that tied tensors stay one tensor.
    done: dict[int, Any] = {}

    def walk(value: Any, keys: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            if is_dtensor(value) or (target := targets(keys, tuple(value.shape))) is None:
                return value
            if id(value) not in done:
                done[id(value)] = target.narrowed(value)
            return done[id(value)]
        if isinstance(value, dict):
            for key, entry in value.items():
                value[key] = walk(entry, (*keys, str(key)))
        elif type(value) is list:
            value[:] = [walk(entry, keys) for entry in value]
        return value

    return walk(value, ())
