"""Tensors of which each rank has a part (torch's DTensor): the part, where it lies, and which ranks have the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_cli.checkpoint.format.tree import Leaf, UnsavableState
from trainer_cli.core.shards import Shard

_MODULE = "torch.distributed.tensor"


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor. Does not import torch's module, which takes a second."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Any) -> Any:
    """This rank's part of a DTensor, sharing its memory; another value as it is."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank has of a tensor."""

    leaf: Leaf
    shard: Shard
    ranks: tuple[int, ...]
    """The ranks that have the same, this one included."""


def part_of(name: str, leaf: Any, tensor_size: int = 1) -> Part:
    """This rank's part of a DTensor.

    Args:
        tensor_size: ranks in a row that have the same of a tensor whose mesh does not have all of them.

    Raises:
        UnsavableState: its elements are sums that were not made, or do not lie in one box.
    """
    from torch.distributed.tensor import Partial, Replicate

    if any(isinstance(placement, Partial) for placement in leaf.placements):
        raise UnsavableState(f"{name} is a tensor whose ranks hold partial sums, which cannot be saved in a checkpoint")
    local = local_of(leaf)
    # What torch's own checkpoints ask a tensor for.
    boxes = leaf.__create_chunk_list__()
    if len(boxes) != 1 or tuple(boxes[0].sizes) != tuple(local.shape):
        raise UnsavableState(f"{name} is sharded in pieces, which cannot be saved in a checkpoint")
    offsets = (min(begin, size) for begin, size in zip(boxes[0].offsets, leaf.shape, strict=True))
    shard = Shard(tuple(leaf.shape), tuple(map(int, offsets)), tuple(local.shape))
    mesh, own = leaf.device_mesh, leaf.device_mesh.get_coordinate()
    same = tuple(
        slice(None) if isinstance(placement, Replicate) else index
        for placement, index in zip(leaf.placements, own, strict=True)
    )
    ranks: list[int] = mesh.mesh[same].reshape(-1).tolist()
    if tensor_size > 1 and not set(_tensor_group(ranks[0], tensor_size)) <= set(mesh.mesh.reshape(-1).tolist()):
        ranks = [other for one in ranks for other in _tensor_group(one, tensor_size)]
    return Part(local, shard, tuple(ranks))


def _tensor_group(rank: int, tensor_size: int) -> range:
    """The ranks that divide layers between them, of which this is one."""
    first = rank - rank % tensor_size
    return range(first, first + tensor_size)


def undistributed(tensors: Mapping[str, Leaf]) -> Mapping[str, Leaf]:
    """Tensors with those of one rank's mesh as plain ones.

    Raises:
        UnsavableState: this rank has only a part of one.
    """
    if not any(map(is_dtensor, tensors.values())):
        return tensors
    found = {}
    for name, leaf in tensors.items():
        if is_dtensor(leaf):
            part = part_of(name, leaf)
            if not part.shard.is_whole:
                raise UnsavableState(
                    f"{name} is {part.shard} here; of several ranks only the formats tensors and archive save parts"
                )
            leaf = part.leaf
        found[name] = leaf
    return found


@dataclass(frozen=True, slots=True)
class Target:
    """A DTensor that a tensor of a checkpoint is for: what this rank needs of it, and how that becomes a DTensor."""

    like: Any
    shard: Shard

    def wrap(self, local: torch.Tensor) -> Any:
        """A DTensor of the same placements with this local part."""
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
        """A DTensor with this rank's part of a plain tensor, which is copied."""
        index = tuple(
            slice(begin, begin + size) for begin, size in zip(self.shard.offsets, self.shard.sizes, strict=True)
        )
        return self.wrap(whole[index].clone())


Targets = Callable[[tuple[str, ...], tuple[int, ...]], Target | None]
"""The keys that lead to a tensor of a state, and its shape -> the DTensor that it is for, if it is for one."""


def targets_of(named: Mapping[str, Any], rename: Callable[[str], str] = str) -> Targets | None:
    """Targets among a model's tensors, for what a state keeps of each: the tensor itself, an optimizer's averages of
    it, a callback's. A tensor is for the one whose name is among its keys, and that has its shape.

    Args:
        named: the tensors of the model by name.
        rename: a name of the checkpoint -> its name in the model.

    Returns None if none of them is a DTensor.
    """
    found = {name: Target(like, part_of(name, like).shard) for name, like in named.items() if is_dtensor(like)}
    if not found:
        return None

    def target(keys: tuple[str, ...], shape: tuple[int, ...]) -> Target | None:
        for key in keys:
            one = found.get(key) or found.get(rename(key))
            if one is not None and one.shard.shape == shape:
                return one
        return None

    return target


def targets_in(state: Mapping[Any, Any]) -> Targets | None:
    """The DTensors of a state as targets, each of the tensor with the same keys; None if there are none."""
    found: dict[tuple[str, ...], Target] = {}

    def walk(value: Any, keys: tuple[str, ...]) -> None:
        if is_dtensor(value):
            found[keys] = Target(value, part_of("/".join(keys), value).shard)
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                walk(entry, (*keys, str(key)))

    def target(keys: tuple[str, ...], shape: tuple[int, ...]) -> Target | None:
        match = found.get(keys)
        return match if match is not None and match.shard.shape == shape else None

    walk(state, ())
    return target if found else None


def distributed(value: Any, targets: Targets, keys: tuple[str, ...] = ()) -> Any:
    """A state with this rank's part of the tensors that are for DTensors; what is one already stays."""
    done: dict[int, Any] = {}

    def walk(value: Any, keys: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            if is_dtensor(value) or (target := targets(keys, tuple(value.shape))) is None:
                return value
            if id(value) not in done:
                done[id(value)] = target.narrowed(value)
            return done[id(value)]
        if isinstance(value, dict):
            for key, one in value.items():
                value[key] = walk(one, (*keys, str(key)))
        elif type(value) is list:
            value[:] = [walk(one, keys) for one in value]
        return value

    return walk(value, keys)
