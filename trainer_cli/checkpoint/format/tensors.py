"""The default format: one safetensors file a rank, and one JSON file for all that is no tensor."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.file_layout import DTYPES, FileLayout, lay_out, memory_of
from trainer_cli.checkpoint.format.header import TensorEntry, parsed_header, state_file, tensor_file
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Manifest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import ReadableFolder

_HUGE_BYTES = 1 << 22
"""Tensors of this size and more are read into huge pages: the kernel provides these in less than half the time."""


class TensorsFormat:
    """Any safetensors reader can open the tensor file; tied tensors are in it once.

    Tensors are written straight from their memory, without holes between them; the header is padded so that they begin
    at a multiple of 4,096 bytes. They come back as plain contiguous tensors on the CPU, each with memory of its own.
    """

    name = "tensors"

    def plan(self, tree: Mapping[str, Any]) -> FileLayout:
        return lay_out(*codec.encode(tree))

    def size_bytes(self, tree: Mapping[str, Any]) -> int:
        """The size of a tree's files, whose tensors may have a shape but no memory (device `meta`)."""
        return lay_out(*codec.encode(tree), shapes_only=True).total_bytes

    def read(
        self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None, rank: int = 0
    ) -> dict[str, Any]:
        with VerifiedFile(folder, manifest, state_file(rank)) as file:
            text = file.rest()
        try:
            decoder = codec.decode(text, only)
            return decoder.tree(_read_tensors(folder, manifest, tensor_file(rank), decoder.wanted))
        except codec.Undecodable as error:
            where = str(folder.path / state_file(rank))
            raise DamagedCheckpoint(f"the small states cannot be read: {error}", where=where) from None


def _read_tensors(
    folder: ReadableFolder, manifest: Manifest, file_name: str, wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """The tensors of these names; tied ones are one tensor. The whole file is digested."""
    aliases = manifest.aliases.get(file_name, {})
    stored = {name: aliases.get(name, name) for name in wanted}
    found = read_file(folder, manifest, file_name, set(stored.values()))
    if missing := set(stored.values()) - found.keys() | set(stored.values()) & set(aliases):
        what = f"a file of the checkpoint is damaged: it lacks the tensor {min(missing)[:80]!r}"
        raise DamagedCheckpoint(what, where=str(folder.path / file_name))
    return {name: found[stored[name]] for name in wanted}


def read_file(
    folder: ReadableFolder, manifest: Manifest, file_name: str, kept: Collection[str]
) -> dict[str, torch.Tensor]:
    """Those of these tensors that a file has. The whole file is digested."""
    with VerifiedFile(folder, manifest, file_name) as file:
        layout = parsed_header(file)
        found = {entry.name: _new_tensor(file, entry) for entry in layout if entry.name in kept}
        file.read(memory_of(found[e.name]) if e.name in kept else e.size_bytes for e in layout if e.size_bytes)
    for name, tensor in found.items():
        if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise file.damaged(f"{name[:80]!r} holds booleans that are neither true nor false")
    return found


def _new_tensor(file: VerifiedFile, entry: TensorEntry) -> torch.Tensor:
    try:
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.code])
    except RuntimeError as error:
        raise file.damaged(f"{entry.name[:80]!r} has a shape that cannot be: {error}") from None
    if tensor.nbytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = tensor.data_ptr() + -tensor.data_ptr() % mmap.PAGESIZE
        size_bytes = tensor.data_ptr() + tensor.nbytes - begin
        # A kernel that refuses the advice provides ordinary pages.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes), mmap.MADV_HUGEPAGE)
    return tensor
