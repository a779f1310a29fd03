"""`metrics.csv`: one row per metric and step, so that a new metric needs no new column."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from trainer_cli.loggers.base import Record, RunFacts, in_run_dir
from trainer_cli.loggers.file_logger import FileLogger

HEADER = "step,epoch,time,metric,value\n"


class CsvLogger(FileLogger):
    """Appends rows `step,epoch,time,metric,value` to a file; NaN and infinity are written as `nan` and `inf`.

    Spreadsheets pivot it; in pandas: `frame.pivot(index="step", columns="metric", values="value")`.
    """

    def __init__(self, path: str = "metrics.csv") -> None:
        super().__init__(path)
        self._is_empty = True

    def spans_up_to(self, path: Path, step: int) -> Iterator[tuple[int, int]]:
        return _rows_up_to(path, step)

    def start(self, facts: RunFacts) -> None:
        super().start(facts)
        self._is_empty = in_run_dir(self.path, facts.run_dir).stat().st_size == 0

    def log(self, record: Record) -> None:
        if self._file is None or not record.metrics:
            return
        text = io.StringIO(HEADER if self._is_empty else "")
        text.seek(0, io.SEEK_END)
        rows = csv.writer(text, lineterminator="\n")
        for name, value in record.metrics.items():
            rows.writerow([record.step, record.epoch, f"{record.time:.3f}", name, repr(float(value))])
        self._file.append(text.getvalue().encode())
        self._is_empty = False


def _rows_up_to(path: Path, step: int) -> Iterator[tuple[int, int]]:
    start = 0
    with open(path, "rb") as file:
        for line in file:
            stop = start + len(line)
            first = line.split(b",", 1)[0]
            if line.endswith(b"\n") and (start == 0 or (first.isdigit() and int(first) <= step)):
                yield start, stop
            start = stop
