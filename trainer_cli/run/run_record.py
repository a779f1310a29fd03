"""All that the files of a run tell about it, read once, for a report. Nothing is written, and torch is not imported."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.checkpoint.catalog import Entry
from trainer_cli.checkpoint.history import Life, lives
from trainer_cli.checkpoint.naming import MANIFEST_FILE
from trainer_cli.checkpoint.storage.url_path import is_url
from trainer_cli.config.fields import whole_values
from trainer_cli.errors import RunDirectoryError, TrainError
from trainer_cli.run.best import mode_of
from trainer_cli.run.curves import Columns, best_values, json_lines, read_columns
from trainer_cli.run.results import Row
from trainer_cli.run.run_dir import RunDir
from trainer_cli.run.run_view import RunReader, RunView
from trainer_cli.run.select import checkpoints_of, run_config

SWEEP_FILE = "sweep.csv"
_ROW_FACTS = ("checkpoint", "step", "loader", "time")


@dataclass(slots=True)
class SavedCheckpoint:
    """A checkpoint that was saved once, and what became of it."""

    life: Life
    on_disk: bool
    why_kept: str = ""


@dataclass(slots=True)
class RunRecord:
    """One run."""

    path: Path
    view: RunView
    """How it stands."""
    columns: Columns
    summary: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[SavedCheckpoint]
    validation: Sequence[Row]
    config: Mapping[str, str]
    """Dotted key -> value; a list is one text."""
    places: Mapping[str, str]
    """Where each was set; defaults are left out."""
    environment: Mapping[str, str]
    best: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Validation metric -> its best value and the step."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """Whether best is `min` or `max`, of the metrics of which it is known."""

    @property
    def keep_best(self) -> Mapping[str, str]:
        """The section `checkpoint.keep_best` of its config."""
        prefix = "checkpoint.keep_best."
        return {key.removeprefix(prefix): value for key, value in self.config.items() if key.startswith(prefix)}

    @property
    def began(self) -> float:
        """Unix seconds at which its first attempt, or its first record, began."""
        started = [at for attempt in self.attempts[:1] if (at := unix(attempt.get("started"))) is not None]
        return min([*started, *self.columns.time[:1]], default=0.0)


def read_run(path: Path, now: float) -> RunRecord | None:
    """All of a run; None if it has vanished.

    Raises:
        OSError: one of its files cannot be read.
    """
    view = RunReader(path).look(now)
    if view is None:
        return None
    run = RunDir(path)
    columns = read_columns(run.metrics_file)
    config = {".".join(keys): as_text(value) for keys, value in whole_values(run_config(path))}
    modes = _modes(columns.metrics, config)
    try:
        environment = run.read_environment()
    except RunDirectoryError:
        environment = {}
    summary = run.read_summary()
    return RunRecord(
        path,
        view,
        columns,
        summary,
        run.attempts,
        _checkpoints(run, summary),
        read_validation(run.validation_folder),
        config,
        run.read_provenance() or dict.fromkeys(_overridden(run, config), "command line"),
        {".".join(keys): as_text(value) for keys, value in whole_values(environment)},
        best_values(columns, modes),
        modes,
    )


def read_validation(folder: Path) -> list[Row]:
    """The rows of a `validation.jsonl`, of each checkpoint and loader the newest, by step.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        lines = json_lines((folder / "validation.jsonl").read_bytes())
    except FileNotFoundError:
        return []
    rows: dict[tuple[str, str], Row] = {}
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            loader, checkpoint = str(line["loader"]), str(line["checkpoint"])
            values = {key.removeprefix(f"{loader}/"): value for key, value in line.items() if key not in _ROW_FACTS}
            metrics = {key: float(value) for key, value in values.items()}
            rows[checkpoint, loader] = Row(checkpoint, int(line["step"]), loader, metrics)
    return sorted(rows.values(), key=lambda row: row.step)


