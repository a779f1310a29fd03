"""Read folders of torch.distributed.checkpoint in one process, without running code in their pickles."""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_cli.addons.formats.files import open_safetensors
from trainer_cli.addons.formats.torch_file import ZIP_BEGIN, Ignored, load_torch_bytes, names_in
from trainer_cli.catalog import ForeignKind
from trainer_cli.errors import CheckpointError
from trainer_cli.layout import is_plain

_LARGEST_METADATA = 256 * 1024 * 1024
_MOST_DIMENSIONS = 64
_METADATA = "torch.distributed.checkpoint.metadata"


class _Record:
    """Replaces an object of torch's metadata: keeps its state, and runs no code."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """A field of the object; None if it does not exist."""
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
"""Class in torch's metadata -> replacement. No replacement can be modified or runs code."""
_MODEL = (("app", "model"), ("app", "state", "model"), ("model",), ("state_dict",), ("module",))
"""Keys under which programs save the model in the tree."""


class _Unpickler(pickle.Unpickler):
    """Creates the objects of torch's metadata, and refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        """The replacement of a class of torch's metadata, or a dtype. UnpicklingError for all else."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of torch has")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse an object that is stored outside the pickle."""
        raise pickle.UnpicklingError("it has an external object")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a tensor, and its position in a file."""

    offset: tuple[int, ...]
    file: str
    begin: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """Shape and type of a tensor, and the sizes of its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: Mapping[tuple[int, ...], tuple[int, ...]]
    """Offset of a chunk -> size of the chunk."""


def load_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, assembled from the chunks of all ranks, by their names in the model.

    Raises:
        CheckpointError: metadata or chunks are damaged, or the metadata has a class that torch does not write.
    """
    where = folder / ForeignKind.dcp.marks[0]
    try:
        metadata = _read_metadata(where)
        entries = metadata.field("state_dict_metadata").items()
        tensors = {name: entry for name, entry in entries if isinstance(entry, _TensorMetadata)}
        planner_data = metadata.field("planner_data")
        paths = planner_data if isinstance(planner_data, dict) else {}
        names = _model_names({name: _parse_path(paths.get(name, (name,))) for name in tensors})
        infos = {name: _parse_tensor(tensors[name]) for name in names}
        chunks = _parse_chunks(metadata.field("storage_data"), names)
        # Before memory is allocated: damaged metadata may have any sizes.
        folder_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        if sum(math.prod(info.shape) * info.dtype.itemsize for info in infos.values()) > folder_bytes:
            raise ValueError("its tensors are larger than the folder's files")
        if sum(chunk.size_bytes for of_tensor in chunks.values() for chunk in of_tensor) > folder_bytes:
            raise ValueError("its parts are larger than the folder's files")
        reader = _ChunkReader(folder)
        return {new: _assemble(reader, name, infos[name], chunks.get(name, [])) for name, new in names.items()}
    except Exception as error:  # Where torch writes numbers and names, damaged metadata may have any values.
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"the DCP checkpoint cannot be read: {reason}", where=str(where)) from None


def _read_metadata(path: Path) -> _Metadata:
    """Unpickle torch's metadata, without running code in it. ValueError if it is something else."""
    if path.stat().st_size > _LARGEST_METADATA:
        raise ValueError("it is too large")
    content = path.read_bytes()
    names_in(io.BytesIO(content))  # Refuses a pickle that takes too much time or memory.
    metadata = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, _Metadata):
        raise ValueError("it is not metadata of torch")
    return metadata


def _parse_path(raw: Any) -> tuple[str, ...]:
    """The keys in the saved tree that lead to a tensor, as texts."""
    if not isinstance(raw, list | tuple) or not all(type(key) in (str, int) for key in raw):
        raise ValueError("a tensor has an invalid path in the saved tree")
    return tuple(map(str, raw))


