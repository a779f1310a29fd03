"""How a run stands, read from its files again and again: each look reads only what is new.

All that the files of a run tell about it, read once, for a report. Nothing is written, and torch is not imported.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_cli.checkpoint.catalog import Entry
from trainer_cli.checkpoint.history import Life, lives
from trainer_cli.config.fields import whole_values
from trainer_cli.core.naming import MANIFEST_FILE, numbers_within, parse_step, step_within
from trainer_cli.core.url_path import is_url
from trainer_cli.errors import RunDirectoryError, TrainError
from trainer_cli.runs.find_runs import Listings, RunFinder
from trainer_cli.runs.metrics import GrowingFile, modes_of
from trainer_cli.runs.results import Row, read_validation
from trainer_cli.runs.run_dir import RunDir, RunStatus
from trainer_cli.runs.select import checkpoints_of, run_config

if TYPE_CHECKING:
    from trainer_cli.runs.curves import Columns

SWEEP_FILE = "sweep.csv"


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
    # Imported here: `train top` looks at runs without numpy.
    from trainer_cli.runs.curves import best_values, read_columns

    view = RunReader(path).look(now)
    if view is None:
        return None
    run = RunDir(path)
    columns = read_columns(run.metrics_file)
    config = {".".join(keys): as_text(value) for keys, value in whole_values(run_config(path))}
    modes = modes_of(
        columns.metrics, config.get("checkpoint.keep_best.metric"), config.get("checkpoint.keep_best.mode")
    )
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


STALE = "stale"
UNREADABLE = "unreadable"
STALE_S = 600.0
"""Without a sign of life for this long, and for ten intervals of its records, a running process is shown as stale."""
_STALE_INTERVALS = 10
_RECORDS = 64
"""Newest records from which the rate is computed."""
_LOSS = "train/loss"


@dataclass(frozen=True, slots=True)
class RunView:
    """How a run stands now. None: not known, or, for rate and remaining time, not running."""

    path: Path
    state: str
    """A `RunStatus`; `stale`: its process holds the lock, but writes nothing; `unreadable`."""
    reason: str = ""
    """Why it ended, or cannot be read."""
    step: int | None = None
    total_steps: int | None = None
    steps_per_s: float | None = None
    """Steps per second over the newest records, with evaluations and saves."""
    loss: float | None = None
    """The newest `train/loss`; it may be NaN or infinite."""
    eta_s: float | None = None
    checkpoint: str | None = None
    """The name of the newest checkpoint."""
    age_s: float | None = None
    """Seconds since one of its files was last written."""

    @property
    def is_running(self) -> bool:
        """Whether a process trains here."""
        return self.state in (RunStatus.running, STALE)


class RunsBelow:
    """All runs below a folder. Runs that appear are followed, and those that vanish are forgotten."""

    def __init__(self, root: Path) -> None:
        self._finder = RunFinder(root)
        self._readers: dict[Path, RunReader] = {}

    def look(self, now: float) -> list[RunView]:
        """The runs at unix time `now`: running ones by path, then the others, of which the newest come first."""
        found = self._finder.find()
        views = [RunView(one.path, UNREADABLE, one.unreadable) for one in found if one.unreadable is not None]
        listings, before = self._finder.listings, self._readers
        self._readers = {
            one.path: before.get(one.path) or RunReader(one.path, listings) for one in found if one.unreadable is None
        }
        views += [view for reader in self._readers.values() if (view := reader.look(now)) is not None]
        return sorted(views, key=_position)


def _position(view: RunView) -> tuple[bool, float, Path]:
    age_s = math.inf if view.age_s is None else view.age_s
    return not view.is_running, 0.0 if view.is_running else age_s, view.path


class _Point(NamedTuple):
    step: int
    time: float


class RunReader:
    """Follows one run. Nothing is written, and the files of the run are never kept open."""

    def __init__(self, path: Path, listings: Listings | None = None) -> None:
        self.run = RunDir(path)
        self._listings = listings or Listings()
        self._metrics = GrowingFile(self.run.metrics_file, _RECORDS)
        self._points: deque[_Point] = deque(maxlen=_RECORDS)
        self._loss: float | None = None
        self._summary: dict[str, Any] = {}
        self._summary_seen: tuple[int, int, int] | None = None
        self._checkpoints: tuple[int, Path | None] | None = None

    def look(self, now: float) -> RunView | None:
        """The run at unix time `now`; None if its directory is gone."""
        try:
            return self._look(now)
        except FileNotFoundError:
            return None
        except OSError as error:
            return RunView(self.run.path, UNREADABLE, error.strerror or "")

    def _look(self, now: float) -> RunView:
        # The lock comes first: what a process wrote before it let go is then read.
        locked = self.run.is_locked()
        os.stat(self.run.config_file)
        self._read_summary()
        self._read_metrics()
        attempt = self._attempt()
        alive = max(filter(None, map(_modified, self._written())), default=None)
        age_s = None if alive is None else max(0.0, now - alive)
        points = [point for point in self._points if point.time >= _unix(attempt.get("started"))]
        state, reason = self._state(locked, age_s, points)
        running = state in (RunStatus.running, STALE)
        step = _whole(self._summary.get("step"))
        if state in (RunStatus.running, STALE, RunStatus.killed) and points:
            step = points[-1].step
        total = _whole(self._summary.get("total_steps"))
        rate = _rate(points) if running else None
        eta_s = None
        if rate and step is not None and total is not None:
            eta_s = max(0.0, (total - step) / rate - (now - points[-1].time))
        return RunView(
            self.run.path,
            state,
            reason,
            step,
            total,
            rate,
            self._loss,
            eta_s,
            self._newest_checkpoint(),
            age_s,
        )

    def _state(self, locked: bool, age_s: float | None, points: list[_Point]) -> tuple[str, str]:
        if locked:
            interval = (points[-1].time - points[0].time) / (len(points) - 1) if len(points) > 1 else 0.0
            stale = age_s is not None and age_s > max(STALE_S, _STALE_INTERVALS * interval)
            return (STALE if stale else RunStatus.running), ""
        status = self._summary.get("status")
        if status in (None, RunStatus.running):
            if self.run.lock_file.exists():
                # Of a lock that cannot be opened it is not known whether it is held.
                self.run.lock_file.open("rb").close()
            return RunStatus.killed, "the process ended without a summary"
        return str(status), str(self._summary.get("reason") or "")

    def _written(self) -> tuple[Path, ...]:
        run = self.run
        return run.metrics_file, run.log_file, run.summary_file, run.checkpoints_folder

    def _attempt(self) -> dict[str, Any]:
        attempts = self._summary.get("attempts")
        newest = attempts[-1] if isinstance(attempts, list) and attempts else None
        return newest if isinstance(newest, dict) else {}

    def _read_summary(self) -> None:
        try:
            found = os.stat(self.run.summary_file)
        except FileNotFoundError:
            self._summary, self._summary_seen = {}, None
            return
        seen = found.st_ino, found.st_size, found.st_mtime_ns
        if self._summary_seen != seen:
            try:
                summary = json.loads(self.run.summary_file.read_bytes())
            except ValueError:
                summary = None
            self._summary, self._summary_seen = summary if isinstance(summary, dict) else {}, seen

    def _read_metrics(self) -> None:
        new = self._metrics.read()
        if new.restarted:
            self._points.clear()
            self._loss = None
        for line in new.lines:
            try:
                record = json.loads(line)
                self._points.append(_Point(int(record["step"]), float(record["time"])))
                if _LOSS in record:
                    self._loss = float(record[_LOSS])
            except (ValueError, TypeError, KeyError):
                continue  # Cut off by a power failure, or not written by this package.

    def _newest_checkpoint(self) -> str | None:
        folder = self._checkpoints_folder()
        if folder is None:
            return None
        try:
            names = self._listings.of(folder).folders
        except OSError:
            return None
        newest_first = sorted(names, key=_order, reverse=True)
        return next((name for name in newest_first if (folder / name / MANIFEST_FILE).is_file()), None)

    def _checkpoints_folder(self) -> Path | None:
        """By the config, which is read again only after it was replaced; of an object store the local copies."""
        changed_ns = os.stat(self.run.config_file).st_mtime_ns
        if self._checkpoints is None or self._checkpoints[0] != changed_ns:
            try:
                folder: Path | None = checkpoints_of(self.run.path)
            except TrainError:
                folder = None
            self._checkpoints = changed_ns, folder
        folder = self._checkpoints[1]
        return self.run.checkpoints_folder if folder is not None and is_url(folder) else folder


def _order(name: str) -> tuple[int, list[int], str]:
    step = parse_step(name)
    step = step_within(name) if step is None else step
    return -1 if step is None else step, numbers_within(name), name


def _rate(points: list[_Point]) -> float | None:
    """Steps per second; None for fewer than two records."""
    steps, seconds = (points[-1].step - points[0].step, points[-1].time - points[0].time) if points else (0, 0.0)
    return steps / seconds if steps > 0 and seconds > 0 else None


def _unix(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
