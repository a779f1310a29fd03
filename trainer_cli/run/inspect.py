"""What is inside a checkpoint, and how two differ, read from the files themselves: torch is not needed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.catalog import Entry
from trainer_cli.checkpoint.format.layout import TensorEntry, parsed_header, state_file, tensor_file
from trainer_cli.checkpoint.format.verified import Verified, read_verified
from trainer_cli.checkpoint.manifest import Manifest
from trainer_cli.checkpoint.naming import CONFIG_FILE
from trainer_cli.checkpoint.soundness import catalog_of
from trainer_cli.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

    from trainer_cli.config.difference import Change

    Array = np.ndarray[Any, Any]

_BLOCK = 1 << 20
_NUMPY = {
    "F64": "f8", "I64": "i8", "U64": "u8", "C64": "c8", "F32": "f4", "I32": "i4", "U32": "u4", "F16": "f2",
    "I16": "i2", "U16": "u2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint: where its bytes are."""

    entry: TensorEntry
    file: Path
    offset: int

    def blocks(self) -> Iterator[Array]:
        """Its elements as 64-bit floats (complex ones as 128 bits), some at a time, straight from the file.

        Raises:
            CheckpointError: numpy has no such elements (8-bit floats).
        """
        import numpy as np

        code, size = self.entry.code, math.prod(self.entry.shape)
        if not size:
            return
        stored = "u2" if code == "BF16" else _NUMPY.get(code)
        if stored is None:
            raise CheckpointError(f"{self.entry.name} has elements of type {code}, whose values cannot be shown")
        raw = np.memmap(
            self.file, dtype=np.dtype(stored).newbyteorder("<"), mode="r", offset=self.offset, shape=(size,)
        )
        for start in range(0, size, _BLOCK):
            block = raw[start : start + _BLOCK]
            if code == "BF16":
                block = (block.astype("<u4") << 16).view("<f4")
            yield block.astype(np.complex128 if code == "C64" else np.float64)

    def norm(self) -> float:
        """The Euclidean norm over all elements."""
        import numpy as np

        return math.sqrt(sum(float(np.sum(np.abs(block) ** 2)) for block in self.blocks()))


@dataclass(frozen=True, slots=True)
class Content:
    """A checkpoint that was opened to look inside."""

    path: Path
    entry: Entry
    manifest: Manifest
    tensors: dict[str, Tensor]
    aliases: dict[str, str]

    def states(self) -> Any:
        """The small states, as they are written; what is no plain JSON is tagged with `$`."""
        found = json.loads(_read(self.path, self.manifest, state_file(0)))
        return found["state"] if isinstance(found, dict) and "state" in found else found

    def config(self) -> Path | None:
        """The config that it carries."""
        return self.path / CONFIG_FILE if CONFIG_FILE in self.manifest.files else None


def open_checkpoint(path: Path) -> Content:
    """Read the manifest and the table of tensors.

    Raises:
        CheckpointError: it is not valid.
    """
    entry = catalog_of(path.parent).entry(path.name)
    if entry.manifest is None or entry.problem is not None:
        raise CheckpointError(f"{path} is not valid: {entry.problem}")
    manifest = entry.manifest
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for rank in range(manifest.world_size):
        name = tensor_file(rank)
        if name not in manifest.files:
            continue
        aliases |= manifest.aliases.get(name, {})
        for tensor in _tensors(path, manifest, name):
            tensors[tensor.entry.name] = tensor
    return Content(path, entry, manifest, tensors, aliases)


@dataclass(frozen=True, slots=True)
class TensorChange:
    """How a tensor differs between two checkpoints: by a sentence, or by ‖b - a‖ / ‖a‖."""

    name: str
    relative: float | None = None
    why: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.why}" if self.relative is None else f"{self.name}: {self.relative:.3g}"


@dataclass(frozen=True, slots=True)
class Difference:
    """All that differs between two checkpoints."""

    config: list[Change]
    only_first: list[str]
    only_second: list[str]
    tensors: list[TensorChange]
    """Those of both that differ, the largest relative change first."""
    same: int


def compare(first: Content, second: Content) -> Difference:
    """Compare configs, names, shapes, types and values."""
    changes: list[TensorChange] = []
    same = 0
    for name, one in first.tensors.items():
        other = second.tensors.get(name)
        if other is None:
            continue
        if (change := _change(name, one, other)) is None:
            same += 1
        else:
            changes.append(change)
    changes.sort(key=lambda one: (one.relative is not None, -(one.relative or 0.0), one.name))
    return Difference(
        _config_changes(first, second),
        sorted(first.tensors.keys() - second.tensors.keys()),
        sorted(second.tensors.keys() - first.tensors.keys()),
        changes,
        same,
    )


def _change(name: str, one: Tensor, other: Tensor) -> TensorChange | None:
    import numpy as np

    if one.entry.shape != other.entry.shape:
        return TensorChange(name, why=f"shape {list(one.entry.shape)} -> {list(other.entry.shape)}")
    if one.entry.code != other.entry.code:
        return TensorChange(name, why=f"type {one.entry.code} -> {other.entry.code}")
    if _bytes_equal(one, other):
        return None
    try:
        moved = size = 0.0
        for a, b in zip(one.blocks(), other.blocks(), strict=True):
            moved += float(np.sum(np.abs(b - a) ** 2))
            size += float(np.sum(np.abs(a) ** 2))
    except CheckpointError:
        return TensorChange(name, why="the values differ")
    return TensorChange(name, relative=math.sqrt(moved / size) if size else math.inf)


def _bytes_equal(one: Tensor, other: Tensor) -> bool:
    import numpy as np

    size = one.entry.size_bytes
    if not size:
        return True
    a, b = (np.memmap(t.file, dtype="u1", mode="r", offset=t.offset, shape=(size,)) for t in (one, other))
    return all(np.array_equal(a[at : at + 8 * _BLOCK], b[at : at + 8 * _BLOCK]) for at in range(0, size, 8 * _BLOCK))


def _config_changes(first: Content, second: Content) -> list[Change]:
    # Hydra would take most of the time of an answer that does not need it.
    from trainer_cli.config.compose import diff, from_yaml

    files = first.config(), second.config()
    if files[0] is None or files[1] is None:
        return []
    old, new = (from_yaml(file, trusted=True, missing_ok=True).raw for file in files if file is not None)
    return diff(old, new)


def _tensors(path: Path, manifest: Manifest, file: str) -> Iterator[Tensor]:
    with catalog_of(path.parent).storage.reading(path.name) as folder:
        opened = Verified(folder, manifest, file)
        # Only the header is read: the digest of the whole is `verify`'s.
        with folder.open(file) as source:
            opened.look_into(source)
            layout = parsed_header(opened)
            offset = source.size_bytes - opened.left_bytes
    for entry in layout:
        yield Tensor(entry, path / file, offset)
        offset += entry.size_bytes


def _read(path: Path, manifest: Manifest, file: str) -> bytes:
    with catalog_of(path.parent).storage.reading(path.name) as folder:
        return read_verified(folder, manifest, file)


def totals(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Elements and bytes by the first part of the name: model, optimizer, callbacks …"""
    found: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        top = name.partition("/")[0]
        count, size = found.get(top, (0, 0))
        found[top] = (count + math.prod(tensor.entry.shape), size + tensor.entry.size_bytes)
    return found
