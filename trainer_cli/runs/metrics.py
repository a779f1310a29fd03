"""What `metrics.jsonl` of a run holds: its lines, and which value of a metric is best. The arrays are in `runs/curves`.

`best_rule` decides which checkpoint or run is best, for `RUN@best`, `train ckpt ls`, the tables of `train validate` and
of sweeps, and the report: by `checkpoint.keep_best` of the run, else by the validation metric that a callback or a
schedule watches, else by a validation loss; unasked never by a test set. Of equal values the newer is best.
`GrowingFile` reads a file that another process appends to, each line once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.core.bounds import is_amount, is_count, is_time
from trainer_cli.core.files import FileIdentity, identify
from trainer_cli.core.metric_modes import Mode, usual_mode
from trainer_cli.core.policy import BestRule
from trainer_cli.loggers.marks import is_validation_metric

_BLOCK_BYTES = 1 << 16
_MARK_BYTES = 256


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a missing file has none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return []
    # Text after the last newline is truncated, or still being written.
    return parse_json_lines(content[: content.rfind(b"\n") + 1].split(b"\n"))


def parse_json_lines(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Parse JSON lines. Lines that are truncated by a crash or hold no record of this program are left out."""
    texts = [line for line in lines if line.strip()]
    try:
        # One array is parsed much faster than line by line.
        values = json.loads(b"[" + b",".join(texts) + b"]")
    except (ValueError, RecursionError):
        values = [_parse_json(text) for text in texts]
    return [value for value in values if _is_record(value)]


def _is_record(value: Any) -> bool:
    """Whether step, epoch and time of a record are, as far as it has them, what a run can reach."""
    return (
        isinstance(value, dict)
        and is_count(value.get("step", 0))
        and is_amount(value.get("epoch", 0))
        and is_time(value.get("time", 0))
    )


def _parse_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class BestSettings(NamedTuple):
    """What the config of a run says about which checkpoint is best."""

    metric: str | None = None
    mode: str | None = None
    """`checkpoint.keep_best.metric` and its mode."""
    watched: tuple[tuple[str, str | None], ...] = ()
    """Metrics of EarlyStopping, other callbacks and schedules, in this order, each with its mode."""
    at_the_end: tuple[str, ...] = ()
    """Validation sets that are evaluated only at the end."""

    def mode_of(self, metric: str) -> Mode | None:
        """Whether the smallest or the largest value of a metric is best: by the mode of what names it, else the usual
        one of its name; None if that is unknown."""
        stated = (mode for name, mode in self._named() if name == metric and mode in (Mode.min, Mode.max))
        return next(map(Mode, stated), None) or usual_mode(metric)

    def _named(self) -> Iterator[tuple[str | None, str | None]]:
        yield self.metric, self.mode
        yield from self.watched

    def decisive(self, metrics: Container[str]) -> BestRule | None:
        """The rule of the first of these metrics that `keep_best`, a callback or a schedule names."""
        if self.metric is not None and self.metric in metrics:
            return BestRule(self.metric, self.mode_of(self.metric) or Mode.min)
        for name, _ in self.watched:
            mode = self.mode_of(name)
            if name in metrics and mode is not None and is_validation_metric(name) and self.may_decide(name):
                return BestRule(name, mode)
        return None

    def may_decide(self, metric: str) -> bool:
        """Whether a metric may decide unasked: not one of a test set, by the name of the set or its interval, which is
        for the checkpoint that was chosen."""
        name = metric.rpartition("/")[0]
        return not _TEST.search(name) and name not in self.at_the_end


_TEST = re.compile(r"(?<![a-z])test|Test")


def best_rule(settings: BestSettings, metrics: Iterable[str]) -> BestRule | None:
    """The rule that decides which checkpoint or run is best; None without a rule and without a validation loss.

    Args:
        settings: of the run's config.
        metrics: names of the measured metrics. If none that the config names is among them, a validation loss decides:
            of the set of a metric that the run watches, else of `val`, else of the first one that is no test set.
    """
    names = set(metrics)
    if (rule := settings.decisive(names)) is not None:
        return rule
    losses = [name for name in names if name.endswith("/loss") and is_validation_metric(name)]
    watched = {metric.rpartition("/")[0] for metric in (settings.metric or "", *(name for name, _ in settings.watched))}
    candidates = sorted(
        filter(settings.may_decide, losses),
        key=lambda name: (name.removesuffix("/loss") not in watched, name != "val/loss", name),
    )
    return BestRule(candidates[0]) if candidates else None


