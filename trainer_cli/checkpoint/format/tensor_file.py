"""Tensors and arrays as a tensor file holds them: their types, their order in it, and their bytes."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_cli.checkpoint.format.dtensor import undistributed
from trainer_cli.checkpoint.format.header import LINE, TensorEntry, own_file, rendered_header, state_file, tensor_file
from trainer_cli.checkpoint.format.tree import Leaf, UnsavableState
from trainer_cli.checkpoint.format.verified_file import VerifiedFile, damaged_file
from trainer_cli.core.shards import Shard

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.base import WritableFolder

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""Element types that a tensor file can hold, by their names in safetensors."""
TORCH_DTYPES = DTYPES | {"C128": torch.complex128, "C32": torch.complex32, "F8_E8M0": torch.float8_e8m0fnu}
"""Element types that torch.save can write: also those without a name in safetensors, which have one of ours."""
_CODES = {dtype: (code, dtype.itemsize) for code, dtype in TORCH_DTYPES.items()}
_NOT_ARRAYS = ("BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C32", "F8_E8M0")
_ARRAY_CODES = {
    np.dtype(str(dtype).removeprefix("torch.")): code for code, dtype in TORCH_DTYPES.items() if code not in _NOT_ARRAYS
}
_HUGE_BYTES = 1 << 22
"""Tensors of this size and more are read into huge pages: the kernel provides these in less than half the time."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor with at least one byte, and where it lies in the tensor file."""

    leaf: Leaf
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """What the files of one rank hold, and where: known before any tensor is read."""

    text: bytes
    """The file of small states."""
    header: bytes
    """The beginning of the tensor file."""
    entries: list[TensorEntry]
    """The tensors that the header names, in order."""
    spans: list[TensorSpan]
    """The rest of it, in order and without holes."""
    aliases: dict[str, str]
    """Names of tied tensors, and the name under which each is stored."""
    rank: int = field(default=0, kw_only=True)
    parts: Mapping[str, Shard] = field(default_factory=dict, kw_only=True)
    """If several ranks write: which part of each tensor the file has."""
    own: bytes = field(default=b"", kw_only=True)
    """If several ranks write: the file of what this rank saves for itself."""

    @property
    def tensor_bytes(self) -> int:
        """The size of the tensor file."""
        return self.spans[-1].offset + self.spans[-1].size_bytes if self.spans else len(self.header)

    @property
    def container(self) -> str:
        """The name of the file of the checkpoint that holds the tensors."""
        return tensor_file(self.rank)

    @property
    def small_files(self) -> dict[str, bytes]:
        """The files beside the tensor file, by name."""
        contents = {state_file(self.rank): self.text, own_file(self.rank): self.own}
        return {name: content for name, content in contents.items() if content}

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return len(self.text) + len(self.own) + self.tensor_bytes

    def write(self, folder: WritableFolder, image: memoryview | None = None) -> dict[str, Mapping[str, str]]:
        """Write the files: the tensor file from `image`, a copy of all of it, or else from the tensors themselves.

        Returns the aliases of the tensor file under its name, for the manifest.
        """
        with folder.create(tensor_file(self.rank)) as file:
            if image is not None:
                file.write(image)
            else:
                file.write(self.header)
                for span in self.spans:
                    file.write(bytes_of(span.leaf).data)
        for name, content in self.small_files.items():
            with folder.create(name) as file:
                file.write(content)
        return {tensor_file(self.rank): self.aliases} if self.aliases else {}


