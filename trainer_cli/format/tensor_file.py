"""The layout of one rank's files: the element types, the order and the bytes of tensors and arrays."""

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

from trainer_cli.dtensor import undistributed
from trainer_cli.format.header import LINE, TensorEntry, own_file, rendered_header, state_file, tensor_file
from trainer_cli.format.tree import Leaf
from trainer_cli.format.verified_file import VerifiedFile, damaged_file
from trainer_cli.layout import Shard
from trainer_cli.manifest import UnsavableState
from trainer_cli.schema import CheckpointFormat

if TYPE_CHECKING:
    from trainer_cli.storage import WritableFolder

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
"""Element types of safetensors, by name."""
TORCH_DTYPES = DTYPES | {"C128": torch.complex128, "C32": torch.complex32, "F8_E8M0": torch.float8_e8m0fnu}
"""Element types of torch.save. Those that safetensors lacks have names of this project."""
_CODES = {dtype: (code, dtype.itemsize) for code, dtype in TORCH_DTYPES.items()}
_NOT_ARRAYS = ("BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C32", "F8_E8M0")
_ARRAY_CODES = {
    np.dtype(str(dtype).removeprefix("torch.")): code for code, dtype in TORCH_DTYPES.items() if code not in _NOT_ARRAYS
}
_HUGE_BYTES = 1 << 22
"""Minimum size of tensors that are read into huge pages, which the kernel provides in less than half the time."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor with at least one byte, and its position in the tensor file."""

    leaf: Leaf
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Content of one rank's files, and the position of each tensor: known before any tensor is copied.

    A snapshot copies `header` and the tensors of `spans` into one memory, the image, whatever files are written from
    it. This class writes the image itself as the file of safetensors. The layout of a format with other files overrides

    - `write`, which gets the image, or None where the tensors themselves are written. The tensors of `entries` follow
      `header` in the image in their order, without holes;
    - `container`, if its tensors are in a file of another name;
    - `total_bytes`, if its size is known; otherwise it is an estimate, and `CheckpointFormat.uncounted_bytes` says so.
    """

    text: bytes
    """All values but tensors, as `tree.encode` returns them."""
    header: bytes
    """The beginning of the image: the header of a file of safetensors."""
    entries: list[TensorEntry]
    """The tensors that the header names, in order."""
    spans: list[TensorSpan]
    """The tensors after the header, in order and without holes."""
    aliases: dict[str, str]
    """Name of a tied tensor -> name under which it is stored."""
    rank: int = field(default=0, kw_only=True)
    parts: Mapping[str, Shard] = field(default_factory=dict, kw_only=True)
    """Of a distributed run: the part of each tensor in this file, by name."""
    per_rank: bytes = field(default=b"", kw_only=True)
    """Of a distributed run: content of the file of the states that this rank saves for itself."""

    @property
    def image_bytes(self) -> int:
        """The size of the image, and of the file that this class writes it to."""
        return self.spans[-1].offset + self.spans[-1].size_bytes if self.spans else len(self.header)

    @property
    def container(self) -> str:
        """The name of the file that contains the tensors. With several ranks, the manifest has `parts` under it."""
        return tensor_file(self.rank)

    @property
    def _small_files(self) -> dict[str, bytes]:
        """The files that this class writes beside the tensor file, by name."""
        contents = {state_file(self.rank): self.text, own_file(self.rank): self.per_rank}
        return {name: content for name, content in contents.items() if content}

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return len(self.text) + len(self.per_rank) + self.image_bytes

    @property
    def least_bytes(self) -> int:
        """The size that the files have at least; 0 if that is unknown before they are written."""
        return self.total_bytes

    def write(self, folder: WritableFolder, image: memoryview | None = None) -> dict[str, Mapping[str, str]]:
        """Write the files.

        Args:
            image: a copy of `header` and all tensors; without it the tensors themselves are written.

        Returns the aliases of a file under its name, for the manifest; none if the format stores ties in its files.
        """
        with folder.create(tensor_file(self.rank)) as file:
            if image is not None:
                file.write(image)
            else:
                file.write(self.header)
                for span in self.spans:
                    file.write(bytes_of(span.leaf).data)
        for name, content in self._small_files.items():
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

    Tied tensors are stored once, under the first name.

    Args:
        shapes_only: accept tensors on the device `meta`, which have no bytes to write.
        dtypes: the element types of the format, by name.

    Raises:
        UnsavableState: a tensor cannot be saved; the message names it.
    """
    tensors = undistributed(tensors)
    of_size: dict[tuple[bool, int], list[TensorEntry]] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, leaf in tensors.items():
        code, element_bytes = _code_of(name, leaf, shapes_only)
        if code not in dtypes:
            formats = CheckpointFormat.names_where(lambda format: format.holds_every_dtype)
            raise UnsavableState(
                f"{name} is of {leaf.dtype}, which this format of checkpoints cannot hold",
                cure=f"Write checkpoint.format={formats}, or save it as another type.",
            )
        shape = tuple(leaf.shape)
        count = math.prod(shape)
        if count and (memory := identity(leaf)) is not None:
            first = seen.setdefault(memory, name)
            if first != name:
                aliases[name] = first
                continue
        entry = TensorEntry(name, code, shape, count * element_bytes)
        of_size.setdefault((entry.size_bytes % LINE == 0, element_bytes), []).append(entry)
    # Alignment without holes, which safetensors refuses: tensors of whole cache lines first, so that each begins at a
    # line; in either group the largest elements first, so that each begins at a multiple of its element size.
    entries = [entry for size in sorted(of_size, reverse=True) for entry in of_size[size]]
    header = rendered_header(entries)
    spans, offset = [], len(header)
    for entry in entries:
        if entry.size_bytes:
            spans.append(TensorSpan(tensors[entry.name], offset, entry.size_bytes))
        offset += entry.size_bytes
    return FileLayout(text, header, entries, spans, aliases)


