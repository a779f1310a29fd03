"""Read the tensors and states of a checkpoint, and compare two. Only 8-bit floats and other formats need torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.catalog import Entry, catalog_of
from trainer_cli.errors import CheckpointError, TrainError
from trainer_cli.format.header import (
    ELEMENT_BYTES,
    TensorEntry,
    own_file,
    parsed_header,
    state_file,
    tensor_file,
)
from trainer_cli.format.verified_file import VerifiedFile, read_verified
from trainer_cli.format.views import STORAGE, View, views_in
from trainer_cli.layout import CONFIG_FILE, Shard
from trainer_cli.manifest import Manifest
from trainer_cli.schema import CheckpointFormat
from trainer_cli.storage import ReadableFolder
from trainer_cli.terminal import format_bytes

if TYPE_CHECKING:
    import numpy as np

    from trainer_cli.config.diff import Change

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
    """A shard of a tensor, which may be all of it."""

    shard: Shard
    content: Callable[[], Array]
    """Returns its bytes, mapped from the file or in memory."""


@dataclass(frozen=True, slots=True)
class Tensor:
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
        maps = [stored.content().view(dtype).reshape(stored.shard.sizes or (1,)) for stored in self.parts]
        rows = max(_BLOCK // math.prod(shape[1:]), 1)
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            if len(maps) == 1:
                yield maps[0][start:stop].reshape(-1)
                continue
            block = np.empty((stop - start, *shape[1:]), dtype)
            for stored, raw in zip(self.parts, maps, strict=True):
                (first, *begins), (size, *sizes) = stored.shard.offsets, stored.shard.sizes
                low, high = max(start, first), min(stop, first + size)
                if low < high:
                    inner = (slice(begin, begin + count) for begin, count in zip(begins, sizes, strict=True))
                    block[slice(low - start, high - start), *inner] = raw[low - first : high - first]
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


@dataclass(frozen=True, slots=True)
class Content:
    """An open checkpoint, which is held against removal."""

    path: Path
    entry: Entry
    manifest: Manifest
    tensors: dict[str, Tensor]
    """Name -> tensor, in the order of the files. `NAME@rank1` is what rank 1 saves under a name that rank 0 has too."""
    aliases: dict[str, str]
    """Name of a tied tensor -> the name under which it is stored."""
    folder: ReadableFolder
    states: Callable[[], dict[str, Any]]
    """Reads the small states of each rank in their encoded form: values that JSON lacks are tagged with `$`."""

    def config(self) -> str | None:
        """The text of its config; None if it carries none."""
        if CONFIG_FILE not in self.manifest.files:
            return None
        return read_verified(self.folder, self.manifest, CONFIG_FILE).decode()

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

    def with_views(self) -> dict[str, Tensor]:
        """The tensors of the state: views with all their elements, without stored tensors that only views refer to."""
        views = self.views()
        storages = {view.base for view in views.values() if STORAGE in view.base}
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in storages}
        return tensors | {name: _view_as_tensor(self.tensors[view.base], view) for name, view in views.items()}


@contextmanager
def opened(path: Path) -> Iterator[Content]:
    """Read the manifest and the table of tensors, and hold the checkpoint against removal inside the `with` block.

    Of safetensors files only the header is checked; `train ckpt verify` compares digests. Other formats are read whole.

    Raises:
        CheckpointError: it is not valid, or its format is unknown.
    """
    catalog = catalog_of(path.parent)
    entry = catalog.entry(path.name)
    if entry.manifest is None or entry.problem is not None:
        raise CheckpointError(f"{path} is not valid: {entry.problem}")
    manifest = entry.manifest
    read = _read_tensor_files if CheckpointFormat(manifest.format).has_tensor_files else _read_other_format
    try:
        # Held, so that a run that trains meanwhile does not remove the files while they are read.
        with catalog.storage.reading(path.name) as folder:
            tensors, aliases, states = read(folder, manifest)
            for name, tensor in tensors.items():
                if problem := Shard.why_incomplete(stored.shard for stored in tensor.parts):
                    raise CheckpointError(f"{path} is not valid: {name}: {problem}")
            yield Content(path, entry, manifest, tensors, aliases, folder, states)
    except FileNotFoundError:
        # The caller's code in the `with` block may miss another file.
        if not catalog.entry(path.name).removed:
            raise
        raise CheckpointError(f"{path} is being removed") from None


@dataclass(frozen=True, slots=True)
class TensorChange:
    """How a tensor differs between two checkpoints."""

    name: str
    relative: float | None = None
    """‖b - a‖ / ‖a‖; None if it cannot be computed."""
    why: str | None = None
    """Why it cannot."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two checkpoints."""

    config: list[Change] = field(default_factory=list)
    no_config: str | None = None
    """Why the configs cannot be compared."""
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    tensors: list[TensorChange] = field(default_factory=list)
    """Common tensors that differ: first those without a number, then by falling relative change."""
    same: int = 0