def lay_out(
    text: bytes,
    tensors: Mapping[str, Leaf],
    *,
    shapes_only: bool = False,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
) -> FileLayout:
    """The layout of a state's files, from its text and its tensors by name.

    Tensors of whole lines come first, so that each begins at one; in either part the largest elements come first, which
    leaves no holes. Tied tensors are stored once, under the first name.

    Args:
        shapes_only: tensors on the device `meta`, which have no bytes to write, are accepted.
        dtypes: the element types that the format can hold, by name.

    Raises:
        UnsavableState: naming what a file cannot hold.
    """
    tensors = undistributed(tensors)
    of_size: dict[tuple[bool, int], list[TensorEntry]] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, leaf in tensors.items():
        code, element_bytes = _code_of(name, leaf, shapes_only)
        if code not in dtypes:
            raise UnsavableState(
                f"{name} is of {leaf.dtype}, which a file of safetensors cannot hold",
                cure="Write checkpoint.format=torch_file, or save it as another type.",
            )
        shape = tuple(leaf.shape)
        count = math.prod(shape)
        if count and (own := identity(leaf)) is not None:
            first = seen.setdefault(own, name)
            if first != name:
                aliases[name] = first
                continue
        entry = TensorEntry(name, code, shape, count * element_bytes)
        of_size.setdefault((entry.size_bytes % LINE == 0, element_bytes), []).append(entry)
    entries = [entry for size in sorted(of_size, reverse=True) for entry in of_size[size]]
    header = rendered_header(entries)
    spans, offset = [], len(header)
    for entry in entries:
        if entry.size_bytes:
            spans.append(TensorSpan(tensors[entry.name], offset, entry.size_bytes))
        offset += entry.size_bytes
    return FileLayout(text, header, entries, spans, aliases)


def bytes_of(leaf: Leaf) -> np.ndarray[Any, Any]:
    """The bytes of a tensor or array in contiguous order: its own memory where that is such, else a copy."""
    if isinstance(leaf, np.ndarray):
        return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    flat = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return np.frombuffer(memory_of(flat), np.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which stays as long as they are looked at.

    Not by numpy: torch would then treat the memory as foreign and refuse to resize it.
    """
    raw = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    raw.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(raw).cast("B")


def _code_of(name: str, leaf: Leaf, shapes_only: bool) -> tuple[str, int]:
    """The name of the element type and its size; refuses what no format can hold."""
    if isinstance(leaf, np.ndarray):
        code = _ARRAY_CODES.get(leaf.dtype)
        if code is None or not leaf.dtype.isnative:
            raise UnsavableState(f"{name} is an array of {leaf.dtype}, which cannot be saved in a checkpoint")
        return code, leaf.dtype.itemsize
    plain = type(leaf) in _PLAIN or isinstance(leaf, torch.nn.Parameter | torch.nn.Buffer)
    if not plain or torch.nn.parameter.is_lazy(leaf):
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        raise UnsavableState(f"{name} is a {kind}, which cannot be saved in a checkpoint")
    absent = leaf.is_meta and not shapes_only
    found = _CODES.get(leaf.dtype)
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or absent or found is None:
        place = f"a tensor of {leaf.dtype}, {'nested' if leaf.is_nested else leaf.layout}"
        place = "a tensor without memory" if absent else place
        raise UnsavableState(f"{name} is {place}, which cannot be saved in a checkpoint")
    return found


def identity(leaf: Leaf) -> tuple[Any, ...] | None:
    """What two tied tensors, with elements, have in common."""
    if isinstance(leaf, np.ndarray):
        return None
    # Without memory there is no address, but tied tensors still share the storage that would have one.
    address = (leaf.untyped_storage()._cdata, leaf.storage_offset()) if leaf.is_meta else leaf.data_ptr()
    return address, leaf.device, leaf.dtype, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()


def new_tensor(file: VerifiedFile, entry: TensorEntry, shape: Sequence[int]) -> torch.Tensor:
    """Memory for a tensor of a file, or for a part of it of this shape."""
    try:
        tensor = torch.empty(shape, dtype=DTYPES[entry.code])
    except RuntimeError as error:
        raise file.damaged(f"{entry.name[:80]!r} has a shape that cannot be: {error}") from None
    if tensor.nbytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = tensor.data_ptr() + -tensor.data_ptr() % mmap.PAGESIZE
        size_bytes = tensor.data_ptr() + tensor.nbytes - begin
        # A kernel that refuses the advice provides ordinary pages.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes), mmap.MADV_HUGEPAGE)
    return tensor


def check_booleans(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Refuse booleans of other bytes than 0 and 1, read from the file at `path`."""
    if tensor is not None and tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise damaged_file(path, f"{name[:80]!r} holds booleans that are neither true nor false")
