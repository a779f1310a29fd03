"""What `metrics.jsonl` of a run holds: its records as columns, the best value of each metric, and curves for a screen.

`best_rule` decides which checkpoint or run is best, for `RUN@best`, `train ckpt ls`, the tables of `train validate` and
of sweeps, and the report: by `checkpoint.keep_best` of the run, else by its validation loss. Of equal values the newer
is best. `GrowingFile` reads a file that another process appends to, each line once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer_cli.core.checkpoint_config import KeepBestConfig, Mode
from trainer_cli.core.policy import BestRule

_BLOCK_BYTES = 1 << 16
_MARK_BYTES = 256

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
    """Read a `metrics.jsonl`. Lines that are truncated or not this package's are left out; a missing file has none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return Columns()
    facts: list[tuple[int, float, float]] = []
    rows_by_keys: dict[tuple[str, ...], list[int]] = {}
    records: list[dict[str, Any]] = []
    for record in parse_json_lines(content):
        try:
            facts.append((int(record["step"]), float(record["epoch"]), float(record["time"])))
        except (ValueError, TypeError, KeyError):
            continue
        rows_by_keys.setdefault(tuple(record), []).append(len(records))
        records.append(record)
    rows: dict[str, list[int]] = {}
    values: dict[str, list[Any]] = {}
    # Grouped by keys, because one loop per record is much slower.
    for keys, same_keys in rows_by_keys.items():
        for key in keys:
            if key not in _FACTS:
                rows.setdefault(key, []).extend(same_keys)
                values.setdefault(key, []).extend([records[row][key] for row in same_keys])
    step, epoch, time = zip(*facts, strict=True) if facts else ((), (), ())
    metrics = {key: series for key in rows if len((series := _series(rows[key], values[key])).rows)}
    return Columns(np.array(step, np.int64), np.array(epoch, float), np.array(time, float), metrics)


def parse_json_lines(content: bytes) -> list[dict[str, Any]]:
    """Parse JSON lines. Lines that are truncated or hold no object are left out."""
    # Text after the last newline is truncated, or still being written.
    lines = [line for line in content[: content.rfind(b"\n") + 1].split(b"\n") if line.strip()]
    try:
        # One array is parsed much faster than line by line.
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = [_parse_json(line) for line in lines]
    return [value for value in values if isinstance(value, dict)]


def _parse_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _series(rows: Sequence[int], values: Sequence[Any]) -> Series:
    try:
        series = Series(np.array(rows, np.int64), np.array(values, float))
    except (ValueError, TypeError):
        # Some values are no numbers: convert one at a time and leave these out.
        numbers = {
            row: number for row, value in zip(rows, values, strict=True) if (number := _number(value)) is not None
        }
        series = Series(np.array(list(numbers), np.int64), np.array(list(numbers.values()), float))
    # Grouping by keys has put records of different keys out of the order of the file.
    order = np.argsort(series.rows, kind="stable")
    return Series(series.rows[order], series.values[order])


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (ValueError, TypeError):
        return None


MODES: Mapping[str, Mode] = {
    **dict.fromkeys(
        (
            "bce", "bits_per_byte", "bits_per_char", "bpb", "bpc", "bpd", "brier", "ce", "cer", "cross_entropy", "ece",
            "eer", "error", "error_rate", "fid", "kl", "kl_divergence", "log_loss", "loss", "lpips", "mae", "mape",
            "mse", "nll", "nrmse", "per", "perplexity", "ppl", "rmse", "smape", "ter", "wer",
        ),
        Mode.min,
    ),
    **dict.fromkeys(
        (
            "acc", "accuracy", "ap", "auc", "auprc", "auroc", "balanced_accuracy", "bleu", "bleurt", "chrf", "dice",
            "exact_match", "f1", "f1_score", "hit_rate", "iou", "kappa", "map", "mcc", "miou", "mrr", "ndcg",
            "pass_rate", "pearson", "precision", "psnr", "r2", "recall", "rouge", "rouge_l", "spearman", "ssim",
            "success_rate", "top1", "top1_accuracy", "top5", "top5_accuracy", "win_rate",
        ),
        Mode.max,
    ),
}  # fmt: skip
"""Whether the smallest or the largest value of a metric is best, by its name after the loader's. The mode of a metric
that is not listed comes from `checkpoint.keep_best`."""


