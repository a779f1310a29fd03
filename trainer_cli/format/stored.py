"""The tensors and states of a checkpoint as they are stored. Only 8-bit floats and other formats need torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import CheckpointError
from trainer_cli.format.rank_files import FilesOfRank
from trainer_cli.format.views import STORAGE, View, views_in
from trainer_cli.layout import Shard
from trainer_cli.manifest import Manifest
from trainer_cli.schema import CheckpointFormat
from trainer_cli.tensor_files import ELEMENT_BYTES, TensorEntry, VerifiedFile, read_verified

if TYPE_CHECKING:
    import numpy as np

    from trainer_cli.storage import ReadableFolder

    Array = np.ndarray[Any, Any]

_BLOCK = 1 << 20
_NUMPY = {
    "F64": "f8", "I64": "i8", "U64": "u8", "C64": "c8", "F32": "f4", "I32": "i4", "U32": "u4", "F16": "f2",
    "I16": "i2", "U16": "u2", "I8": "i1", "U8": "u1", "BOOL": "?",
    "C128": "c16", "BF16": "u2", "C32": "u4",
}  # fmt: skip
"""Code of an element type -> numpy type; unsigned integers of the same size for types that numpy lacks."""
_FLOAT8 = {
    "F8_E4M3": "e4m3fn",
    "F8_E5M2": "e5m2",
    "F8_E4M3FNUZ": "e4m3fnuz",
    "F8_E5M2FNUZ": "e5m2fnuz",
    "F8_E8M0": "e8m0fnu",
}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor in one file, which may be all of it."""

    shard: Shard
    content: Callable[[], Array]
    """Returns its bytes, mapped from the file or in memory."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    entry: TensorEntry
    parts: list[StoredPart]

    def stored(self) -> Iterator[Array]:
        """The elements as they are stored, some rows at a time. Tensors of equal shape and type give equal blocks."""
        import numpy as np

        code, shape = self.entry.code, self.entry.shape or (1,)
        if not math.prod(shape):
            return
        dtype = np.dtype(_NUMPY.get(code, "u1")).newbyteorder("<")
        arrays = [
            stored_part.content().view(dtype).reshape(stored_part.shard.sizes or (1,)) for stored_part in self.parts
        ]
        rows = max(_BLOCK // math.prod(shape[1:]), 1)
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            if len(arrays) == 1:
                yield arrays[0][start:stop].reshape(-1)
                continue
            block = np.empty((stop - start, *shape[1:]), dtype)
            for stored_part, array in zip(self.parts, arrays, strict=True):
                (first, *begins), (size, *sizes) = stored_part.shard.offsets, stored_part.shard.sizes
                start_row, stop_row = max(start, first), min(stop, first + size)
                if start_row < stop_row:
                    inner = (slice(begin, begin + count) for begin, count in zip(begins, sizes, strict=True))
                    block[slice(start_row - start, stop_row - start), *inner] = array[
                        start_row - first : stop_row - first
                    ]
            yield block.reshape(-1)

    def blocks(self) -> Iterator[Array]:
        """The elements as float64 or complex128, some rows at a time."""
        import numpy as np

        code = self.entry.code
        table = _float8(code) if code in _FLOAT8 else None
        for block in self.stored():
            if table is not None:
                yield table[block]
            elif code == "BF16":
                # The 16 bits of a bfloat16 are the upper half of a float32.
                yield (block.astype("<u4") << 16).view("<f4").astype(np.float64)
            elif code == "C32":
                yield block.view("<f2").astype(np.float64).view(np.complex128)
            else:
                yield block.astype(np.complex128 if block.dtype.kind == "c" else np.float64)

    def norm(self) -> float:
        """The Euclidean norm over all elements."""
        return math.sqrt(sum(_sum_of_squares(block) for block in self.blocks()))

    def has_bytes_of(self, other: StoredTensor) -> bool:
        """Whether another tensor of the same shape and type has equal elements."""
        import numpy as np

        # As bytes: NaN equals itself, and -0.0 differs from 0.0.
        pairs = zip(self.stored(), other.stored(), strict=True)
        return all(np.array_equal(block.view("u1"), other_block.view("u1")) for block, other_block in pairs)

    def relative_change(self, new: StoredTensor) -> float | None:
        """‖new - self‖ / ‖self‖ of another tensor of the same shape and type; None if NaN or infinity is in them."""
        import numpy as np

        difference = norm = 0.0
        for block, new_block in zip(self.blocks(), new.blocks(), strict=True):
            with np.errstate(all="ignore"):
                # In blocks of doubles: the sum over a large tensor would lose digits in its own type.
                difference += _sum_of_squares(new_block - block)
            norm += _sum_of_squares(block)
        if not math.isfinite(difference) or not math.isfinite(norm):
            return None
        if norm:
            return math.sqrt(difference / norm)
        return math.inf if difference else 0.0


class StoredState:
    """The content of a checkpoint in an open folder. It is used while the folder is open.

    Of safetensors files only the header is checked. Other formats are read whole.

    Args:
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: it is not valid, or its format is unknown.
    """

    tensors: dict[str, StoredTensor]
    """Name -> tensor, in the order of the files. `NAME@rank1` is what rank 1 saves under a name that rank 0 has too."""
    aliases: dict[str, str]
    """Name of a tied tensor -> the name under which it is stored."""
    states: Callable[[], dict[str, Any]]
    """Reads the small states of each rank in their encoded form: values that JSON lacks are tagged with `$`."""

    def __init__(self, path: Path, folder: ReadableFolder, manifest: Manifest) -> None:
        self.path, self.folder, self.manifest = path, folder, manifest
        read = _read_tensor_files if CheckpointFormat(manifest.format).has_tensor_files else _read_other_format
        self.tensors, self.aliases, self.states = read(folder, manifest)
        for name, tensor in self.tensors.items():
            if problem := Shard.why_incomplete(stored.shard for stored in tensor.parts):
                raise CheckpointError(f"{path} is not valid: {name}: {problem}")

    def views(self) -> dict[str, View]:
        """Name -> view of a stored tensor. Views of tensors that each rank saves for itself are left out.

        Raises:
            CheckpointError: a view exceeds its stored tensor.
        """
        try:
            views = {view.name: view for view in views_in(self.states()) if view.base in self.tensors}
            for view in views.values():
                view.check_fits(math.prod(self.tensors[view.base].entry.shape))
        except ValueError as error:
            raise CheckpointError(f"{self.path} is not valid: {error}") from None
        return views

    def with_views(self) -> dict[str, StoredTensor]:
        """The tensors of the state: with views as tensors, and without stored tensors that are not in the state."""
        views = self.views()
        storages = {view.base for view in views.values() if STORAGE in view.base}
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in storages}
        return tensors | {name: _view_as_tensor(self.tensors[view.base], view) for name, view in views.items()}


def _sum_of_squares(block: Array) -> float:
    """The sum of the squares of all elements; of complex ones the squares of their absolute values."""
    import numpy as np

    with np.errstate(all="ignore"):
        components = (block.real, block.imag) if np.iscomplexobj(block) else (block,)
        return float(sum(np.sum(np.square(component)) for component in components))


def _float8(code: str) -> Array:
    """The value of each of the 256 bytes of an 8-bit float type, which numpy lacks."""
    import torch

    codes = torch.arange(256, dtype=torch.uint8)
    values: Array = codes.view(getattr(torch, f"float8_{_FLOAT8[code]}")).double().numpy()
    return values


_Read = tuple[dict[str, StoredTensor], dict[str, str], Callable[[], dict[str, Any]]]
"""Tensors, aliases and states of a `StoredState`."""


def _read_tensor_files(folder: ReadableFolder, manifest: Manifest) -> _Read:
    """Read the headers of all files of safetensors: those of a model of transformers, and those of each rank."""
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    for file in manifest.files:
        if file.startswith("model") and file.endswith(".safetensors"):
            for tensor in _tensors(folder, manifest, file):
                name = f"model/{tensor.entry.name}"
                tensors[name] = replace(tensor, entry=replace(tensor.entry, name=name))
    for rank in range(manifest.world_size):
        for file in FilesOfRank(rank).with_tensors:
            if file not in manifest.files:
                continue
            aliases |= manifest.aliases.get(file, {})
            divided = manifest.shards.get(file, {})
            for tensor in _tensors(folder, manifest, file):
                name = tensor.entry.name
                if name in divided:
                    _add_parts(tensors.setdefault(name, tensor), tensor)
                else:
                    tensors[f"{name}@rank{rank}" if name in tensors else name] = tensor
    return tensors, aliases, partial(_states, folder, manifest)


def _states(folder: ReadableFolder, manifest: Manifest) -> dict[str, Any]:
    """The small states of each rank in their encoded form, under `rank0` and so on."""
    states: dict[str, Any] = {}
    for rank in range(manifest.world_size):
        for file in (FilesOfRank(rank).state, FilesOfRank(rank).own):
            if file in manifest.files:
                raw = json.loads(read_verified(folder, manifest, file))
                raw = json.loads(raw["state"]) if file == FilesOfRank(rank).own else raw
                states.setdefault(f"rank{rank}", {}).update(raw["state"])
    return states


def _read_other_format(folder: ReadableFolder, manifest: Manifest) -> _Read:
    """Read a checkpoint of another format whole, and encode its states again."""
    # Imported here: these modules need torch.
    from trainer_cli.format import tree as codec
    from trainer_cli.format.file_layout import lay_out
    from trainer_cli.format.open import new_format
    from trainer_cli.format.sharded import RANKS
    from trainer_cli.tensor_files import TORCH_DTYPES, bytes_of

    tree = new_format(manifest.format, where=str(folder.path)).read(folder, manifest)
    rank_states = tree.pop(RANKS, [])
    shared = {key: value for key, value in tree.items() if not rank_states or key not in rank_states[0]}
    text, leaves = codec.encode(shared)
    layout = lay_out(text, leaves, dtypes=TORCH_DTYPES)
    tensors = {
        entry.name: StoredTensor(entry, [StoredPart(Shard.all_of(entry.shape), partial(bytes_of, leaves[entry.name]))])
        for entry in layout.entries
    }
    states = {"rank0": json.loads(text)["state"]}
    for position, rank_state in enumerate(rank_states):
        text, _ = codec.encode(rank_state)
        # The ranks of a tensor-parallel group have equal states: the file has those of the first rank of each group.
        states.setdefault(f"rank{position * manifest.tensor_size}", {}).update(json.loads(text)["state"])
    return tensors, layout.aliases, lambda: states


def _tensors(folder: ReadableFolder, manifest: Manifest, file: str) -> Iterator[StoredTensor]:
    """Each tensor of a file, with the shape of the whole tensor, and the part of it that is in the file."""
    checked = VerifiedFile(folder, manifest, file)
    with checked.without_digest():
        layout = checked.read_entries()
        offset = checked.size_bytes - checked.left_bytes
    shards = manifest.shards.get(file, {})
    for entry in layout:
        shard = shards.get(entry.name, Shard.all_of(entry.shape))
        if shard.sizes != entry.shape:
            raise checked.damaged(f"{entry.name[:80]!r} is another part of the tensor than the manifest says")
        # The entry as it would be in one file: what is stored in this one may be a part.
        whole = replace(entry, shape=shard.shape, size_bytes=math.prod(shard.shape) * ELEMENT_BYTES[entry.code])
        path, size = folder.path / file, (entry.size_bytes,)
        yield StoredTensor(whole, [StoredPart(shard, partial(_map_bytes, path, offset, size))])
        offset += entry.size_bytes


def _map_bytes(path: Path, offset: int, size: tuple[int]) -> Array:
    """The bytes of a file from an offset on, mapped into memory."""
    import numpy as np

    # Mapped, not read: a checkpoint may be larger than the memory.
    return np.memmap(path, "u1", "r", offset, size)


def _add_parts(tensor: StoredTensor, more: StoredTensor) -> None:
    """Add the shard of another file, unless the tensor has it: ranks may save copies of one shard."""
    shards = {stored.shard for stored in tensor.parts}
    tensor.parts.extend(stored for stored in more.parts if stored.shard not in shards)


def _view_as_tensor(base: StoredTensor, view: View) -> StoredTensor:
    """The view as a tensor, whose elements are copied when they are read."""
    element_bytes = base.entry.size_bytes // math.prod(base.entry.shape)
    entry = TensorEntry(view.name, base.entry.code, view.shape, math.prod(view.shape) * element_bytes)

    def content() -> Array:
        """The elements of the view as bytes, in the order of rows."""
        import numpy as np

        flat = base.parts[0].content().view(f"V{element_bytes}")[view.offset :]
        strides = [stride * element_bytes for stride in view.strides]
        # The view was checked to lie within the stored tensor: as_strided does not check it.
        elements = np.lib.stride_tricks.as_strided(flat, view.shape, strides, writeable=False)
        return np.ascontiguousarray(elements).reshape(-1).view("u1")

    return StoredTensor(entry, [StoredPart(Shard.all_of(view.shape), content)])