def _model_names(paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Saved name of each tensor of the model -> its name in the model.

    Args:
        paths: saved name -> keys in the saved tree.
    """
    dotted = {name: tuple(".".join(path).split(".")) for name, path in paths.items()}
    for prefix in _MODEL:
        below = {name: keys for name, keys in dotted.items() if keys[: len(prefix)] == prefix}
        if below:
            names = {name: ".".join(keys[len(prefix) :]) for name, keys in below.items()}
            break
    else:
        # The tree is the model itself, perhaps beside an optimizer.
        names = {name: ".".join(keys) for name, keys in dotted.items() if not keys[0].startswith("optim")}
    if len(set(names.values())) != len(names):
        raise ValueError("two tensors have the same name in the model")
    return names


def _parse_sizes(raw: Any) -> tuple[int, ...]:
    """A shape or an offset. Raises ValueError for another value."""
    if not isinstance(raw, list | tuple) or len(raw) > _MOST_DIMENSIONS:
        raise ValueError("a shape or offset is invalid")
    return tuple(map(_parse_count, raw))


def _parse_count(raw: Any) -> int:
    """A number of bytes or elements. Raises ValueError for another value."""
    if type(raw) is not int or not 0 <= raw < 2**63:
        raise ValueError("a size or offset is not a number of bytes or elements")
    return raw


def _parse_tensor(raw: _TensorMetadata) -> _TensorInfo:
    """Shape, type and chunks of a tensor; ValueError if they are damaged."""
    dtype = raw.field("properties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has an unknown dtype")
    sizes = {_parse_sizes(chunk.field("offsets")): _parse_sizes(chunk.field("sizes")) for chunk in raw.field("chunks")}
    return _TensorInfo(_parse_sizes(raw.field("size")), dtype, sizes)


def _parse_chunks(storage_data: Any, names: Collection[str]) -> dict[str, list[_Chunk]]:
    """The chunks of each tensor of these names."""
    chunks: dict[str, list[_Chunk]] = {}
    for index, location in storage_data.items():
        if (name := index.field("fqn")) not in names:
            continue
        file = location.field("relative_path")
        if type(file) is not str or not is_plain(file) or location.field("transform_descriptors"):
            raise ValueError("a part lies outside the folder, or is compressed")
        begin, size_bytes = _parse_count(location.field("offset")), _parse_count(location.field("length"))
        offset = _parse_sizes(index.field("offset") or ())
        chunks.setdefault(name, []).append(_Chunk(offset, file, begin, size_bytes))
    return chunks


def _assemble(reader: _ChunkReader, name: str, info: _TensorInfo, chunks: list[_Chunk]) -> torch.Tensor:
    """A tensor from its chunks."""
    _check_cover(info)
    if sorted(info.sizes) != sorted(chunk.offset for chunk in chunks):
        raise ValueError("a part of a tensor is missing, or stored twice")
    tensor = torch.empty(info.shape, dtype=info.dtype)
    for chunk in chunks:
        size = info.sizes[chunk.offset]
        content = reader.read(name, chunk)
        # Compared before it is assigned, which would broadcast and convert it.
        if tuple(content.shape) != size or content.dtype is not info.dtype:
            raise ValueError("a part of a tensor is not of the size that the metadata says")
        tensor[_slices(chunk.offset, size)] = content
    return tensor


def _slices(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a chunk in its tensor."""
    return tuple(slice(begin, begin + count) for begin, count in zip(offset, size, strict=True))


def _check_cover(info: _TensorInfo) -> None:
    """Refuse chunks that leave a hole in the tensor, overlap, or are outside of it."""
    for offset, size in info.sizes.items():
        inside = len(offset) == len(size) == len(info.shape) and all(
            begin + count <= end for begin, count, end in zip(offset, size, info.shape, strict=True)
        )
        if not inside:
            raise ValueError("a part of a tensor lies outside it")
    if sum(map(math.prod, info.sizes.values())) != math.prod(info.shape):
        raise ValueError("the parts of a tensor do not fill it")
    if len(info.sizes) > 1:
        # As many elements as the tensor has, and yet not all of them: then two chunks overlap.
        covered = torch.zeros(info.shape, dtype=torch.bool)
        for offset, size in info.sizes.items():
            covered[_slices(offset, size)] = True
        if not covered.all():
            raise ValueError("parts of a tensor overlap")


class _ChunkReader:
    """Reads chunks that torch.save wrote at an offset of a file, or that are tensors of a safetensors file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, tuple[list[str], Any]] = {}

    def read(self, name: str, chunk: _Chunk) -> torch.Tensor:
        """The content of a chunk of the tensor `name`.

        Raises:
            ValueError: the file is missing or damaged.
        """
        path = self._folder / chunk.file
        if not path.is_file():  # Opening a pipe would wait for its writer.
            raise ValueError(f"{chunk.file} is missing")
        if chunk.file in self._opened:
            return self._opened[chunk.file][1].get_tensor(name)  # type: ignore[no-any-return]
        with path.open("rb") as file:
            file.seek(chunk.begin)
            content = file.read(chunk.size_bytes)
        if not content.startswith(ZIP_BEGIN):
            self._opened[chunk.file] = open_safetensors(path)
            return self.read(name, chunk)
        if len(content) != chunk.size_bytes:
            raise ValueError(f"{chunk.file} is shorter than it was")
        loaded = load_torch_bytes(content)
        if type(loaded) is not torch.Tensor or loaded.layout is not torch.strided or loaded.is_nested:
            raise ValueError(f"{chunk.file} holds a {type(loaded).__name__} where a tensor should be")
        return loaded.detach()
