"""Folders of torch.distributed.checkpoint, in one process and without running what is in their pickles."""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_cli.checkpoint.foreign.files import open_safetensors
from trainer_cli.checkpoint.foreign.kind import DCP_METADATA
from trainer_cli.checkpoint.format.torch_file import ZIP_BEGIN, Ignored, load_torch_bytes, names_in
from trainer_cli.core.naming import is_plain
from trainer_cli.errors import CheckpointError

_LARGEST_METADATA = 256 * 1024 * 1024
_MOST_DIMENSIONS = 64
_METADATA = "torch.distributed.checkpoint.metadata"


class _Record:
    """Stands for an object of torch's metadata: keeps its state, and does nothing with it."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """A field of the object; None if it has none of that name."""
        return self.state.get(name)


class _Metadata(_Record):
    __slots__ = ()


class _TensorMetadata(_Record):
    __slots__ = ()


_ALLOWED: Mapping[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _TensorMetadata,
    **{(_METADATA, name): _Record for name in ("ChunkStorageMetadata", "MetadataIndex", "TensorProperties")},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{(_METADATA, name): Ignored for name in ("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")},
    ("torch.serialization", "_get_layout"): Ignored,
    **{(module, "PosixPath"): Ignored for module in ("pathlib", "pathlib._local")},
}
"""What the metadata that torch writes is made of -> what is made instead: none of it can be changed or runs code."""
_MODEL = (("app", "model"), ("app", "state", "model"), ("model",), ("state_dict",), ("module",))
"""Where programs keep the model in the saved tree."""


class _Unpickler(pickle.Unpickler):
    """Makes what torch's metadata consists of, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of torch has")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it has an external object")


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tensor, and its place in a file."""

    offset: tuple[int, ...]
    file: str
    begin: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor, with the sizes of its parts by their offsets."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: Mapping[tuple[int, ...], tuple[int, ...]]


def load_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, put together from the parts of all ranks, by their names in the model.

    Raises:
        CheckpointError: metadata or parts are damaged, or the metadata names what it does not need.
    """
    where = folder / DCP_METADATA
    try:
        fields = _metadata(where)
        saved = {name: one for name, one in fields("state_dict_metadata").items() if isinstance(one, _TensorMetadata)}
        paths = fields("planner_data") if isinstance(fields("planner_data"), dict) else {}
        names = _names({name: _path(paths.get(name, (name,))) for name in saved})
        wholes = {name: _whole(saved[name]) for name in names}
        parts = _parts(fields("storage_data"), names)
        present = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        if sum(math.prod(one.shape) * one.dtype.itemsize for one in wholes.values()) > present:
            raise ValueError("its tensors are larger than the folder's files")
        if sum(part.size_bytes for own in parts.values() for part in own) > present:
            raise ValueError("its parts are larger than the folder's files")
        reader = _PartReader(folder)
        return {new: _tensor(reader, name, wholes[name], parts.get(name, [])) for name, new in names.items()}
    except Exception as error:  # The metadata may hold any values where torch writes numbers and names.
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"the DCP checkpoint cannot be read: {said}", where=str(where)) from None


def _metadata(path: Path) -> Callable[[str], Any]:
    if path.stat().st_size > _LARGEST_METADATA:
        raise ValueError("it is too large")
    content = path.read_bytes()
    names_in(io.BytesIO(content))
    found = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(found, _Metadata):
        raise ValueError("it is no metadata of torch")
    return found.field


def _path(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list | tuple) or not all(type(one) in (str, int) for one in raw):
        raise ValueError("the place of a tensor in the saved tree is none")
    return tuple(map(str, raw))


