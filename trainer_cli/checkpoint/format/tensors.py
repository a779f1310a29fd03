"""The default format: one safetensors file a rank, and one JSON file for all that is no tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.codec import Leaf, UnsavableState
from trainer_cli.checkpoint.format.layout import (
    TensorEntry,
    parsed_header,
    rendered_header,
    state_file,
    tensor_file,
)
from trainer_cli.checkpoint.format.port import FormatRecord
from trainer_cli.checkpoint.format.verified import Verified
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Manifest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.port import ReadableFolder, Sink, WritableFolder

_DTYPES: dict[str, torch.dtype] = {
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
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_NOT_ARRAYS = ("BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_ARRAY_CODES = {
    np.dtype(str(dtype).removeprefix("torch.")): code for code, dtype in _DTYPES.items() if code not in _NOT_ARRAYS
}


class TensorsFormat:
    """Any safetensors reader can open the tensor file; tied tensors are in it once.

    Tensors are written straight from their memory, largest elements first, which leaves no holes; the
    header is padded so that they begin at a multiple of 4,096 bytes. They are read straight into new
    memory of their own. Parameters come back as plain tensors, in contiguous layout, on the CPU.
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
        self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None, rank: int = 0
    ) -> dict[str, Any]:
        with Verified(folder, manifest, state_file(rank)) as file:
            text = file.rest()
        try:
            decoder = codec.decode(text, only)
            tensors = self._read_tensors(folder, manifest, decoder.wanted, rank)
            return decoder.tree(tensors)
        except codec.Undecodable as error:
            where = str(folder.path / state_file(rank))
            raise DamagedCheckpoint(f"the small states cannot be read: {error}", where=where) from None

    def _read_tensors(
        self, folder: ReadableFolder, manifest: Manifest, wanted: Collection[str], rank: int
    ) -> dict[str, torch.Tensor]:
        aliases = manifest.aliases.get(tensor_file(rank), {})
        stored = {aliases.get(name, name) for name in wanted}
        found: dict[str, torch.Tensor] = {}
        with Verified(folder, manifest, tensor_file(rank)) as file:
            layout = parsed_header(file)
            missing = stored - {entry.name for entry in layout}
            if missing or any(name in aliases for name in stored):
                raise file.damaged(f"it lacks the tensor {min(missing | (stored & set(aliases)))[:80]!r}")
            for entry in layout:
                if entry.name in stored:
                    found[entry.name] = _read_tensor(file, entry)
                else:
                    file.skip(entry.size_bytes)
        return {name: found[aliases.get(name, name)] for name in wanted}


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


def _read_tensor(file: Verified, entry: TensorEntry) -> torch.Tensor:
    try:
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.code])
    except RuntimeError as error:
        raise file.damaged(f"{entry.name[:80]!r} has a shape that cannot be: {error}") from None
    if tensor.numel():
        raw = tensor.reshape(-1).view(torch.uint8)
        file.read_into(raw.numpy().data)
        if tensor.dtype is torch.bool and int(raw.max()) > 1:
            raise file.damaged(f"{entry.name[:80]!r} holds booleans that are neither true nor false")
    return tensor