def mode_of(metric: str, best_metric: str | None, best_mode: str | None) -> Mode | None:
    """Whether the smallest or the largest value of a metric is best; None if that is unknown.

    Args:
        metric: whole name, such as val/accuracy.
        best_metric, best_mode: `checkpoint.keep_best.metric` and its mode, which decide over the usual mode.
    """
    if metric == best_metric:
        return Mode.max if best_mode == Mode.max else Mode.min
    return MODES.get(metric.rpartition("/")[2].lower())


def best_rule(keep_best: Mapping[str, Any] | None, metrics: Iterable[str]) -> BestRule | None:
    """The rule that decides which checkpoint or run is best; None without a rule and without a validation loss.

    Args:
        keep_best: the section `checkpoint.keep_best` of the run's config.
        metrics: names of the measured metrics. If the section's metric is not among them, the loss decides.
    """
    names = set(metrics)
    metric = (keep_best or {}).get("metric")
    if isinstance(metric, str) and metric in names:
        return BestRule(metric, mode_of(metric, metric, (keep_best or {}).get("mode")) or Mode.min)
    losses = [name for name in names if name.endswith("/loss") and not name.startswith("train/")]
    return BestRule(min(losses)) if losses else None


def keep_best_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section `checkpoint.keep_best` of a run's config as written."""
    section = config.get("checkpoint")
    best = section.get("keep_best") if isinstance(section, Mapping) else None
    return best if isinstance(best, Mapping) else None


