"""Open a checkpoint to show it, and compare two."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.catalog import Catalog, Entry
from trainer_cli.errors import CheckpointError, TrainError
from trainer_cli.format import StoredState, StoredTensor
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.manifest import Manifest
from trainer_cli.storage import ReadableFolder
from trainer_cli.tensor_files import read_verified
from trainer_cli.terminal import format_bytes

if TYPE_CHECKING:
    from trainer_cli.config import Change


class Content(StoredState):
    """An open checkpoint, which is held against removal."""

    def __init__(self, path: Path, folder: ReadableFolder, manifest: Manifest, entry: Entry) -> None:
        super().__init__(path, folder, manifest)
        self.entry = entry

    def config(self) -> str | None:
        """The text of its config; None if it carries none."""
        if CONFIG_FILE not in self.manifest.files:
            return None
        return read_verified(self.folder, self.manifest, CONFIG_FILE).decode()


@contextmanager
def open_content(path: Path) -> Iterator[Content]:
    """Context manager that reads the manifest and the table of tensors, and holds the checkpoint against removal.

    Of safetensors files only the header is checked; `train ckpt verify` compares digests. Other formats are read whole.

    Raises:
        CheckpointError: it is not valid, or its format is unknown.
    """
    catalog = Catalog.of(path.parent)
    entry = catalog.entry(path.name)
    if entry.manifest is None or entry.problem is not None:
        raise CheckpointError(f"{path} is not valid: {entry.problem}")
    try:
        # Held, so that a run that trains meanwhile does not remove the files while they are read.
        with catalog.storage.reading(path.name) as folder:
            yield Content(path, folder, entry.manifest, entry)
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
    """What differs, if `relative` is None."""


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


def _compare_tensors(name: str, old: StoredTensor, new: StoredTensor) -> TensorChange | None:
    """How two tensors of one name differ; None if they are equal bit for bit."""
    if old.entry.shape != new.entry.shape:
        return TensorChange(name, why=f"shape {list(old.entry.shape)} -> {list(new.entry.shape)}")
    if old.entry.code != new.entry.code:
        return TensorChange(name, why=f"type {old.entry.code} -> {new.entry.code}")
    if old.has_bytes_of(new):
        return None
    relative = old.relative_change(new)
    why = "it differs, and holds NaN or infinity" if relative is None else None
    return TensorChange(name, relative, why)


def _config_changes(first: Content, second: Content) -> tuple[list[Change], str | None]:
    """The changes of the config from the first to the second; or why they cannot be compared."""
    # Imported here: Hydra would take most of the time of `train ckpt show`, which does not need it.
    from trainer_cli.config import diff, from_yaml

    # A list, since both may be one checkpoint.
    texts = [(content.path, content.config()) for content in (first, second)]
    if lacking := dict.fromkeys(str(path) for path, text in texts if text is None):
        return [], f"{' and '.join(lacking)} holds no config"
    try:
        old, new = (from_yaml(text or "", trusted=True, missing_ok=True).raw for _, text in texts)
    except TrainError as error:
        return [], str(error)
    return diff(old, new), None


TENSOR_COLUMNS = ("tensor", "type", "shape", "elements", "size", "norm")
"""The columns of `tensor_rows`."""


@dataclass(slots=True)
class _Branch:
    """A node of the tree of names, with the sums over all tensors below it."""

    children: dict[str, _Branch] = field(default_factory=dict)
    tensor: StoredTensor | None = None
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


def tensor_rows(tensors: Mapping[str, StoredTensor], norms: Mapping[str, float]) -> list[list[str]]:
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
