"""Trees, sizes and ages, as people read them; and JSON as programs read it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_cli.commands.ckpt_inspect import Tensor

HEADER = ("tensor", "type", "shape", "elements", "size", "norm")
"""The columns of `tensor_rows`."""


def size(count: int) -> str:
    """Bytes with three digits or so."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or (unit != "B" and value < 999.95):
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def age(seconds: float) -> str:
    """The largest unit that fits."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def print_json(value: object) -> None:
    """As JSON that every program can read: NaN and infinity, which it lacks, as texts."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


@dataclass(slots=True)
class _Branch:
    children: dict[str, _Branch] = field(default_factory=dict)
    leaf: str | None = None
    elements: int = 0
    size_bytes: int = 0
    squares: float = 0.0


def tensor_rows(tensors: Mapping[str, Tensor], norms: Mapping[str, float]) -> list[list[str]]:
    """A row for each tensor, and one for each part of the names that several share, with their sums."""
    root = _Branch()
    for name, tensor in tensors.items():
        branch = root
        for part in (None, *re.split(r"(?<=[/.])(?=.)", name)):
            if part is not None:
                branch = branch.children.setdefault(part, _Branch())
            branch.elements += math.prod(tensor.entry.shape)
            branch.size_bytes += tensor.entry.size_bytes
            branch.squares += norms.get(name, 0.0) ** 2
        branch.leaf = name
    rows = [row for label, branch in root.children.items() for row in _rows(label, branch, 0, tensors, norms)]
    return [*rows, _row("total", root, norms)] if len(root.children) > 1 else rows


def _rows(
    label: str, branch: _Branch, depth: int, tensors: Mapping[str, Tensor], norms: Mapping[str, float]
) -> Iterator[list[str]]:
    while branch.leaf is None and len(branch.children) == 1:
        ((part, branch),) = branch.children.items()
        label += part
    yield _row("  " * depth + label, branch, norms, None if branch.leaf is None else tensors[branch.leaf])
    for part, child in branch.children.items():
        yield from _rows(part, child, depth + 1, tensors, norms)


def _row(label: str, branch: _Branch, norms: Mapping[str, float], tensor: Tensor | None = None) -> list[str]:
    return [
        label.rstrip("/.") if tensor is None else label,
        "" if tensor is None else tensor.entry.code,
        "" if tensor is None else str(list(tensor.entry.shape)),
        f"{branch.elements:,}",
        size(branch.size_bytes),
        f"{math.sqrt(branch.squares):.6g}" if norms else "",
    ]