def shared_keep_best(sections: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """The section that all runs have in common; None where they differ."""
    first, *remaining = list(sections) or [None]
    return first if all(section == first for section in remaining) else None


def describe(rule: BestRule) -> str:
    """The rule as a note below a table."""
    return f"{'largest' if rule.mode is Mode.max else 'smallest'} {rule.metric}, of equal ones the newest"


def is_validation_metric(name: str) -> bool:
    """Whether a key of a record is a metric of an evaluation."""
    return "/" in name and not name.startswith("train/")


def modes_of(metrics: Iterable[str], best_metric: str | None, best_mode: str | None) -> dict[str, str]:
    """The mode, `min` or `max`, of each validation metric whose mode is known; arguments as of `mode_of`."""
    names = filter(is_validation_metric, metrics)
    return {name: mode.value for name in names if (mode := mode_of(name, best_metric, best_mode)) is not None}


def best_values(columns: Columns, modes: Mapping[str, str]) -> dict[str, tuple[float, int]]:
    """Best finite value and its step of each metric whose mode, `min` or `max`, is given; of equal ones the newest."""
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


def summarize_metrics(file: Path, keep_best: KeepBestConfig) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Best and newest value of each validation metric of a `metrics.jsonl`, as `summary.json` holds them.

    A best value has its step and its mode; a metric of unknown mode has none. A newest value may be NaN or infinite.

    Raises:
        OSError: the file cannot be read.
    """
    columns = read_columns(file)
    modes = modes_of(columns.metrics, keep_best.metric, keep_best.mode)
    best = {
        name: {"value": value, "step": step, "mode": modes[name]}
        for name, (value, step) in best_values(columns, modes).items()
    }
    newest = {name: float(series.values[-1]) for name, series in columns.metrics.items() if is_validation_metric(name)}
    return best, newest


class Lines(NamedTuple):
    """Complete lines, without their newlines."""

    lines: list[bytes]
    restarted: bool = False
    """Whether the file was truncated or replaced since the last call: these then are its last lines, read anew."""


class GrowingFile:
    """Reads the lines that were appended since the last call; the first call reads the last `most` lines.

    A line without its newline is returned once it is complete. A missing file has no lines. When a resume truncates or
    replaces the file, reading starts again with its last `most` lines.
    """

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._most = most
        self._seen: tuple[int, int, int] | None = None
        """Inode, size and time of modification at the last call."""
        self._offset = 0
        """End, in bytes, of the last line that was returned."""
        self._mark = b""
        """The bytes before `_offset`: if they differ, the file was truncated and has grown again."""

    def read(self) -> Lines:
        """The new lines.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            restarted, self._seen, self._offset, self._mark = self._seen is not None, None, 0, b""
            return Lines([], restarted)
        try:
            return self._new_lines(descriptor)
        finally:
            os.close(descriptor)

    def _new_lines(self, descriptor: int) -> Lines:
        status, before = os.fstat(descriptor), self._seen
        self._seen = status.st_ino, status.st_size, status.st_mtime_ns
        if self._seen == before:
            return Lines([])
        # A size that only grew proves nothing: compare the content before the offset.
        mark = os.pread(descriptor, len(self._mark), self._offset - len(self._mark))
        restarted = before is not None and (self._seen[0] != before[0] or mark != self._mark)
        from_last_lines = before is None or restarted
        if from_last_lines:
            self._offset, self._mark = _offset_of_last(descriptor, status.st_size, self._most), b""
        new = os.pread(descriptor, max(0, status.st_size - self._offset), self._offset)
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        self._mark = (self._mark + new)[-_MARK_BYTES:]
        lines = new.splitlines()
        return Lines(lines[max(0, len(lines) - self._most) :] if from_last_lines else lines, restarted)


def _offset_of_last(descriptor: int, size: int, count: int) -> int:
    """The offset of a line that at least `count` complete lines follow, or 0 if the file has fewer."""
    length = _BLOCK_BYTES
    while length < size:
        content = os.pread(descriptor, length, size - length)
        if content.count(b"\n") > count:
            return size - length + content.index(b"\n") + 1
        length *= 2
    return 0


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

    Both ends and the edges of what is not finite stay. A curve of at most two points per bucket stays whole. `x` must
    not decrease.
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
    not_finite = np.flatnonzero(~np.isfinite(y))
    # The first and last point of each stretch of NaN or infinity show where it is.
    edges = not_finite[(np.diff(not_finite, prepend=-2) > 1) | (np.diff(not_finite, append=count + 1) > 1)]
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
    """Seconds per step between consecutive records, at the row of the later one.

    Args:
        starts: unix times at which attempts started; no interval across one of them is counted.
    """
    rows, steps = np.arange(1, len(columns.step)), np.diff(columns.step)
    restarts = np.searchsorted(np.sort(np.array(starts, float)), columns.time, side="right")
    usable = (steps > 0) & (np.diff(restarts) == 0) & (np.diff(columns.time) >= 0)
    return Series(rows[usable], np.diff(columns.time)[usable] / steps[usable])


def pauses(
    columns: Columns, per_step: Series, *, most: int, factor: float = 3.0, at_least_s: float = 1.0
) -> list[Pause]:
    """The `most` longest pauses, longest first: over `factor` times the usual time, and `at_least_s` above it."""
    if not len(per_step.rows):
        return []
    usual = float(np.median(per_step.values))
    steps = columns.step[per_step.rows] - columns.step[per_step.rows - 1]
    seconds = per_step.values * steps
    slow = (per_step.values > factor * usual) & (seconds - usual * steps > at_least_s)
    found_pauses = [
        Pause(int(per_step.rows[index]), float(seconds[index]), float(usual * steps[index]))
        for index in np.flatnonzero(slow)
    ]
    return sorted(found_pauses, key=lambda pause: pause.usual_s - pause.seconds)[:most]


def by_last_part(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Group metrics by the name after the loader's, as `train/loss` and `val/loss`: the name, and its metrics."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[2] or name, []).append(name)
    yield from groups.items()