def compare(first: Content, second: Content) -> Difference:
    """Compare configs, names, shapes, types and values."""
    changes: list[TensorChange] = []
    same = 0
    old, new = first.with_views(), second.with_views()
    for name, tensor in old.items():
        if name not in new:
            continue
        if (change := _compare_tensors(name, tensor, new[name])) is None:
            same += 1
        else:
            changes.append(change)
    changes.sort(key=lambda change: (change.relative is not None, -(change.relative or 0.0), change.name))
    config, no_config = _config_changes(first, second)
    return Difference(
        config=config,
        no_config=no_config,
        only_first=sorted(old.keys() - new.keys()),
        only_second=sorted(new.keys() - old.keys()),
        tensors=changes,
        same=same,
    )


def _compare_tensors(name: str, old: Tensor, new: Tensor) -> TensorChange | None:
    if old.entry.shape != new.entry.shape:
        return TensorChange(name, why=f"shape {list(old.entry.shape)} -> {list(new.entry.shape)}")
    if old.entry.code != new.entry.code:
        return TensorChange(name, why=f"type {old.entry.code} -> {new.entry.code}")
    if _has_equal_bytes(old, new):
        return None
    import numpy as np

    difference = norm = 0.0
    for a, b in zip(old.blocks(), new.blocks(), strict=True):
        with np.errstate(all="ignore"):
            # In blocks of doubles: the sum over a large tensor would lose digits in its own type.
            difference += _sum_of_squares(b - a)
        norm += _sum_of_squares(a)
    if not math.isfinite(difference) or not math.isfinite(norm):
        return TensorChange(name, why="it differs, and holds NaN or infinity")
    return TensorChange(name, relative=math.sqrt(difference / norm) if norm else math.inf if difference else 0.0)


def _sum_of_squares(block: Array) -> float:
    import numpy as np

    with np.errstate(all="ignore"):
        components = (block.real, block.imag) if np.iscomplexobj(block) else (block,)
        return float(sum(np.sum(np.square(component)) for component in components))


def _has_equal_bytes(first: Tensor, second: Tensor) -> bool:
    import numpy as np

    # As bytes: NaN equals itself, and -0.0 differs from 0.0.
    blocks = zip(first.stored(), second.stored(), strict=True)
    return all(np.array_equal(a.view("u1"), b.view("u1")) for a, b in blocks)


def _float8(code: str) -> Array:
    """The value of each of the 256 bytes of an 8-bit float type, which numpy lacks."""
    import torch

    codes = torch.arange(256, dtype=torch.uint8)
    values: Array = codes.view(getattr(torch, f"float8_{_FLOAT8[code]}")).double().numpy()
    return values


def _config_changes(first: Content, second: Content) -> tuple[list[Change], str | None]:
    # Imported here: Hydra would take most of the time of `train ckpt show`, which does not need it.
    from trainer_cli.config.compose import from_yaml
    from trainer_cli.config.diff import diff

    texts = {content.path: content.config() for content in (first, second)}
    if lacking := [str(path) for path, text in texts.items() if text is None]:
        return [], f"{' and '.join(lacking)} holds no config"
    try:
        old, new = (from_yaml(text or "", trusted=True, missing_ok=True).raw for text in texts.values())
    except TrainError as error:
        return [], str(error)
    return diff(old, new), None


_Read = tuple[dict[str, Tensor], dict[str, str], Callable[[], dict[str, Any]]]
"""Tensors, aliases and states of a `Content`."""


def _read_tensor_files(folder: ReadableFolder, manifest: Manifest) -> _Read:
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for file in manifest.files:
        if file.startswith("model") and file.endswith(".safetensors"):
            for tensor in _tensors(folder, manifest, file):
                name = f"model/{tensor.entry.name}"
                tensors[name] = replace(tensor, entry=replace(tensor.entry, name=name))
    for rank in range(manifest.world_size):
        file = tensor_file(rank)
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
    states: dict[str, Any] = {}
    for rank in range(manifest.world_size):
        for file in (state_file(rank), own_file(rank)):
            if file in manifest.files:
                raw = json.loads(read_verified(folder, manifest, file))
                raw = json.loads(raw["state"]) if file == own_file(rank) else raw
                states.setdefault(f"rank{rank}", {}).update(raw["state"])
    return states


def _read_other_format(folder: ReadableFolder, manifest: Manifest) -> _Read:
    # Imported here: these modules need torch.
    from trainer_cli.format import tree as codec
    from trainer_cli.format.open import new_format
    from trainer_cli.format.sharded import RANKS
    from trainer_cli.format.tensor_file import TORCH_DTYPES, bytes_of, lay_out

    tree = new_format(manifest.format, str(folder.path)).read(folder, manifest)
    rank_states = tree.pop(RANKS, [])
    shared = {key: value for key, value in tree.items() if not rank_states or key not in rank_states[0]}
    text, leaves = codec.encode(shared)
    layout = lay_out(text, leaves, dtypes=TORCH_DTYPES)
    tensors = {
        entry.name: Tensor(entry, [StoredPart(Shard.all_of(entry.shape), partial(bytes_of, leaves[entry.name]))])
        for entry in layout.entries
    }
    states = {"rank0": json.loads(text)["state"]}
    for position, rank_state in enumerate(rank_states):
        # The ranks of a tensor-parallel group have equal states: the file holds one for each group, of its first rank.
        states.setdefault(f"rank{position * manifest.tensor_size}", {}).update(
            json.loads(codec.encode(rank_state)[0])["state"]
        )
    return tensors, layout.aliases, lambda: states


