"""Loggers that append lines to one file, and drop the lines of later steps on a resume.

`metrics.jsonl` has one line of JSON per record, `metrics.csv` one row per metric and step, so that a new metric needs
no new column.
"""

from __future__ import annotations

import csv
import io
import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.files import AppendedFile, as_path, keep_spans, parse_object, sync
from trainer_cli.loggers.base import Logger, Record, RunFacts, in_run_dir
from trainer_cli.loggers.marks import LogEnd, Mark, MetricRange, is_validation_metric
from trainer_cli.strict_json import read_number, strict_json


class Line(NamedTuple):
    """What a line of a log file holds."""

    step: int
    metrics: Mapping[str, float] = {}


class FileLogger(Logger):
    """Appends lines to the file at `path`, which is relative to the run directory."""

    writes = ("path",)

    def __init__(self, path: str) -> None:
        self.path = str(as_path(path, f"{type(self).__name__}.path", local=True))
        self._file: AppendedFile | None = None
        self._full_path = Path(path)
        self._end: LogEnd | None = None
        """The end of the file; None if it is not known what the file holds."""
        self._mark: Mark | None = None
        """The mark of a loaded checkpoint, until the rewind to it."""

    @abstractmethod
    def read_line(self, line: bytes, start: int) -> Line | None:
        """Read a complete line that begins at byte `start`; None if it is damaged."""

    def state_dict(self) -> dict[str, Any]:
        """The mark before the newest step, if the file is as this logger has written it."""
        # Another program may have changed the file.
        if self._end is None or not self._is_whole():
            return {}
        try:
            return self._end.before_newest.state_dict(self._full_path)
        except OSError:
            return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mark = Mark.parse(state)

    def rewind(self, run_dir: Path, step: int) -> None:
        """Drop the lines of later steps; those before a loaded mark that fits are not read."""
        path = in_run_dir(self.path, run_dir)
        mark, self._mark, self._end = self._mark, None, None
        end = LogEnd()
        if path.exists():
            if mark is not None and mark.fits(path, step):
                end = LogEnd(mark)
            keep_spans(path, self._spans_up_to(path, step, end))
        self._end = end

    def rewind_shared(self, step: int) -> None:
        """Drop the lines of later steps that follow a loaded mark, up to those of another training."""
        # Without a mark nothing tells which records are this training's.
        mark, self._mark, path = self._mark, None, Path(self.path)
        if mark is not None and path.exists() and mark.fits(path, step):
            self._end = LogEnd(mark)
            keep_spans(path, self._spans_up_to(path, step, self._end, is_shared=True))

    def _spans_up_to(self, path: Path, step: int, end: LogEnd, *, is_shared: bool = False) -> Iterator[tuple[int, int]]:
        """Yield the (first byte, end) of what to keep: everything before `end`, and each line after it up to `step`.

        Lines that are kept are added to `end`. A line without its newline was truncated by a crash, and is dropped.

        Args:
            is_shared: from the first line whose step falls on, all lines belong to other trainings, and stay.
        """
        start, newest_step = end.end.size_bytes, end.end.step
        yield 0, start
        with open(path, "rb") as file:
            file.seek(start)
            for line in file:
                content = self.read_line(line, start) if line.endswith(b"\n") else None
                if is_shared and content is not None:
                    if content.step < newest_step:
                        yield start, path.stat().st_size
                        return
                    newest_step = content.step
                if content is not None and content.step <= step:
                    end.add(len(line), *content)
                    yield start, start + len(line)
                start += len(line)

    def start(self, facts: RunFacts) -> None:
        """Open the file, and find its end if it was not rewound."""
        # An earlier start may have failed after it had opened the file.
        self._close_file()
        path = self._full_path = in_run_dir(self.path, facts.run_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = AppendedFile(path)
        # The folder, too: a power failure may lose a new file although its content is synced.
        sync(path.parent)
        size_bytes = path.stat().st_size
        # Without a run directory the file may hold records of other trainings, which a resume must not drop.
        is_new = self._end is None and size_bytes == 0
        if is_new or (facts.run_dir is None and not self._is_whole()):
            if size_bytes and _read_last_byte(path) != b"\n":
                # The last line of a training that was killed: a record after it would be unreadable too.
                self._file.append(b"\n")
                size_bytes += 1
            self._end = LogEnd(Mark(size_bytes))

    def _append(self, content: bytes, step: int, metrics: Mapping[str, float]) -> None:
        """Append the lines of a record, and count them."""
        assert self._file is not None
        self._file.append(content)
        if self._end is not None:
            self._end.add(len(content), step, metrics)

    def _is_whole(self) -> bool:
        """Whether the file ends where the last record that is known ends."""
        try:
            return self._end is not None and self._full_path.stat().st_size == self._end.end.size_bytes
        except OSError:
            return False

    def flush(self, durable: bool = False) -> None:
        if durable and self._file is not None:
            self._file.sync()

    def close(self) -> None:
        self._close_file()

    def _close_file(self) -> None:
        """Close the file, if it is open."""
        # Set to None first, so that a second call after a failed close does not fail again.
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _read_last_byte(path: Path) -> bytes:
    """The last byte of a file that is not empty."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


METRICS_FILE = "metrics.jsonl"
HEADER = "step,epoch,time,metric,value\n"
_HEADER_STEP = -1
"""No rewind drops the header."""


class CsvLogger(FileLogger):
    """Appends rows `step,epoch,time,metric,value` to a file; NaN and infinity are written as `nan` and `inf`.

    Spreadsheets pivot it; in pandas: `frame.pivot(index="step", columns="metric", values="value")`.
    """

    def __init__(self, path: str = "metrics.csv") -> None:
        super().__init__(path)
        self._is_empty = True

    def read_line(self, line: bytes, start: int) -> Line | None:
        """The step of a row; the header has a step that no rewind drops."""
        if start == 0:
            return Line(_HEADER_STEP)
        # Not by the csv module: a truncated or damaged line would raise an error there.
        first_cell = line.split(b",", 1)[0]
        return Line(int(first_cell)) if first_cell.isdigit() else None

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
        self._append(text.getvalue().encode(), record.step, {})
        # Only after the write: a record that failed is given again, and still needs the header.
        self._is_empty = False


class JsonlLogger(FileLogger):
    """Appends `{"step": …, "epoch": …, "time": unix seconds, "train/loss": …}` lines to a file.

    JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf", which Python's
    `float()` reads back. Each line is written at once, so that a killed process loses none and `tail -f` sees them.
    """

    def __init__(self, path: str = METRICS_FILE) -> None:
        super().__init__(path)

    def read_line(self, line: bytes, start: int) -> Line | None:
        return read_record(line)

    def log(self, record: Record) -> None:
        if self._file is not None and (record.metrics or not record.has_media):
            # One write: a crash leaves the whole line or a truncated one, which `rewind` drops.
            self._append(self.encode(record), record.step, record.metrics)

    @staticmethod
    def encode(record: Record) -> bytes:
        """The line of a record, with its newline."""
        line = {"step": record.step, "epoch": record.epoch, "time": round(record.time, 3), **record.metrics}
        return strict_json(line).encode() + b"\n"

    def metric_ranges(self, file: Path | None = None) -> Mapping[str, MetricRange] | None:
        """The validation metrics of all records in the file, if they are known; see `Logger.metric_ranges`."""
        is_other = file is not None and self._full_path.absolute() != file.absolute()
        return None if self._end is None or is_other or not self._is_whole() else self._end.end.ranges

    @staticmethod
    def read_ranges(file: Path) -> Mapping[str, MetricRange]:
        """The validation metrics of all records in a file; a missing file has none.

        Raises:
            OSError: the file cannot be read.
        """
        mark = Mark()
        with suppress(FileNotFoundError), open(file, "rb") as lines:
            for line in lines:
                if line.endswith(b"\n") and (content := read_record(line)) is not None:
                    mark = mark.after(len(line), *content)
        return mark.ranges


def read_record(line: bytes) -> Line | None:
    """Read a complete line of a `metrics.jsonl`; None for a line without a step, as after a power failure."""
    record = parse_object(line) or {}
    step = record.get("step")
    if not isinstance(step, int):
        return None
    metrics = {}
    for name, value in record.items():
        if is_validation_metric(name) and (number := read_number(value)) is not None:
            metrics[name] = number
    # A record without epoch and time is not of this package, and readers leave its metrics out.
    has_facts = all(read_number(record.get(name)) is not None for name in ("epoch", "time"))
    return Line(step, metrics if has_facts else {})


def read_records(file: Path, after: int, until: int) -> Iterator[Record]:
    """The records of a `metrics.jsonl` with steps in (after, until], without their media; a missing file has none.

    Raises:
        OSError: the file cannot be read.
    """
    with suppress(FileNotFoundError), open(file, "rb") as lines:
        for line in lines:
            content = read_record(line) if line.endswith(b"\n") else None
            if content is None or not after < content.step <= until:
                continue
            values = {name: read_number(value) for name, value in json.loads(line).items() if name != "step"}
            epoch, time = values.pop("epoch", None), values.pop("time", None)
            if epoch is not None and time is not None:
                metrics = {name: value for name, value in values.items() if value is not None}
                yield Record(content.step, epoch, time, metrics)
