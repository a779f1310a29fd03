"""`metrics.jsonl`: one line of JSON per record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_cli.loggers.base import Record
from trainer_cli.loggers.file_logger import FileLogger


class JsonlLogger(FileLogger):
    """Appends `{"step": …, "epoch": …, "time": unix seconds, "train/loss": …}` lines to a file.

    JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf", which Python's
    `float()` reads back. Each line is written at once, so that a killed process loses none and `tail -f` sees them.
    """

    def __init__(self, path: str = "metrics.jsonl") -> None:
        super().__init__(path)

    def spans_up_to(self, path: Path, step: int) -> Iterator[tuple[int, int]]:
        return _lines_up_to(path, step)

    def log(self, record: Record) -> None:
        if self._file is not None and (record.metrics or not record.has_media):
            self._file.append(encode(record))


def encode(record: Record) -> bytes:
    """The line of a record, with its end."""
    line = {"step": record.step, "epoch": record.epoch, "time": round(record.time, 3), **record.metrics}
    return strict_json(line).encode() + b"\n"


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON that a strict parser reads: NaN and infinity, which JSON lacks, are the strings "nan", "inf" and "-inf"."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _lines_up_to(path: Path, step: int) -> Iterator[tuple[int, int]]:
    start = 0
    with open(path, "rb") as file:
        for line in file:
            stop = start + len(line)
            if line.endswith(b"\n") and (found := _step_of(line)) is not None and found <= step:
                yield start, stop
            start = stop


def _step_of(line: bytes) -> int | None:
    """The step of a complete line, or None for what a power failure left: half a line, zeros."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    step = value.get("step") if isinstance(value, dict) else None
    return step if isinstance(step, int) else None