def best_settings(config: Mapping[str, Any]) -> BestSettings:
    """What a run's config, as written, says about which checkpoint is best."""
    section = _section(_section(config, "checkpoint"), "keep_best")
    scheduler = _section(config, "scheduler")
    callbacks = [node for node in _section(config, "callbacks").values() if isinstance(node, Mapping)]
    # The sort is stable.
    callbacks.sort(key=lambda node: not str(node.get("_target_")).endswith("EarlyStopping"))
    nodes = [*callbacks, scheduler, *(node for node in scheduler.values() if isinstance(node, Mapping))]
    loaders = _section(_section(config, "loop"), "eval_loaders")
    return BestSettings(
        _text(section.get("metric")),
        _text(section.get("mode")),
        tuple((node["metric"], _text(node.get("mode"))) for node in nodes if isinstance(node.get("metric"), str)),
        tuple(str(name) for name in loaders if _section(loaders, name).get("interval", "") is None),
    )


def _section(config: Mapping[Any, Any], key: Any) -> Mapping[Any, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str) else None


def shared_settings(all_settings: Iterable[BestSettings]) -> BestSettings:
    """The settings that all runs have in common; those of an empty config where they differ."""
    first, *remaining = list(all_settings) or [BestSettings()]
    return first if all(settings == first for settings in remaining) else BestSettings()


def describe(rule: BestRule) -> str:
    """The rule as a note below a table."""
    return f"{'largest' if rule.mode is Mode.max else 'smallest'} {rule.metric}, of equal ones the newest"


def modes_of(metrics: Iterable[str], settings: BestSettings) -> dict[str, str]:
    """The mode, `min` or `max`, of each validation metric whose mode is known."""
    names = filter(is_validation_metric, metrics)
    return {name: mode.value for name in names if (mode := settings.mode_of(name)) is not None}


class Lines(NamedTuple):
    """Complete lines, without their newlines."""

    lines: list[bytes]
    restarted: bool = False
    """Whether the file was truncated or replaced since the last call: these then are its last lines, read anew."""


class GrowingFile:
    """Reads the lines that were appended since the last call; the first call reads the last `most` lines, or all.

    A line without its newline is returned once it is complete. A missing file has no lines. When a resume truncates or
    replaces the file, reading starts again with its last `most` lines.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self._path = path
        self._most = most
        self._seen: FileIdentity | None = None
        """The file at the last call."""
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
            # Not os.open: that opens a directory too, and reading it then raises an error without its name.
            file = open(self._path, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            restarted, self._seen, self._offset, self._mark = self._seen is not None, None, 0, b""
            return Lines([], restarted)
        with file:
            return self._new_lines(file.fileno())

    def _new_lines(self, descriptor: int) -> Lines:
        status, before = os.fstat(descriptor), self._seen
        self._seen = identify(status)
        if self._seen == before:
            return Lines([])
        # A size that only grew proves nothing: compare the content before the offset.
        mark = os.pread(descriptor, len(self._mark), self._offset - len(self._mark))
        restarted = before is not None and (self._seen[0] != before[0] or mark != self._mark)
        from_last_lines = before is None or restarted
        if from_last_lines:
            start = 0 if self._most is None else _offset_of_last(descriptor, status.st_size, self._most)
            self._offset, self._mark = start, b""
        new = os.pread(descriptor, max(0, status.st_size - self._offset), self._offset)
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        self._mark = (self._mark + new)[-_MARK_BYTES:]
        lines = new.splitlines()
        if from_last_lines and self._most is not None:
            lines = lines[max(0, len(lines) - self._most) :]
        return Lines(lines, restarted)


def _offset_of_last(descriptor: int, size: int, count: int) -> int:
    """The offset of a line that at least `count` complete lines follow, or 0 if the file has fewer."""
    # From the end, because a file of a long run has many more lines than are shown.
    length = _BLOCK_BYTES
    while length < size:
        content = os.pread(descriptor, length, size - length)
        if content.count(b"\n") > count:
            return size - length + content.index(b"\n") + 1
        length *= 2
    return 0


def read_last_record(file: Path) -> dict[str, Any] | None:
    """The last line of a file of JSON lines; None if it is missing, empty or holds no object there."""
    return next(iter(parse_json_lines(GrowingFile(file, 1).read().lines)), None)
