"""Loggers that append lines to one file, and drop the lines of later steps on a resume.

`metrics.jsonl` has one line of JSON per record, `metrics.csv` one row per metric and step, so that a new metric needs
no new column.
"""

from __future__ import annotations

import csv
import io
import json
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_cli.core.files import AppendedFile, keep_spans, sync_folder
from trainer_cli.core.url_path import local_path
from trainer_cli.loggers.base import Logger, Record, RunFacts, in_run_dir


class FileLogger(Logger):
    """Appends lines to the file at `path`, which is relative to the run directory."""

    def __init__(self, path: str) -> None:
        self.path = str(local_path(path, f"{type(self).__name__}.path"))
        self._file: AppendedFile | None = None

    @abstractmethod
    def is_kept(self, line: bytes, start: int, step: int) -> bool:
        """Whether a complete line that begins at byte `start` stays after a rewind to `step`."""

    def rewind(self, run_dir: Path, step: int) -> None:
        path = in_run_dir(self.path, run_dir)
        if path.exists():
            keep_spans(path, self._spans_up_to(path, step))

    def _spans_up_to(self, path: Path, step: int) -> Iterator[tuple[int, int]]:
        """The (first byte, end) of each line to keep. A line without its newline was truncated by a crash."""
        start = 0
        with open(path, "rb") as file:
            for line in file:
                end = start + len(line)
                if line.endswith(b"\n") and self.is_kept(line, start, step):
                    yield start, end
                start = end

    def start(self, facts: RunFacts) -> None:
        path = in_run_dir(self.path, facts.run_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = AppendedFile(path)
        # Without it a power failure may lose the new file itself, though its content is synced.
        sync_folder(path.parent)

    def flush(self, durable: bool = False) -> None:
        if durable and self._file is not None:
            self._file.sync()

    def close(self) -> None:
        # Taken away first, so that a second call after a failed close does not fail again.
        file, self._file = self._file, None
        if file is not None:
            file.close()


HEADER = "step,epoch,time,metric,value\n"


class CsvLogger(FileLogger):
    """Appends rows `step,epoch,time,metric,value` to a file; NaN and infinity are written as `nan` and `inf`.

    Spreadsheets pivot it; in pandas: `frame.pivot(index="step", columns="metric", values="value")`.
    """

    def __init__(self, path: str = "metrics.csv") -> None:
        super().__init__(path)
        self._is_empty = True

    def is_kept(self, line: bytes, start: int, step: int) -> bool:
        # Not by the csv module: a truncated or damaged line would raise an error there.
        first_cell = line.split(b",", 1)[0]
        is_header = start == 0
        return is_header or (first_cell.isdigit() and int(first_cell) <= step)

    def start(self, facts: RunFacts) -> None:
        super().start(facts)
        self._is_empty = in_run_dir(self.path, facts.run_dir).stat().st_size == 0

    def log(self, record: Record) -> None:
        if self._file is None or not record.metrics:
            return
        # One write for the record: a crash then leaves all its rows or a truncated last one.
        text = io.StringIO(HEADER if self._is_empty else "")
        text.seek(0, io.SEEK_END)
        rows = csv.writer(text, lineterminator="\n")
        for name, value in record.metrics.items():
            rows.writerow([record.step, record.epoch, f"{record.time:.3f}", name, repr(float(value))])
        self._file.append(text.getvalue().encode())
        # Only after the write: a record that failed is given again, and still needs the header.
        self._is_empty = False


class JsonlLogger(FileLogger):
    """Appends `{"step": …, "epoch": …, "time": unix seconds, "train/loss": …}` lines to a file.

    JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf", which Python's
    `float()` reads back. Each line is written at once, so that a killed process loses none and `tail -f` sees them.
    """

    def __init__(self, path: str = "metrics.jsonl") -> None:
        super().__init__(path)

    def is_kept(self, line: bytes, start: int, step: int) -> bool:
        line_step = _step_of(line)
        return line_step is not None and line_step <= step

    def log(self, record: Record) -> None:
        if self._file is not None and (record.metrics or not record.has_media):
            # One write: a crash leaves the whole line or a truncated one, which `rewind` drops.
            self._file.append(encode(record))


def encode(record: Record) -> bytes:
    """The line of a record, with its newline."""
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


def _step_of(line: bytes) -> int | None:
    """The step of a complete line; None for garbage that a power failure left."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    step = value.get("step") if isinstance(value, dict) else None
    # A complete line may still be garbage of another program.
    return step if isinstance(step, int) else None
