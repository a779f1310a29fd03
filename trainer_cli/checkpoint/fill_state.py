"""Fills a live state from a loaded one, and moves new tensors to other devices as `map_location` of `torch.load`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from trainer_cli.errors import CheckpointError, MissingStateError, UserError
from trainer_cli.leaves import map_leaves
from trainer_cli.tensor_files import LiveTensors
from trainer_cli.terminal import format_first

logger = logging.getLogger(__name__)

MapLocation = (
    torch.device | str | Mapping[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | None
)
"""A device, its name, a mapping of names of devices, or a function of a storage and the name of its device."""
_SAVED_AT = "cpu"
"""The device of all tensors of a checkpoint: it does not hold where they were."""


class LoadedState(dict[str, Any]):
    """A loaded tree. `missing` lists what was requested but is not in the checkpoint, as `a/b/c`."""

    def __init__(self, tree: Mapping[str, Any], missing: list[str] | None = None) -> None:
        super().__init__(tree)
        self.missing = missing or []


def load_into(
    state_dict: MutableMapping[str, Any],
    tree: Mapping[str, Any],
    where: str,
    location: MapLocation,
    live: LiveTensors,
    *,
    strict: bool,
) -> LoadedState:
    """Fill a live state from the tree of a checkpoint, see `Checkpointer.load`. Nothing is touched before all fits.

    Args:
        live: tensors of the state that are in the tree too, and have not been filled yet.
    """
    missing, faults = compare(state_dict, tree, "")
    if faults:
        raise CheckpointError(f"the checkpoint does not fit: {'; '.join(faults[:20])}", where=where)
    if missing:
        listed = format_first(missing, 20)
        if strict:
            raise MissingStateError(f"the checkpoint lacks {listed}", where=where)
        logger.warning("%s lacks %s", where, listed)
    new = move_tensors(new_values(state_dict, tree), location)
    live.read()
    fill(state_dict, tree, new)
    return LoadedState(state_dict, missing)


def move_tensors(tree: dict[str, Any], location: MapLocation) -> dict[str, Any]:
    """The tree with its tensors where `location` says; tied ones stay tied, and views of one memory share it.

    Raises:
        UserError: there is no such device.
    """
    if isinstance(location, Mapping):
        location = location.get(_SAVED_AT, _SAVED_AT)
    move = _by_function(location if callable(location) else _to_device(location or _SAVED_AT))
    # By identity: tied tensors are moved once, and stay tied.
    moved_tensors: dict[int, torch.Tensor] = {}

    def move_once(value: Any) -> Any:
        """The moved tensor; another value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in moved_tensors:
            moved_tensors[id(value)] = move(value)
        return moved_tensors[id(value)]

    moved: dict[str, Any] = map_leaves(move_once, tree)
    return moved


def _to_device(location: torch.device | str) -> Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]:
    """A function that moves a storage to a device, and returns None for one that is there already.

    Raises:
        UserError: there is no such device.
    """
    try:
        device = torch.device(location)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"default_map_location is {location!r}: {str(error).splitlines()[0]}") from None
    if device.type == _SAVED_AT:
        return lambda storage, _: None
    return lambda storage, _: torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()


def _by_function(
    function: Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that moves a tensor by moving its storage with `function`; None from it leaves the tensor as it is."""
    # By storage: views of one memory share it again where they are moved to.
    storages: dict[int, torch.UntypedStorage | None] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of its moved storage, which other views of it share."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = function(storage, _SAVED_AT)
        moved = storages[storage.data_ptr()]
        if moved is None:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=moved.device)
        return empty.set_(moved, tensor.storage_offset(), tensor.shape, tensor.stride())

    return move


def compare(target: Mapping[Any, Any], tree: Mapping[Any, Any], path: str) -> tuple[list[str], list[str]]:
    """The names below `path` that the tree lacks, and the tensors of the target that cannot be filled from it."""
    missing: list[str] = []
    faults: list[str] = []
    for key, value in target.items():
        name = f"{path}{key}"
        if key not in tree:
            missing.append(name)
            continue
        saved = tree[key]
        if isinstance(value, Mapping) and isinstance(saved, Mapping):
            more_missing, more_faults = compare(value, saved, f"{name}/")
            missing += more_missing
            faults += more_faults
        elif isinstance(value, torch.Tensor) and (fault := _misfit(value, saved)):
            faults.append(f"{name} {fault}")
    return missing, faults


def _misfit(target: torch.Tensor, saved: Any) -> str | None:
    """Why a tensor cannot be filled from a saved value; None if it can."""
    if not isinstance(saved, torch.Tensor):
        return f"is a tensor here, but a {type(saved).__name__} there"
    # `copy_` would convert these silently, or not at all.
    if target.layout is not torch.strided or target.is_nested:
        return f"is {'a nested tensor' if target.is_nested else target.layout} here, which cannot be filled"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "is an inference tensor here, which cannot be filled outside of torch.inference_mode()"
    if target.dtype != saved.dtype or target.shape != saved.shape:
        target_shape, saved_shape = tuple(target.shape), tuple(saved.shape)
        return f"is {target.dtype} of shape {target_shape} here, but {saved.dtype} of {saved_shape} there"
    # Saved elements would overwrite each other, because some elements of the target share their memory.
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
        return "is expanded here: several of its elements are one in memory, so it cannot be filled"
    return None


def new_values(target: Mapping[Any, Any], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """The values of a tree that are not copied into tensors of the target, but replace its values."""
    values: dict[Any, Any] = {}
    for key, value in target.items():
        if key not in tree or isinstance(value, torch.Tensor):
            continue
        are_mappings = isinstance(value, MutableMapping) and isinstance(tree[key], Mapping)
        values[key] = new_values(value, tree[key]) if are_mappings else tree[key]
    return values


def fill(target: MutableMapping[Any, Any], tree: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
    """Copy the tensors of a tree into those of the target, and put `new` in the place of other values."""
    for key, value in target.items():
        if key not in tree:
            continue
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                # In place: optimizers and compiled functions hold this tensor. A copy of a tensor to itself, which was
                # read into, only increments its version.
                value.copy_(tree[key])
        elif isinstance(value, MutableMapping) and isinstance(tree[key], Mapping):
            fill(value, tree[key], new[key])
        else:
            target[key] = new[key]
