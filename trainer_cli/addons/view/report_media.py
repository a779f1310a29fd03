"""Texts, images, histograms and tables of runs, from `media.jsonl` and the images beside it, for a report."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer_cli.addons.view.report_blocks import Block, clock_time
from trainer_cli.files import parse_rows
from trainer_cli.loggers import MEDIA_FILE, MEDIA_FOLDER
from trainer_cli.runs import RunRecord

_MOST_RUNS = 8
_MOST_STEPS = 12
"""Steps of which a medium is shown: the first, the last, and steps between them."""
_MOST_HISTOGRAMS = 50
"""Steps of which a histogram is shown: it is small, and drawn over steps."""
_MOST_BYTES = 4_000_000
"""Of all media of a run in the page; the newest of each name come first."""
_READ_BYTES = 16_000_000
"""The end of the file that is read."""
_MOST_ROWS = 200
_DIGITS = 6
_LONGEST_TEXT = 20_000
_PNG = b"\x89PNG\r\n\x1a\n"


def media(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[Block]:
    """A block for each run that has some; of many runs the first ones."""
    shown = 0
    for record, name in zip(records, names, strict=True):
        file = record.path / MEDIA_FILE
        try:
            status = os.stat(file)
            media = _read_media(file, status.st_size, status.st_mtime_ns)
        except OSError:
            continue
        if media and shown < _MOST_RUNS:
            shown += 1
            yield {"kind": "media", "title": "" if len(records) == 1 else name, "media": media}


# Cached, because a live page is rendered again whenever another file of the run has changed.
@lru_cache(maxsize=8)
def _read_media(file: Path, size_bytes: int, changed_ns: int) -> list[Block]:
    """Read the media of a run: the name of each, and what it shows at some steps."""
    with open(file, "rb") as content:
        content.seek(max(0, size_bytes - _READ_BYTES))
        lines = content.read(_READ_BYTES).split(b"\n")
    # The first line may be cut off; it is left out then, as no JSON.
    by_key: dict[tuple[str, str], dict[int, Any]] = {}
    times: dict[int, str] = {}
    for record in parse_rows(lines):
        step, written_at = record.get("step"), record.get("time")
        if isinstance(step, int) and isinstance(written_at, int | float):
            # Another program may have written any number.
            with suppress(ValueError, OverflowError, OSError):
                times[step] = clock_time(written_at)
        for kind in ("images", "texts", "tables", "histograms"):
            values = record.get(kind)
            if isinstance(step, int) and isinstance(values, Mapping):
                for name, value in values.items():
                    by_key.setdefault((kind, name), {})[step] = value
    # A matrix is logged as a table and as a picture of it: the numbers say more.
    pictures = {
        ("images", name)
        for (kind, name), values in by_key.items()
        if kind == "tables" and any(map(_is_matrix, values.values()))
    }
    shown = {
        key: _spread(list(values.items()), _MOST_HISTOGRAMS if key[0] == "histograms" else _MOST_STEPS)
        for key, values in by_key.items()
        if key not in pictures
    }
    items: dict[tuple[str, str], list[Block]] = {key: [] for key in shown}
    left_bytes = _MOST_BYTES
    # The newest of each name, then the one before: the oldest are left out if they are too large together.
    for age in range(_MOST_HISTOGRAMS):
        for key, values in shown.items():
            if age >= len(values):
                continue
            step, value = values[-1 - age]
            item, size_bytes = _item(file.parent, key[0], value)
            if item is not None and size_bytes <= left_bytes:
                left_bytes -= size_bytes
                items[key].insert(0, {"step": step, **item, "time": times.get(step, "")})
    return [{"name": name, "items": steps} for (_, name), steps in items.items() if steps]


def _is_matrix(value: Any) -> bool:
    """Whether a logged table was marked as a matrix."""
    return isinstance(value, Mapping) and value.get("matrix") is True


def _spread(values: list[tuple[int, Any]], most: int) -> list[tuple[int, Any]]:
    """At most `most` of them: the first, the last, and as many between them at equal distances."""
    last = len(values) - 1
    if last < most:
        return values
    return [values[round(index * last / (most - 1))] for index in range(most)]


def _item(folder: Path, kind: str, value: Any) -> tuple[Block | None, int]:
    """What the page draws of a medium at one step, and its size in bytes; None for an image that is gone, and for a
    value that is not as this program writes it.

    Args:
        folder: the run's directory.
        kind: `images`, `texts`, `tables` or `histograms`.
    """
    if kind == "texts":
        text = str(value)[:_LONGEST_TEXT]
        return {"text": text}, len(text)
    if kind == "images":
        # By its name alone: a line that was edited names no file elsewhere.
        file = folder / MEDIA_FOLDER / Path(str(value)).name
        try:
            size = file.stat().st_size
            content = file.read_bytes() if size <= _MOST_BYTES else b""
        except OSError:
            return None, 0
        # A link in the folder may lead to any file: only an image becomes part of the page.
        if not content.startswith(_PNG):
            return None, 0
        source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        return {"image": source}, len(source)
    if not isinstance(value, Mapping):
        return None, 0
    if kind == "histograms":
        counts, edges = _numbers(value.get("counts")), _numbers(value.get("edges"))
        if not counts or len(edges) != len(counts) + 1:
            return None, 0
        return {"counts": counts, "edges": edges}, 16 * len(counts)
    columns, rows = value.get("columns"), value.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list):
        return None, 0
    cells = [[_text(cell) for cell in row] for row in rows[:_MOST_ROWS] if isinstance(row, list)]
    if any(len(row) != len(columns) for row in cells):
        return None, 0
    size = sum(len(cell) + 4 for row in cells for cell in row)
    return {"columns": list(map(str, columns)), "rows": cells, "matrix": _is_matrix(value)}, size


def _text(cell: Any) -> str:
    """A cell of a table; empty for None."""
    if cell is None:
        return ""
    return f"{cell:.{_DIGITS}g}" if isinstance(cell, float) else str(cell)


def _numbers(values: Any) -> list[float]:
    """The values if they are a list of finite numbers, else an empty list."""
    is_list = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    return values if is_list and all(map(math.isfinite, values)) else []
