"""Where a log file stood when a checkpoint was saved, so that a resume reads only what was written since.

A mark lies before the records of the newest step: a resume at a pending evaluation writes these again, and more may be
logged at that step after the save. What precedes a mark is flushed before its checkpoint is committed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from trainer_cli.metric_names import TRAIN_PREFIX

_CHECKED_BYTES = 4096


def is_validation_metric(name: str) -> bool:
    """Whether a key of a record is a metric of an evaluation."""
    return "/" in name and not name.startswith(TRAIN_PREFIX)


def loader_of(metric: str, loaders: Iterable[str]) -> str:
    """The loader that a metric belongs to; if it belongs to none of them, the name before its first slash."""
    # The longest name that fits: one loader may be called `easy`, and another `easy/long`.
    names = (name for name in loaders if metric.startswith(f"{name}/"))
    return max(names, key=len, default=metric.partition("/")[0])


class MetricRange(NamedTuple):
    """The smallest and the largest finite value of a metric, each with its newest step, and the last value. None: no
    value was finite."""

    least: float | None
    least_step: int
    most: float | None
    most_step: int
    last: float

    def with_value(self, value: float, step: int) -> MetricRange:
        """The range with one more value."""
        least, least_step, most, most_step, _ = self
        if math.isfinite(value):
            if least is None or value <= least:
                least, least_step = value, step
            if most is None or value >= most:
                most, most_step = value, step
        return MetricRange(least, least_step, most, most_step, value)


_NO_VALUES = MetricRange(None, 0, None, 0, math.nan)


@dataclass(frozen=True, slots=True)
class Mark:
    """The first `size_bytes` of a log file, which hold whole records of `step` or earlier steps."""

    size_bytes: int = 0
    step: int = -1
    ranges: Mapping[str, MetricRange] = field(default_factory=dict)
    """The validation metrics of these records, in the order of their first appearance."""
    digest: str = ""
    """Digest of the last bytes before the mark; empty until it is saved."""

    @classmethod
    def parse(cls, state: Mapping[str, Any]) -> Mark | None:
        """Read what `state_dict` returns; None for the state of another version."""
        try:
            ranges = {str(name): MetricRange(*values) for name, values in state["ranges"].items()}
            return cls(int(state["size_bytes"]), int(state["step"]), ranges, str(state["digest"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def state_dict(self, path: Path) -> dict[str, Any]:
        """The mark with a digest of the bytes before it, for a checkpoint.

        Raises:
            OSError: the file cannot be read.
        """
        return {
            "size_bytes": self.size_bytes,
            "step": self.step,
            "ranges": {name: list(values) for name, values in self.ranges.items()},
            "digest": self.digest or _digest_before(path, self.size_bytes),
        }

    def fits(self, path: Path, step: int) -> bool:
        """Whether the file still begins with the marked bytes, and none of their records is later than `step`."""
        # A shorter file has fewer bytes before the mark, and so another digest.
        return self.step <= step and (self.size_bytes == 0 or self.digest == _digest_before(path, self.size_bytes))

    def after(self, size_bytes: int, step: int, metrics: Mapping[str, float]) -> Mark:
        """The mark after one more record of this size."""
        ranges = self.ranges
        measured = {name: value for name, value in metrics.items() if is_validation_metric(name)}
        if measured:
            # A new mapping: earlier marks keep theirs.
            ranges = dict(ranges)
            for name, value in measured.items():
                ranges[name] = ranges.get(name, _NO_VALUES).with_value(value, step)
        return Mark(self.size_bytes + size_bytes, max(self.step, step), ranges)


class LogEnd:
    """The end of a log file, and the mark before the records of its newest step.

    Args:
        mark: the beginning of the file, whose records are known.
    """

    def __init__(self, mark: Mark = Mark()) -> None:
        self.end = self.before_newest = mark

    def add(self, size_bytes: int, step: int, metrics: Mapping[str, float]) -> None:
        """Count one more record. If its step is not higher than all before, `before_newest` stays."""
        if step > self.end.step:
            self.before_newest = self.end
        self.end = self.end.after(size_bytes, step, metrics)


def _digest_before(path: Path, end: int) -> str:
    """Digest of the last bytes before byte `end`. Their times and values make them unlike those of any other log."""
    start = max(0, end - _CHECKED_BYTES)
    with open(path, "rb") as file:
        return xxhash.xxh3_128_hexdigest(os.pread(file.fileno(), end - start, start))