def _tensors(folder: ReadableFolder, manifest: Manifest, file: str) -> Iterator[Tensor]:
    """Each tensor of a file, with the shape of the whole tensor and the shard that the file holds."""
    checked = VerifiedFile(folder, manifest, file)
    with checked.without_digest():
        layout = parsed_header(checked)
        offset = checked.size_bytes - checked.left_bytes
    shards = manifest.shards.get(file, {})
    for entry in layout:
        shard = shards.get(entry.name, Shard.all_of(entry.shape))
        if shard.sizes != entry.shape:
            raise checked.damaged(f"{entry.name[:80]!r} is another part of the tensor than the manifest says")
        whole = replace(entry, shape=shard.shape, size_bytes=math.prod(shard.shape) * ELEMENT_BYTES[entry.code])
        path, size = folder.path / file, (entry.size_bytes,)
        yield Tensor(whole, [StoredPart(shard, partial(_map_bytes, path, offset, size))])
        offset += entry.size_bytes


def _map_bytes(path: Path, offset: int, size: tuple[int]) -> Array:
    import numpy as np

    # Mapped, not read: a checkpoint may be larger than the memory.
    return np.memmap(path, "u1", "r", offset, size)


def _add_parts(tensor: Tensor, more: Tensor) -> None:
    """Add the shard of another file, unless the tensor has it: ranks may save copies of one shard."""
    shards = {stored.shard for stored in tensor.parts}
    tensor.parts.extend(stored for stored in more.parts if stored.shard not in shards)


def _view_as_tensor(base: Tensor, view: View) -> Tensor:
    """The view as a tensor, whose elements are copied when they are read."""
    element_bytes = base.entry.size_bytes // math.prod(base.entry.shape)
    entry = TensorEntry(view.name, base.entry.code, view.shape, math.prod(view.shape) * element_bytes)

    def content() -> Array:
        import numpy as np

        flat = base.parts[0].content().view(f"V{element_bytes}")[view.offset :]
        strides = [stride * element_bytes for stride in view.strides]
        # The view was checked to lie within the stored tensor: as_strided does not check it.
        elements = np.lib.stride_tricks.as_strided(flat, view.shape, strides, writeable=False)
        return np.ascontiguousarray(elements).reshape(-1).view("u1")

    return Tensor(entry, [StoredPart(Shard.all_of(view.shape), content)])


TENSOR_COLUMNS = ("tensor", "type", "shape", "elements", "size", "norm")
"""The columns of `tensor_rows`."""


@dataclass(slots=True)
class _Branch:
    """A node of the tree of names, with the sums over all tensors below it."""

    children: dict[str, _Branch] = field(default_factory=dict)
    tensor: Tensor | None = None
    elements: int = 0
    size_bytes: int = 0
    squares: float = 0.0

    def row(self, label: str, *, norms: bool) -> list[str]:
        """The cells under `TENSOR_COLUMNS`."""
        entry = None if self.tensor is None else self.tensor.entry
        return [
            label.rstrip("/.") if entry is None else label,
            "" if entry is None else entry.code,
            "" if entry is None else str(list(entry.shape)),
            f"{self.elements:,}",
            format_bytes(self.size_bytes),
            f"{math.sqrt(self.squares):.6g}" if norms else "",
        ]

    def rows(self, label: str, depth: int, *, norms: bool) -> Iterator[list[str]]:
        """A row for this node and each below it; nodes with a single child are joined into one label."""
        branch = self
        while branch.tensor is None and len(branch.children) == 1:
            ((segment, branch),) = branch.children.items()
            label += segment
        yield branch.row("  " * depth + label, norms=norms)
        for segment, child in branch.children.items():
            yield from child.rows(segment, depth + 1, norms=norms)


def tensor_rows(tensors: Mapping[str, Tensor], norms: Mapping[str, float]) -> list[list[str]]:
    """A row for each tensor, and one with the sums for each prefix that two or more names share.

    The norm of a prefix is that of all its tensors as one vector; without `norms` the column is empty.
    """
    root = _Branch()
    for name, tensor in tensors.items():
        branch = root
        # Split after each separator: `model/fc.weight` has the segments `model/`, `fc.`, `weight`.
        for segment in (None, *re.split(r"(?<=[/.])(?=.)", name)):
            if segment is not None:
                branch = branch.children.setdefault(segment, _Branch())
            branch.elements += math.prod(tensor.entry.shape)
            branch.size_bytes += tensor.entry.size_bytes
            # Squares add up over tensors; norms do not.
            branch.squares += norms.get(name, 0.0) ** 2
        branch.tensor = tensor
    rows = [row for label, child in root.children.items() for row in child.rows(label, 0, norms=bool(norms))]
    return [*rows, root.row("total", norms=bool(norms))] if len(root.children) > 1 else rows
