"""Curves for a screen: few points that look like all, the seconds per step, and the longest pauses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer_cli.runs import Columns, Series

Array = np.ndarray[Any, Any]


class Reduced(NamedTuple):
    """A curve for a screen: the indices of the points that are drawn, and, if some are not, means to smooth."""

    indices: Array
    means: Means | None


class Means(NamedTuple):
    """For each bucket the index of its middle point, and the mean of its finite values."""

    indices: Array
    values: Array


def reduce(x: Array, y: Array, buckets: int) -> Reduced:
    """Reduce a curve to the smallest and the largest value in each of `buckets` equal parts of the x axis.

    Both ends stay, and of each stretch that is not finite its edges and a point for each part. A curve of at most two
    points per bucket stays whole. `x` must not decrease.
    """
    count = len(x)
    if count <= 2 * buckets:
        return Reduced(np.arange(count), None)
    width = (x[-1] - x[0]) / buckets or 1
    bucket = np.minimum(((x - x[0]) / width).astype(np.int64), buckets - 1)
    finite = np.flatnonzero(np.isfinite(y))
    not_finite = np.flatnonzero(~np.isfinite(y))
    # The first and last point of each stretch of NaN or infinity, and one of each bucket, show where it is.
    edges = not_finite[(np.diff(not_finite, prepend=-2) > 1) | (np.diff(not_finite, append=count + 1) > 1)]
    kept = np.concatenate([[0, count - 1], edges, not_finite[np.diff(bucket[not_finite], prepend=-1) > 0]])
    if not len(finite):
        return Reduced(np.unique(kept), None)
    # x does not decrease, so the points of a bucket are neighbours.
    values, bucket = y[finite], bucket[finite]
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    sizes = np.diff(np.append(starts, len(finite)))
    for extreme in (np.minimum, np.maximum):
        # Of equal values in a bucket the first one.
        equal = np.flatnonzero(values == np.repeat(extreme.reduceat(values, starts), sizes))
        kept = np.append(kept, finite[equal[np.diff(bucket[equal], prepend=-1) > 0]])
    means = np.add.reduceat(values, starts) / sizes
    return Reduced(np.unique(kept), Means(finite[starts + sizes // 2], means))


class SlowInterval(NamedTuple):
    """The time between two records that took much longer than usual."""

    row: int
    """Index of the record that ends it."""
    seconds: float
    usual_s: float
    """Seconds that as many steps usually take."""


def pace(columns: Columns, starts: Sequence[float]) -> Series:
    """Seconds per step between consecutive records, at the row of the later one.

    Args:
        starts: unix times at which attempts started; no interval across one of them is counted.
    """
    rows, steps = np.arange(1, len(columns.step)), np.diff(columns.step)
    restarts = np.searchsorted(np.sort(np.array(starts, float)), columns.time, side="right")
    usable = (steps > 0) & (np.diff(restarts) == 0) & (np.diff(columns.time) >= 0)
    return Series(rows[usable], np.diff(columns.time)[usable] / steps[usable])


def pauses(columns: Columns, per_step: Series, *, most: int) -> list[SlowInterval]:
    """The `most` longest pauses, longest first: over three times the usual time, and a second above it."""
    if not len(per_step.rows):
        return []
    usual = float(np.median(per_step.values))
    steps = columns.step[per_step.rows] - columns.step[per_step.rows - 1]
    seconds = per_step.values * steps
    slow = (per_step.values > 3 * usual) & (seconds - usual * steps > 1.0)
    found_pauses = [
        SlowInterval(int(per_step.rows[index]), float(seconds[index]), float(usual * steps[index]))
        for index in np.flatnonzero(slow)
    ]
    return sorted(found_pauses, key=lambda pause: pause.usual_s - pause.seconds)[:most]


def by_last_part(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Group metrics by the name after the loader's, as `train/loss` and `val/loss`: the name, and its metrics."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[2] or name, []).append(name)
    yield from groups.items()