def bytes_of(leaf: Leaf) -> np.ndarray[Any, Any]:
    """The bytes of a tensor or array in contiguous order: its memory if it is contiguous on the CPU, else a copy."""
    if isinstance(leaf, np.ndarray):
        return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    flat = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return np.frombuffer(memory_of(flat), np.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A view of the memory of a contiguous tensor on the CPU, which keeps the tensor alive."""
    # Not by numpy: torch would then treat the memory as foreign and refuse to resize it.
    raw = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    raw.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(raw).cast("B")


_CURE = "Give it as plain, dense tensors. A buffer that the model computes when it is made may have persistent=False."


def _code_of(name: str, leaf: Leaf, shapes_only: bool) -> tuple[str, int]:
    """The name and the size of the element type. UnsavableState if no format supports the tensor."""
    if isinstance(leaf, np.ndarray):
        code = _ARRAY_CODES.get(leaf.dtype)
        if code is None or not leaf.dtype.isnative:
            raise UnsavableState(
                f"{name} is an array of {leaf.dtype}, which cannot be saved in a checkpoint",
                cure="Give it as an array of numbers in the machine's byte order, or as a list of numbers or strings.",
            )
        return code, leaf.dtype.itemsize
    plain = type(leaf) in _PLAIN or isinstance(leaf, torch.nn.Parameter | torch.nn.Buffer)
    if not plain or torch.nn.parameter.is_lazy(leaf):
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        raise UnsavableState(f"{name} is a {kind}, which cannot be saved in a checkpoint", cure=_CURE)
    absent = leaf.is_meta and not shapes_only
    code_and_size = _CODES.get(leaf.dtype)
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized or absent or code_and_size is None:
        description = f"a tensor of {leaf.dtype}, {'nested' if leaf.is_nested else leaf.layout}"
        description = "a tensor without memory" if absent else description
        raise UnsavableState(f"{name} is {description}, which cannot be saved in a checkpoint", cure=_CURE)
    return code_and_size


def identity(leaf: Leaf) -> tuple[Any, ...] | None:
    """A key that is equal for tied tensors, which must have elements; None for an array, which is never tied."""
    if isinstance(leaf, np.ndarray):
        return None
    # A tensor on `meta` has no address, but tied ones share their storage object.
    address = (leaf.untyped_storage()._cdata, leaf.storage_offset()) if leaf.is_meta else leaf.data_ptr()
    return address, leaf.device, leaf.dtype, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()


def new_tensor(file: VerifiedFile, entry: TensorEntry, shape: Sequence[int]) -> torch.Tensor:
    """A tensor on the CPU for the content of an entry, or for a part of it of this shape."""
    try:
        tensor = torch.empty(shape, dtype=DTYPES[entry.code])
    except RuntimeError as error:
        raise file.damaged(f"{entry.name[:80]!r} has an invalid shape: {error}") from None
    if tensor.nbytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = tensor.data_ptr() + -tensor.data_ptr() % mmap.PAGESIZE
        size_bytes = tensor.data_ptr() + tensor.nbytes - begin
        # The result is ignored: a kernel that refuses the advice provides ordinary pages.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes), mmap.MADV_HUGEPAGE)
    return tensor


def check_booleans(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Refuse booleans read from the file at `path` that are neither 0 nor 1, for which torch defines no behaviour."""
    if tensor is not None and tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise damaged_file(path, f"{name[:80]!r} holds booleans that are neither true nor false")