class SweepJob(NamedTuple):
    """A row of a `sweep.csv`."""

    key: str
    swept: Mapping[str, str]
    run_dir: Path
    status: str
    reason: str


def read_sweep(folder: Path) -> list[SweepJob]:
    """The jobs of the sweep in a folder; none if there is none.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(folder / SWEEP_FILE, encoding="utf-8", errors="replace", newline="") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        return []
    jobs = []
    for row in rows:
        cells = {str(name): str(cell or "") for name, cell in row.items()}
        names = list(cells)
        if names[:1] == ["KEY"] and cells.get("run_dir") and "status" in cells:
            swept = {name: cells[name] for name in names[1 : names.index("status")] if cells[name]}
            # `run_dir` is relative to the folder in which the sweep was started.
            own = folder / cells["KEY"]
            run_dir = own if own.is_dir() else Path(cells["run_dir"])
            jobs.append(SweepJob(cells["KEY"], swept, run_dir, cells["status"], cells.get("reason", "")))
    return jobs


def as_text(value: Any) -> str:
    """A value of a config or of the environment on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def unix(text: Any) -> float | None:
    """The unix time of an ISO date; None if it is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """The last part of each dotted key, or the whole key where two have the same last part."""
    last = Counter(key.rpartition(".")[2] for key in set(keys))
    return {key: end if last[end := key.rpartition(".")[2]] == 1 else key for key in keys}


def _modes(metrics: Mapping[str, Any], config: Mapping[str, str]) -> dict[str, str]:
    """Whether the best of each validation metric is the smallest or the largest, where that is known."""
    best = config.get("checkpoint.keep_best.metric"), config.get("checkpoint.keep_best.mode")
    measured = [name for name in metrics if "/" in name and not name.startswith("train/")]
    return {name: mode.value for name in measured if (mode := mode_of(name, *best)) is not None}


def _overridden(run: RunDir, config: Mapping[str, str]) -> list[str]:
    """The keys that the overrides of the command line name."""
    try:
        text = run.overrides_file.read_text("utf-8", errors="replace")
    except OSError:
        return []
    named = [line.lstrip('- "+').partition("=")[0] for line in text.splitlines()]
    return [key for key in config if any(key == name or key.startswith(f"{name}.") for name in named)]


def _checkpoints(run: RunDir, summary: Mapping[str, Any]) -> list[SavedCheckpoint]:
    """All checkpoints that are on the disk or recorded, by their saves; an object store is not asked."""
    found = lives(_lines(run.history_file))
    kept = summary.get("checkpoints")
    whys = {str(one.get("name")): str(one.get("why")) for one in kept or () if isinstance(one, dict)}
    try:
        folder = checkpoints_of(run.path)
        is_remote = is_url(folder)
        entries = {} if is_remote else {one.name: one for one in run.catalog(folder).entries() if one.manifest}
    except (TrainError, OSError):
        return [SavedCheckpoint(life, False) for life in found]
    checkpoints = []
    for life in found:
        is_last = life.removed_at is None
        entry = entries.pop(life.name, None) if is_last else None
        if entry is not None:
            _complete(life, entry)
        why = whys.get(life.name, "") if entry is None or not entry.pinned else "pinned"
        checkpoints.append(SavedCheckpoint(life, entry is not None or (is_remote and is_last), why))
    for name, entry in entries.items():
        life = Life(name, saved_at=_modified(folder / name / MANIFEST_FILE))
        _complete(life, entry)
        checkpoints.append(SavedCheckpoint(life, True, "pinned" if entry.pinned else whys.get(name, "")))
    return sorted(checkpoints, key=lambda one: (one.life.saved_at or 0.0, one.life.step or 0))


def _complete(life: Life, entry: Entry) -> None:
    """What the manifest says counts."""
    assert entry.manifest is not None
    life.step, life.kind, life.reason = entry.step, entry.manifest.kind.value, entry.manifest.reason


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines()
    except FileNotFoundError:
        return []


def _modified(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
