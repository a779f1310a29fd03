"""The metrics of a run as columns, and curves reduced to the points that a screen can show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
_FACTS = ("step", "epoch", "time")


@dataclass(slots=True)
class Columns:
    """The records of `metrics.jsonl`; every array has one element for each record, in the order of the file."""

    step: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    epoch: Array = field(default_factory=lambda: np.zeros(0))
    time: Array = field(default_factory=lambda: np.zeros(0))
    """Unix seconds."""
    metrics: dict[str, Series] = field(default_factory=dict)


class Series(NamedTuple):
    """The values of one metric, which may be NaN or infinite, and the indices of the records that hold them."""

    rows: Array
    values: Array


def read_columns(file: Path) -> Columns:
    """Read a `metrics.jsonl`. Lines that are torn or not this package's are left out; a missing file has no records.

    Raises:
        OSError: it cannot be read.
    """
    try:
        records = json_lines(file.read_bytes())
    except FileNotFoundError:
        return Columns()
    facts: list[tuple[int, float, float]] = []
    alike: dict[tuple[str, ...], list[int]] = {}
    whole: list[dict[str, Any]] = []
    for record in records:
        try:
            facts.append((int(record["step"]), float(record["epoch"]), float(record["time"])))
        except (ValueError, TypeError, KeyError):
            continue
        alike.setdefault(tuple(record), []).append(len(whole))
        whole.append(record)
    rows: dict[str, list[int]] = {}
    values: dict[str, list[Any]] = {}
    # Records with the same keys together, which is much faster than one after the other.
    for keys, members in alike.items():
        for key in keys:
            if key not in _FACTS:
                rows.setdefault(key, []).extend(members)
                values.setdefault(key, []).extend([whole[row][key] for row in members])
    step, epoch, time = zip(*facts, strict=True) if facts else ((), (), ())
    metrics = {key: series for key in rows if len((series := _series(rows[key], values[key])).rows)}
    return Columns(np.array(step, np.int64), np.array(epoch, float), np.array(time, float), metrics)


def json_lines(content: bytes) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without lines that are torn or hold anything else."""
    # What follows the last line's end is torn, or still being written.
    lines = [line for line in content[: content.rfind(b"\n") + 1].split(b"\n") if line.strip()]
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")  # Much faster than line by line.
    except ValueError:
        found = [_loaded(line) for line in lines]
    return [one for one in found if isinstance(one, dict)]


def _loaded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _series(rows: Sequence[int], values: Sequence[Any]) -> Series:
    try:
        series = Series(np.array(rows, np.int64), np.array(values, float))
    except (ValueError, TypeError):
        found = {row: value for row, one in zip(rows, values, strict=True) if (value := _number(one)) is not None}
        series = Series(np.array(list(found), np.int64), np.array(list(found.values()), float))
    order = np.argsort(series.rows, kind="stable")
    return Series(series.rows[order], series.values[order])


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (ValueError, TypeError):
        return None


class Reduced(NamedTuple):
    """A curve for a screen: the indices of the points that are drawn, and, if some are not, means to smooth."""

    indices: Array
    means: Means | None


class Means(NamedTuple):
    """For each bucket the index of its middle point, and the mean of its finite values."""

    indices: Array
    values: Array


def reduce(x: Array, y: Array, buckets: int) -> Reduced:
    """The smallest and the largest value within each of so many equal parts of the x axis, and what is not finite.

    Both ends stay, and a curve of at most two points for each bucket stays whole. `x` must not fall.
    """
    count = len(x)
    if count <= 2 * buckets:
        return Reduced(np.arange(count), None)
    width = (x[-1] - x[0]) / buckets or 1
    bucket = np.minimum(((x - x[0]) / width).astype(np.int64), buckets - 1)
    finite = np.flatnonzero(np.isfinite(y))
    by_value = finite[np.lexsort((y[finite], bucket[finite]))]
    starts = np.flatnonzero(np.diff(bucket[by_value], prepend=-1))
    ends = np.append(starts[1:], len(by_value)) - 1
    others = np.flatnonzero(~np.isfinite(y))
    # Of a part of the curve that is not finite the first and the last point show where it is.
    edges = others[(np.diff(others, prepend=-2) > 1) | (np.diff(others, append=count + 1) > 1)]
    kept = np.unique(np.concatenate([[0, count - 1], by_value[starts], by_value[ends], edges]))
    if not len(finite):
        return Reduced(kept, None)
    first = np.flatnonzero(np.diff(bucket[finite], prepend=-1))
    sizes = np.diff(np.append(first, len(finite)))
    return Reduced(kept, Means(finite[first + sizes // 2], np.add.reduceat(y[finite], first) / sizes))


class Pause(NamedTuple):
    """The time between two records that took much longer than usual."""

    row: int
    """Index of the record that ends it."""
    seconds: float
    usual_s: float
    """Seconds that as many steps usually take."""


def pace(columns: Columns, starts: Sequence[float]) -> Series:
    """Seconds per step between records, each at the later one; not across one of the `starts` of attempts."""
    rows, steps = np.arange(1, len(columns.step)), np.diff(columns.step)
    restarts = np.searchsorted(np.sort(np.array(starts, float)), columns.time, side="right")
    usable = (steps > 0) & (np.diff(restarts) == 0) & (np.diff(columns.time) >= 0)
    return Series(rows[usable], np.diff(columns.time)[usable] / steps[usable])


def pauses(
    columns: Columns, per_step: Series, *, most: int, factor: float = 3.0, at_least_s: float = 1.0
) -> list[Pause]:
    """The longest pauses: more than `factor` times the usual, and by `at_least_s` longer; the longest first."""
    if not len(per_step.rows):
        return []
    usual = float(np.median(per_step.values))
    steps = columns.step[per_step.rows] - columns.step[per_step.rows - 1]
    seconds = per_step.values * steps
    slow = (per_step.values > factor * usual) & (seconds - usual * steps > at_least_s)
    found = [Pause(int(per_step.rows[at]), float(seconds[at]), float(usual * steps[at])) for at in np.flatnonzero(slow)]
    return sorted(found, key=lambda one: one.usual_s - one.seconds)[:most]


def by_last_part(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Metrics of one name, such as `train/loss` and `val/loss`, together: the name, and the metrics."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[2] or name, []).append(name)
    yield from groups.items()


def best_values(columns: Columns, modes: Mapping[str, str]) -> dict[str, tuple[float, int]]:
    """Best finite value and its step of each metric whose mode, `min` or `max`, is given; of equal ones the newest."""
    best: dict[str, tuple[float, int]] = {}
    for name, mode in modes.items():
        series = columns.metrics.get(name)
        finite = np.flatnonzero(np.isfinite(series.values)) if series is not None else ()
        if series is not None and len(finite):
            values = series.values[finite]
            newest_first = values[::-1]
            back = int(np.argmin(newest_first) if mode == "min" else np.argmax(newest_first))
            at = finite[len(values) - 1 - back]
            best[name] = float(series.values[at]), int(columns.step[series.rows[at]])
    return best
