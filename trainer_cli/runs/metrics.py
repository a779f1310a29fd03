"""The metrics of a run as columns, and curves reduced to the points that a screen can show.

Read a text file that another process appends to, without reading any line twice.

Which checkpoint, run or value is best: by `checkpoint.keep_best` of the run, else by its validation loss.

Every mark and rank of the commands follows `best_rule`: `RUN@best`, `train ckpt ls`, the tables of `train validate` and
of sweeps, and the report. Of equal values the newer is best.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer_cli.core.policy import BestRule
from trainer_cli.core.schema import Mode

_BLOCK_BYTES = 1 << 16
_MARK_BYTES = 256


class Lines(NamedTuple):
    """Complete lines, without their ends."""

    lines: list[bytes]
    restarted: bool = False
    """Whether the file was cut back or replaced since the last call: these lines then are its last ones again."""


class GrowingFile:
    """Returns at each call the lines that came since the last one; the first call returns the last `most` lines.

    A line without its end is returned once it is complete. A file that is missing has no lines. When a resume cuts
    the file back, or replaces it, reading starts again with its last `most` lines.
    """

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._most = most
        self._seen: tuple[int, int, int] | None = None
        """Inode, size and time of change at the last call."""
        self._offset = 0
        """Bytes up to the end of the last line that was returned."""
        self._mark = b""
        """The bytes before `_offset`: if they differ, the file was cut back and has grown again."""

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
        found, before = os.fstat(descriptor), self._seen
        self._seen = found.st_ino, found.st_size, found.st_mtime_ns
        if self._seen == before:
            return Lines([])
        marked = os.pread(descriptor, len(self._mark), self._offset - len(self._mark))
        restarted = before is not None and (self._seen[0] != before[0] or marked != self._mark)
        begins = before is None or restarted
        if begins:
            self._offset, self._mark = _begin_of_last(descriptor, found.st_size, self._most), b""
        new = os.pread(descriptor, max(0, found.st_size - self._offset), self._offset)
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        self._mark = (self._mark + new)[-_MARK_BYTES:]
        lines = new.splitlines()
        return Lines(lines[max(0, len(lines) - self._most) :] if begins else lines, restarted)


def _begin_of_last(descriptor: int, size: int, lines: int) -> int:
    """An offset at which a line begins, with at least so many complete lines after it, if the file has them."""
    length = _BLOCK_BYTES
    while length < size:
        content = os.pread(descriptor, length, size - length)
        if content.count(b"\n") > lines:
            return size - length + content.index(b"\n") + 1
        length *= 2
    return 0


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
"""Whether the smallest or the largest value of a metric is its best, by the whole name after the loader's. Of a metric
that is not listed, `checkpoint.keep_best` gives the mode."""


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
    """The rule by which the best of a run is chosen; None if it has neither a rule nor a validation loss.

    Args:
        keep_best: the section `checkpoint.keep_best` of the run's config.
        metrics: names of the metrics that there are. If the section's is not among them, the loss decides.
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
    """The section that several runs have; None where they differ."""
    different = list(sections)
    return different[0] if different and all(section == different[0] for section in different) else None


def describe(rule: BestRule) -> str:
    """The rule as a note below a table."""
    return f"{'largest' if rule.mode is Mode.max else 'smallest'} {rule.metric}, of equal ones the newest"


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
