"""Folders of torch.distributed.checkpoint, in one process and without running what is in their pickles."""

from __future__ import annotations

import io
import math
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from trainer_cli.checkpoint.foreign.kind import DCP_METADATA
from trainer_cli.checkpoint.foreign.safetensors_file import load_safetensors
from trainer_cli.checkpoint.naming import is_plain
from trainer_cli.errors import CheckpointError

_LARGEST_METADATA = 1024 * 1024 * 1024
_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{
        (module.__name__, name): getattr(module, name)
        for module, names in (
            (
                metadata,
                "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
                "TensorStorageMetadata _MEM_FORMAT_ENCODING",
            ),
            (filesystem, "_StorageInfo"),
        )
        for name in names.split()
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): getattr(torch.serialization, "_get_layout"),  # noqa: B009
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
}
"""What the metadata that torch writes is made of; all of it holds data alone."""
_MODEL = (("app", "model"), ("app", "state", "model"), ("model",), ("state_dict",), ("module",))
"""Where programs keep the model in the saved tree."""


class _Unpickler(pickle.Unpickler):
    """Makes what torch's metadata consists of, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of torch has")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it has an external object")


def load_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, put together from the parts of all ranks, by their names in the model.

    Raises:
        CheckpointError: metadata or parts are damaged, or the metadata names what it does not need.
    """
    where = folder / DCP_METADATA
    try:
        if where.stat().st_size > _LARGEST_METADATA:
            raise ValueError("it is too large")
        found = _Unpickler(io.BytesIO(where.read_bytes())).load()
        if not isinstance(found, metadata.Metadata):
            raise ValueError(f"it is a {type(found).__name__}")
        tensors = {
            name: one
            for name, one in found.state_dict_metadata.items()
            if isinstance(one, metadata.TensorStorageMetadata)
        }
        paths = found.planner_data if isinstance(found.planner_data, dict) else {}
        names = _names({name: tuple(map(str, paths.get(name, (name,)))) for name in tensors})
        parts = _parts(found.storage_data, names)
        present = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        if sum(_size_bytes(tensors[name]) for name in names) > present:
            raise ValueError("its tensors are larger than the folder's files")
        return {new: _tensor(folder, name, tensors[name], parts.get(name, [])) for name, new in names.items()}
    except CheckpointError:
        raise
    except Exception as error:  # The metadata may hold any values where torch writes numbers and names.
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"the DCP checkpoint cannot be read: {said}", where=str(where)) from None


def _names(paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Each saved name of the model's tensors -> its name in the model. `paths`: where each stood in the saved tree."""
    dotted = {name: tuple(".".join(path).split(".")) for name, path in paths.items()}
    for prefix in _MODEL:
        own = {name: parts for name, parts in dotted.items() if parts[: len(prefix)] == prefix}
        if own:
            return {name: ".".join(parts[len(prefix) :]) for name, parts in own.items()}
    return {name: ".".join(parts) for name, parts in dotted.items() if not parts[0].startswith("optim")}


def _size_bytes(one: metadata.TensorStorageMetadata) -> int:
    return math.prod(int(size) for size in one.size) * one.properties.dtype.itemsize


def _parts(storage_data: Any, names: Iterable[str]) -> dict[str, list[tuple[tuple[int, ...], Any]]]:
    """Saved name -> offset in the tensor and place in the files of each part."""
    wanted = set(names)
    found: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for index, place in storage_data.items():
        if index.fqn in wanted:
            found.setdefault(index.fqn, []).append((tuple(int(one) for one in index.offset or ()), place))
    return found


def _tensor(
    folder: Path, name: str, one: metadata.TensorStorageMetadata, parts: list[tuple[tuple[int, ...], Any]]
) -> torch.Tensor:
    shape, dtype = tuple(int(size) for size in one.size), one.properties.dtype
    sizes = {tuple(int(at) for at in chunk.offsets): tuple(int(n) for n in chunk.sizes) for chunk in one.chunks}
    _check_cover(shape, sizes)
    if sizes.keys() != {offset for offset, _ in parts}:
        raise ValueError("a part of a tensor is missing")
    whole = torch.empty(shape, dtype=dtype)
    for offset, place in parts:
        part = _part(folder, name, place)
        if tuple(part.shape) != sizes[offset] or part.dtype is not dtype:
            raise ValueError("a part of a tensor is not of the size that the metadata says")
        whole[tuple(slice(at, at + count) for at, count in zip(offset, sizes[offset], strict=True))] = part
    return whole


def _check_cover(shape: tuple[int, ...], sizes: Mapping[tuple[int, ...], tuple[int, ...]]) -> None:
    """Refuse parts that leave a hole in the tensor, overlap, or lie outside it."""
    for offset, size in sizes.items():
        inside = len(offset) == len(size) == len(shape) and all(
            at >= 0 and count >= 0 and at + count <= whole for at, count, whole in zip(offset, size, shape, strict=True)
        )
        if not inside:
            raise ValueError("a part of a tensor lies outside it")
    if sum(map(math.prod, sizes.values())) != math.prod(shape):
        raise ValueError("the parts of a tensor do not fill it")
    if len(sizes) > 1 and any(_overlapping(sizes)):
        raise ValueError("parts of a tensor overlap")


def _overlapping(sizes: Mapping[tuple[int, ...], tuple[int, ...]]) -> Iterator[bool]:
    """For each part, whether it shares an element with another."""
    begin = torch.tensor(list(sizes))
    end = begin + torch.tensor(list(sizes.values()))
    for own_begin, own_end in zip(begin, end, strict=True):
        shared = ((own_begin < end) & (begin < own_end)).all(dim=1)
        yield bool(shared.sum() > 1)


def _part(folder: Path, name: str, place: Any) -> torch.Tensor:
    """One part: written by torch.save at its place in a file, or among the tensors of a safetensors file."""
    if not is_plain(place.relative_path) or place.transform_descriptors:
        raise ValueError("a part lies outside the folder, or is compressed")
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        content = file.read(place.length)
    if not content.startswith(b"PK"):
        return load_safetensors(folder / place.relative_path, [name])[name]
    if len(content) != place.length:
        raise ValueError(f"{place.relative_path} is shorter than it was")
    loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(loaded, torch.Tensor):
        raise ValueError(f"{place.relative_path} holds a {type(loaded).__name__} where a tensor should be")
    return loaded.detach()