def _names(paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Each saved name of the model's tensors -> its name in the model. `paths`: where each stood in the saved tree."""
    dotted = {name: tuple(".".join(path).split(".")) for name, path in paths.items()}
    for prefix in _MODEL:
        own = {name: parts for name, parts in dotted.items() if parts[: len(prefix)] == prefix}
        if own:
            found = {name: ".".join(parts[len(prefix) :]) for name, parts in own.items()}
            break
    else:
        found = {name: ".".join(parts) for name, parts in dotted.items() if not parts[0].startswith("optim")}
    if len(set(found.values())) != len(found):
        raise ValueError("two tensors have the same name in the model")
    return found


def _sizes(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list | tuple) or len(raw) > _MOST_DIMENSIONS:
        raise ValueError("a shape or place is none")
    return tuple(map(_count, raw))


def _count(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw < 2**63:
        raise ValueError("a size or place is no number of bytes or elements")
    return raw


def _whole(raw: _TensorMetadata) -> _Whole:
    dtype = raw.field("properties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has a type of element that does not exist")
    chunks = {_sizes(one.field("offsets")): _sizes(one.field("sizes")) for one in raw.field("chunks")}
    return _Whole(_sizes(raw.field("size")), dtype, chunks)


def _parts(storage_data: Any, names: Collection[str]) -> dict[str, list[_Part]]:
    """The parts of each tensor of these names."""
    found: dict[str, list[_Part]] = {}
    for index, place in storage_data.items():
        if (name := index.field("fqn")) not in names:
            continue
        file = place.field("relative_path")
        if type(file) is not str or not is_plain(file) or place.field("transform_descriptors"):
            raise ValueError("a part lies outside the folder, or is compressed")
        begin, size_bytes = _count(place.field("offset")), _count(place.field("length"))
        found.setdefault(name, []).append(_Part(_sizes(index.field("offset") or ()), file, begin, size_bytes))
    return found


def _tensor(reader: _PartReader, name: str, whole: _Whole, parts: list[_Part]) -> torch.Tensor:
    _check_cover(whole)
    if sorted(whole.sizes) != sorted(part.offset for part in parts):
        raise ValueError("a part of a tensor is missing, or there twice")
    made = torch.empty(whole.shape, dtype=whole.dtype)
    for part in parts:
        size = whole.sizes[part.offset]
        read = reader.read(name, part)
        if tuple(read.shape) != size or read.dtype is not whole.dtype:
            raise ValueError("a part of a tensor is not of the size that the metadata says")
        made[_place(part.offset, size)] = read
    return made


def _place(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + count) for at, count in zip(offset, size, strict=True))


def _check_cover(whole: _Whole) -> None:
    """Refuse parts that leave a hole in the tensor, overlap, or lie outside it."""
    for offset, size in whole.sizes.items():
        inside = len(offset) == len(size) == len(whole.shape) and all(
            at + count <= end for at, count, end in zip(offset, size, whole.shape, strict=True)
        )
        if not inside:
            raise ValueError("a part of a tensor lies outside it")
    if sum(map(math.prod, whole.sizes.values())) != math.prod(whole.shape):
        raise ValueError("the parts of a tensor do not fill it")
    if len(whole.sizes) > 1:
        covered = torch.zeros(whole.shape, dtype=torch.bool)
        for offset, size in whole.sizes.items():
            covered[_place(offset, size)] = True
        if not covered.all():
            raise ValueError("parts of a tensor overlap")


class _PartReader:
    """Reads parts: written by torch.save at their place in a file, or among the tensors of a safetensors file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, tuple[list[str], Any]] = {}

    def read(self, name: str, part: _Part) -> torch.Tensor:
        path = self._folder / part.file
        if not path.is_file():  # To open a pipe would wait for its writer.
            raise ValueError(f"{part.file} is missing")
        if part.file in self._opened:
            return self._opened[part.file][1].get_tensor(name)  # type: ignore[no-any-return]
        with path.open("rb") as file:
            file.seek(part.begin)
            content = file.read(part.size_bytes)
        if not content.startswith(ZIP_BEGIN):
            self._opened[part.file] = open_safetensors(path)
            return self.read(name, part)
        if len(content) != part.size_bytes:
            raise ValueError(f"{part.file} is shorter than it was")
        loaded = load_torch_bytes(content)
        if type(loaded) is not torch.Tensor or loaded.layout is not torch.strided or loaded.is_nested:
            raise ValueError(f"{part.file} holds a {type(loaded).__name__} where a tensor should be")
        return loaded.detach()
