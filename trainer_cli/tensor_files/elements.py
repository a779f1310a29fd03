"""The element types of tensors in files, and tensors as bytes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_cli.manifest import DamagedCheckpoint
from trainer_cli.tensor_files.header import TensorEntry
from trainer_cli.tensor_files.verified_file import VerifiedFile

Leaf = torch.Tensor | np.ndarray[Any, Any]
"""A tensor or array of a state."""
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
_HUGE_BYTES = 1 << 22
"""Minimum size of tensors that are read into huge pages, which the kernel provides in less than half the time."""


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


def memory_key(leaf: Leaf) -> tuple[Any, ...] | None:
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
    if tensor is None or tensor.dtype is not torch.bool or not tensor.numel():
        return
    if int(tensor.view(torch.uint8).max()) > 1:
        raise DamagedCheckpoint.of_file(path, f"{name[:80]!r} holds booleans that are neither true nor false")
