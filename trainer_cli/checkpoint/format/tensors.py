"""The default format: one safetensors file a rank, and one JSON file for all that is no tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.codec import Leaf, UnsavableState
from trainer_cli.checkpoint.format.dtypes import DTYPES
from trainer_cli.checkpoint.format.layout import TensorEntry, rendered_header, state_file, tensor_file
from trainer_cli.checkpoint.format.pending import Pending
from trainer_cli.checkpoint.format.port import FormatRecord
from trainer_cli.checkpoint.format.reading import read_state
from trainer_cli.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.port import ReadableFolder, Sink, WritableFolder

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NOT_ARRAYS = ("BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_ARRAY_CODES = {
    np.dtype(str(dtype).removeprefix("torch.")): code for code, dtype in DTYPES.items() if code not in _NOT_ARRAYS
}


class TensorsFormat:
    """Any safetensors reader can open the tensor file; tied tensors are in it once.

    Tensors are written straight from their memory, largest elements first, which leaves no holes; the
    header is padded so that they begin at a multiple of 4,096 bytes. They are read straight into the
    memory where they are wanted, or into memory of their own. Parameters come back as plain tensors, in
    contiguous layout, on the CPU.
    """

    name = "tensors"

    def trial(self, tree: Mapping[str, Any]) -> int:
        return self._size_bytes(tree, shapes_only=False)

    def size_bytes(self, tree: Mapping[str, Any]) -> int:
        """The bytes of a tree's files, of whose tensors some may have a shape but no memory (device `meta`)."""
        return self._size_bytes(tree, shapes_only=True)

    def _size_bytes(self, tree: Mapping[str, Any], *, shapes_only: bool) -> int:
        text, tensors = codec.encode(tree)
        layout, _ = _laid_out(tensors, shapes_only=shapes_only)
        return len(text) + len(rendered_header(layout)) + sum(entry.size_bytes for entry in layout)

    def write(self, folder: WritableFolder, tree: Mapping[str, Any], rank: int = 0) -> FormatRecord:
        text, tensors = codec.encode(tree)
        layout, aliases = _laid_out(tensors)
        with folder.create(tensor_file(rank)) as sink:
            sink.write(rendered_header(layout))
            for entry in layout:
                _write_leaf(sink, tensors[entry.name])
        with folder.create(state_file(rank)) as sink:
            sink.write(text)
        return FormatRecord({tensor_file(rank): aliases} if aliases else {})

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        later: Collection[str] = (),
        rank: int = 0,
    ) -> Pending:
        return read_state(folder, manifest, only, later, rank)


def _laid_out(tensors: Mapping[str, Leaf], *, shapes_only: bool = False) -> tuple[list[TensorEntry], dict[str, str]]:
    """The tensors in file order, each stored once, and the names of those that are stored under another."""
    entries: list[tuple[int, TensorEntry]] = []
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, leaf in tensors.items():
        code, element_bytes = _code_of(name, leaf, shapes_only)
        shape = tuple(leaf.shape)
        identity = _identity(leaf)
        if identity is not None and (first := seen.setdefault(identity, name)) != name:
            aliases[name] = first
            continue
        entries.append((element_bytes, TensorEntry(name, code, shape, math.prod(shape) * element_bytes)))
    entries.sort(key=lambda entry: -entry[0])
    return [entry for _, entry in entries], aliases


def _code_of(name: str, leaf: Leaf, shapes_only: bool) -> tuple[str, int]:
    """The safetensors name of the element type and its size; refuses what the file cannot hold."""
    if isinstance(leaf, np.ndarray):
        code = _ARRAY_CODES.get(leaf.dtype)
        if code is None or not leaf.dtype.isnative:
            raise UnsavableState(f"{name} is an array of {leaf.dtype}, which cannot be saved in a checkpoint")
        return code, leaf.dtype.itemsize
    plain = type(leaf) is torch.Tensor or isinstance(leaf, torch.nn.Parameter | torch.nn.Buffer)
    if not plain or torch.nn.parameter.is_lazy(leaf):
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        raise UnsavableState(f"{name} is a {kind}, which cannot be saved in a checkpoint")
    absent = leaf.is_meta and not shapes_only
    if leaf.layout is not torch.strided or leaf.is_quantized or absent or leaf.dtype not in _CODES:
        place = "a tensor without memory" if absent else f"a tensor of {leaf.dtype}, {leaf.layout}"
        raise UnsavableState(f"{name} is {place}, which cannot be saved in a checkpoint")
    return _CODES[leaf.dtype], leaf.element_size()


def _identity(leaf: Leaf) -> tuple[Any, ...] | None:
    """What two tied tensors have in common, or None for one without elements."""
    if isinstance(leaf, np.ndarray) or leaf.numel() == 0:
        return None
    storage = leaf.untyped_storage()
    signs = (leaf.is_conj(), leaf.is_neg())
    # Without memory there is no address, but tied tensors still share the storage that would have one.
    address = storage._cdata if leaf.is_meta else storage.data_ptr()
    place = (str(leaf.device), address, leaf.storage_offset())
    return (*place, leaf.dtype, tuple(leaf.shape), leaf.stride(), *signs)


def _write_leaf(sink: Sink, leaf: Leaf) -> None:
    if isinstance(leaf, np.ndarray):
        array = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    else:
        flat = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        array = flat.view(torch.uint8).numpy()
    if array.size:
        sink.write(array.data)
