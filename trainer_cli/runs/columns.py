"""The records of `metrics.jsonl` as arrays: best values, their course, and curves for a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer_cli.files import GrowingFile
from trainer_cli.strict_json import read_number

Array = np.ndarray[Any, Any]
FACTS = ("step", "epoch", "time")
"""Keys that every record has."""


@dataclass(slots=True)
class Columns:
    """The records of `metrics.jsonl`; every array has one element for each record, in the order of the file."""

    step: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    epoch: Array = field(default_factory=lambda: np.zeros(0))
    time: Array = field(default_factory=lambda: np.zeros(0))
    """Unix seconds."""
    metrics: dict[str, Series] = field(default_factory=dict)
    unread: int = 0
    """Number of lines that hold no record."""


class Series(NamedTuple):
    """The values of one metric, which may be NaN or infinite, and the indices of the records that hold them."""

    rows: Array
    values: Array


class GrowingColumns:
    """The records of a `metrics.jsonl` that another process may append to; each line is parsed once. Lines that are
    truncated or not this package's are left out; a missing file has none."""

    def __init__(self, file: Path) -> None:
        self._file = GrowingFile(file)
        self.columns = Columns()

    def read(self) -> Columns:
        """All records up to now. When a resume has dropped some, the file is read anew.

        Raises:
            OSError: it cannot be read.
        """
        rows, restarted = self._file.read_rows(*FACTS)
        if restarted or not len(self.columns.step):
            self.columns = _columns_of(rows)
        elif rows:
            self.columns = _join(self.columns, _columns_of(rows))
        self.columns = replace(self.columns, unread=self._file.unread)
        return self.columns


def _join(first: Columns, second: Columns) -> Columns:
    """The records of both, those of `second` after those of `first`."""
    offset = len(first.step)
    metrics = dict(first.metrics)
    for name, series in second.metrics.items():
        rows = series.rows + offset
        before = metrics.get(name)
        if before is None:
            metrics[name] = Series(rows, series.values)
        else:
            metrics[name] = Series(np.append(before.rows, rows), np.append(before.values, series.values))
    facts = [np.append(getattr(first, fact), getattr(second, fact)) for fact in FACTS]
    return Columns(facts[0], facts[1], facts[2], metrics)


def _columns_of(records: Sequence[dict[str, Any]]) -> Columns:
    """The records as arrays. A metric whose values are no numbers is left out."""
    rows_by_keys: dict[tuple[str, ...], list[int]] = {}
    for row, record in enumerate(records):
        rows_by_keys.setdefault(tuple(record), []).append(row)
    rows: dict[str, list[int]] = {}
    values: dict[str, list[Any]] = {}
    # Records with the same keys together, because a loop for each record is much slower.
    for keys, rows_of_keys in rows_by_keys.items():
        for key in keys:
            if key not in FACTS:
                rows.setdefault(key, []).extend(rows_of_keys)
                values.setdefault(key, []).extend([records[row][key] for row in rows_of_keys])
    step, epoch, time = ([record[fact] for record in records] for fact in FACTS)
    all_series = {key: _make_series(rows[key], values[key]) for key in rows}
    metrics = {key: series for key, series in all_series.items() if len(series.rows)}
    return Columns(np.array(step, np.int64), np.array(epoch, float), np.array(time, float), metrics)


def _make_series(rows: Sequence[int], values: Sequence[Any]) -> Series:
    """The values that are numbers, in the order of their rows."""
    try:
        series = Series(np.array(rows, np.int64), np.array(values, float))
        if series.values.ndim > 1:
            raise TypeError("lists of equal length")
    except (ValueError, TypeError, OverflowError):
        # Some values are no numbers: convert one at a time and leave these out.
        numbers = {row: read_number(value) for row, value in zip(rows, values, strict=True)}
        numbers = {row: number for row, number in numbers.items() if number is not None}
        series = Series(np.array(list(numbers), np.int64), np.array(list(numbers.values()), float))
    # Grouping by keys has put records of different keys out of the order of the file.
    order = np.argsort(series.rows, kind="stable")
    return Series(series.rows[order], series.values[order])


def best_values(columns: Columns, modes: Mapping[str, str]) -> dict[str, tuple[float, int]]:
    """Metric -> its best finite value and the step of it; of equal values the newest.

    `modes` has the metrics, each with its mode, `min` or `max`.
    """
    best: dict[str, tuple[float, int]] = {}
    for name, mode in modes.items():
        series = columns.metrics.get(name)
        finite = np.flatnonzero(np.isfinite(series.values)) if series is not None else ()
        if series is not None and len(finite):
            # argmin and argmax return the first of equal values: reversed, that is the newest.
            newest_first = series.values[finite][::-1]
            index = int(np.argmin(newest_first) if mode == "min" else np.argmax(newest_first))
            row = finite[len(finite) - 1 - index]
            best[name] = float(series.values[row]), int(columns.step[series.rows[row]])
    return best
