"""Read a run from its files: everything once, for a report, or its state repeatedly, for `train top` and `train tail`.

Nothing is written, and torch is not imported.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_cli.checkpoint.catalog import Entry
from trainer_cli.checkpoint.history import Life, Spent, last_spent, lives
from trainer_cli.config.fields import whole_values
from trainer_cli.core.files import FileIdentity, identify
from trainer_cli.core.goodput import compute_goodput
from trainer_cli.core.json_lines import GrowingFile, read_rows
from trainer_cli.core.naming import MANIFEST_FILE, numbers_within, parse_step, step_within
from trainer_cli.core.run_status import RunStatus
from trainer_cli.core.url_path import is_url
from trainer_cli.errors import RunDirectoryError, TrainError
from trainer_cli.loggers.marks import is_validation_metric
from trainer_cli.runs.damage import collecting, damaged_files, explain, unread_lines
from trainer_cli.runs.environment import unix
from trainer_cli.runs.find_runs import Listings, RunFinder
from trainer_cli.runs.folders import checkpoints_of, run_config
from trainer_cli.runs.metrics import (
    BestSettings,
    best_rule,
    best_settings,
    modes_of,
    shared_settings,
)
from trainer_cli.runs.results import Row, read_validation
from trainer_cli.runs.run_dir import RunDir, attempts_of, sound_summary
from trainer_cli.runs.spent_time import sum_until

if TYPE_CHECKING:
    from trainer_cli.runs.curves import Columns, GrowingColumns

SWEEP_FILE = "sweep.csv"


@dataclass(slots=True)
class SavedCheckpoint:
    """A checkpoint of the history, and whether it still exists."""

    life: Life
    on_disk: bool
    why_kept: str = ""


@dataclass(slots=True)
class RunRecord:
    """Everything that the files of one run hold."""

    path: Path
    view: RunView
    """Its state now."""
    columns: Columns
    machine: Columns
    """Use of the machine, by the clock: a resume makes its steps begin again."""
    summary: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[SavedCheckpoint]
    validation: Sequence[Row]
    config: Mapping[str, str]
    """Dotted key -> value; a list is one text."""
    places: Mapping[str, str]
    """Where each value was set, by dotted key; defaults are left out."""
    environment: Mapping[str, str]
    settings: BestSettings
    """What its config says about which checkpoint is best."""
    best: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Validation metric -> (best value, its step)."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """Validation metric -> `min` or `max`, if it is known which is best."""
    notes: str = ""
    """Its notes.md."""
    problems: Sequence[str] = ()
    """What of its files cannot be read, and why."""

    @property
    def began(self) -> float:
        """Unix seconds at which its first attempt, or its first record, began."""
        started = [time for attempt in self.attempts[:1] if (time := unix(attempt.get("started"))) is not None]
        return min([*started, *self.columns.time[:1]], default=0.0)


def rank_metrics(records: Sequence[RunRecord]) -> list[str]:
    """The metrics of which a run has a best value; the one that decides which run is best comes first."""
    metrics = list(dict.fromkeys(name for record in records for name in record.best))
    settings = shared_settings(record.settings for record in records)
    rule = best_rule(settings, metrics)
    # Those of test sets last, where no loss decides.
    return sorted(metrics, key=lambda name: (rule is None or name != rule.metric, not settings.may_decide(name)))


def read_run(
    path: Path, now: float, records: GrowingColumns | None = None, machine_records: GrowingColumns | None = None
) -> RunRecord | None:
    """Read everything of a run that can be read; None if its directory has vanished.

    Args:
        records, machine_records: readers of its records and of those of its machine, which have read some already.
    """
    # Imported here: `train top` looks at runs without numpy.
    from trainer_cli.runs.curves import Columns, GrowingColumns, best_values

    # First: if the run has ended at that time, all that is read below is complete.
    view = RunReader(path).look(now)
    if view is None:
        return None
    run = RunDir(path)
    problems = [view.reason] if view.state == UNREADABLE else []
    problems += damaged_files(run)
    columns, machine, history, validation = Columns(), Columns(), list[dict[str, Any]](), list[Row]()
    with collecting(problems, path):
        columns = (records or GrowingColumns(run.metrics_file)).read()
    with collecting(problems, path):
        machine = (machine_records or GrowingColumns(run.system_file)).read()
    for file, lines in ((run.metrics_file, columns.unread), (run.system_file, machine.unread)):
        problems += unread_lines(file, lines)
    config = read_config(path)
    settings = best_settings(run_config(path))
    modes = modes_of(columns.metrics, settings)
    try:
        environment = run.read_environment()
    except RunDirectoryError:
        environment = {}
    summary = run.read_summary()
    with collecting(problems, path):
        history = read_rows(run.history_file)
    with collecting(problems, path):
        validation = read_validation(run.validation_folder)
    return RunRecord(
        path,
        view,
        columns,
        machine,
        summary,
        run.attempts,
        _checkpoints(run, summary, lives(history)),
        validation,
        config,
        run.read_provenance() or dict.fromkeys(_overridden(run, config), "command line"),
        {".".join(keys): as_text(value) for keys, value in whole_values(environment)},
        settings,
        best_values(columns, modes),
        modes,
        read_notes(run),
        list(dict.fromkeys(problems)),
    )


def unreadable_run(path: Path, why: str) -> RunRecord:
    """The record of a directory that may be a run, but cannot be listed."""
    from trainer_cli.runs.curves import Columns

    view = RunView(path, UNREADABLE, why)
    return RunRecord(path, view, Columns(), Columns(), {}, [], [], [], {}, {}, {}, BestSettings(), problems=[why])


def read_config(path: Path) -> dict[str, str]:
    """The stored config of a run: dotted key -> value, a list as one text. Empty if it cannot be read."""
    return {".".join(keys): as_text(value) for keys, value in whole_values(run_config(path))}


_NOTES_BYTES = 1 << 16


def read_notes(run: RunDir) -> str:
    """What is written in the run's notes.md, up to 64 KiB; empty without it."""
    with suppress(OSError), open(run.notes_file, "rb") as file:
        return file.read(_NOTES_BYTES).decode("utf-8", "replace").replace("\0", "").strip()
    return ""


class SweepJob(NamedTuple):
    """A row of a `sweep.csv`."""

    key: str
    swept: Mapping[str, str]
    run_dir: Path
    status: str
    reason: str


def read_sweep(folder: Path) -> list[SweepJob]:
    """Read the jobs of the sweep in a folder; empty if it holds no sweep.

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
            # `run_dir` is relative to the folder in which the sweep was started, which may be another one now.
            job_folder = folder / cells["KEY"]
            run_dir = job_folder if job_folder.is_dir() else Path(cells["run_dir"])
            jobs.append(SweepJob(cells["KEY"], swept, run_dir, cells["status"], cells.get("reason", "")))
    return jobs


def as_text(value: Any) -> str:
    """A value of a config or of the environment on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """The last part of each dotted key, or the whole key where two have the same last part.

    A class is called as its component: `optimizer._target_` becomes `optimizer`.
    """
    ends = {key: key.removesuffix("._target_").rpartition(".")[2] for key in keys}
    counts = Counter(ends.values())
    return {key: end if counts[end] == 1 else key for key, end in ends.items()}


def _overridden(run: RunDir, config: Mapping[str, str]) -> list[str]:
    """The keys that the overrides of the command line name."""
    try:
        text = run.overrides_file.read_text("utf-8", errors="replace")
    except OSError:
        return []
    named = [line.lstrip('- "+').partition("=")[0] for line in text.splitlines()]
    return [key for key in config if any(key == name or key.startswith(f"{name}.") for name in named)]


def _checkpoints(run: RunDir, summary: Mapping[str, Any], history: Sequence[Life]) -> list[SavedCheckpoint]:
    """All checkpoints on the disk or in the history, in order of their saves.

    An object store is not listed: there, and where the folder is unknown or cannot be read, the history decides.
    """
    kept = summary.get("checkpoints") or ()
    reasons = {str(item.get("name")): str(item.get("why")) for item in kept if isinstance(item, dict)}
    try:
        folder = checkpoints_of(run.path)
        is_listed = not is_url(folder)
        entries = {entry.name: entry for entry in run.catalog(folder).entries() if entry.manifest} if is_listed else {}
    except (TrainError, OSError):
        is_listed, entries = False, {}
    checkpoints = []
    for life in history:
        # A name may be saved again after a removal: the checkpoint on the disk is the one not removed since.
        is_last = life.removed_at is None
        entry = entries.pop(life.name, None) if is_last else None
        if entry is not None:
            _complete(life, entry)
        why = reasons.get(life.name, "") if entry is None or not entry.pinned else "pinned"
        checkpoints.append(SavedCheckpoint(life, entry is not None or (is_last and not is_listed), why))
    for name, entry in entries.items():
        life = Life(name, saved_at=_modified(folder / name / MANIFEST_FILE))
        _complete(life, entry)
        checkpoints.append(SavedCheckpoint(life, True, "pinned" if entry.pinned else reasons.get(name, "")))
    return sorted(checkpoints, key=lambda saved: (saved.life.saved_at or 0.0, saved.life.step or 0))


def _complete(life: Life, entry: Entry) -> None:
    """Take step, kind and reason from the manifest, which decides over the history."""
    assert entry.manifest is not None
    life.step, life.kind, life.reason = entry.step, entry.manifest.kind.value, entry.manifest.reason


def _modified(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


STALE = "stale"
UNREADABLE = "unreadable"
STALE_S = 600.0
"""A running process that writes nothing for this long, and for ten intervals of its records, is shown as stale."""
_STALE_INTERVALS = 10
_RECORDS = 64
"""Newest records from which the rate is computed."""
_SAVES = 64
"""Newest lines of its history that are searched for a save of the present attempt."""
_LOSS = "train/loss"


@dataclass(frozen=True, slots=True)
class RunView:
    """The state of a run now. None: unknown, or, for rate and remaining time, not running."""

    path: Path
    state: str
    """A `RunStatus`, `stale` (the process holds the lock, but writes nothing) or `unreadable`."""
    reason: str = ""
    """Why it ended, or cannot be read."""
    step: int | None = None
    total_steps: int | None = None
    steps_per_s: float | None = None
    """Steps per second over the newest records, with evaluations and saves."""
    loss: float | None = None
    """The newest `train/loss`; it may be NaN or infinite."""
    metric: str = ""
    """The validation metric that decides which checkpoint is best."""
    value: float | None = None
    """Its newest value; it may be NaN or infinite."""
    eta_s: float | None = None
    checkpoint: str | None = None
    """The name of the newest checkpoint."""
    age_s: float | None = None
    """Seconds since one of its files was last written."""
    goodput: float | None = None
    """Share of kept training in all time of the run; until its newest save if it has not ended."""
    problem: str = ""
    """What of its newest records cannot be read."""

    @property
    def is_running(self) -> bool:
        """Whether a process trains this run."""
        return self.state in (RunStatus.running, STALE)

    @property
    def position(self) -> tuple[bool, float, Path]:
        """By which runs are sorted: running ones by path, then ended ones, the newest first."""
        age_s = math.inf if self.age_s is None else self.age_s
        return not self.is_running, 0.0 if self.is_running else age_s, self.path


class RunsBelow:
    """Follows all runs below a folder, also those that appear later."""

    def __init__(self, root: Path) -> None:
        self._finder = RunFinder(root)
        self._readers: dict[Path, RunReader] = {}

    def look(self, now: float) -> list[RunView]:
        """The runs at unix time `now`, in the order of their positions."""
        views: list[RunView] = []
        readers: dict[Path, RunReader] = {}
        for path, unreadable in self._finder.find():
            if unreadable is not None:
                views.append(RunView(path, UNREADABLE, unreadable))
            else:
                readers[path] = self._readers.get(path) or RunReader(path, self._finder.listings)
        # Replaced, so that readers of runs that have vanished are dropped.
        self._readers = readers
        views += [view for reader in self._readers.values() if (view := reader.look(now)) is not None]
        return sorted(views, key=lambda view: view.position)


class _Point(NamedTuple):
    step: int
    time: float


class RunReader:
    """Follows one run: each look reads only what is new. No file of the run is kept open."""

    def __init__(self, path: Path, listings: Listings | None = None) -> None:
        self.run = RunDir(path)
        self._listings = listings or Listings()
        self._metrics = GrowingFile(self.run.metrics_file, _RECORDS)
        self._history = GrowingFile(self.run.history_file, _SAVES)
        self._spent: tuple[float, Spent] | None = None
        """When the newest attempt began, and what its newest save has noted."""
        self._points: deque[_Point] = deque(maxlen=_RECORDS)
        self._loss: float | None = None
        self._measured: dict[str, float] = {}
        """The newest value of each validation metric."""
        self._summary: dict[str, Any] = {}
        self._summary_seen: FileIdentity | None = None
        self._checkpoints: tuple[int, Path | None, BestSettings] | None = None

    @property
    def summary(self) -> Mapping[str, Any]:
        """The contents of summary.json at the last look."""
        return self._summary

    def look(self, now: float) -> RunView | None:
        """The run at unix time `now`; None if its directory is gone."""
        try:
            return self._look(now)
        except FileNotFoundError:
            return None
        except OSError as error:
            return RunView(self.run.path, UNREADABLE, explain(error, self.run.path))

    def _look(self, now: float) -> RunView:
        # The lock is read first: if it is free, everything that its process wrote is read below.
        locked = self.run.is_locked()
        # Raises FileNotFoundError if the run is gone: other missing files only mean that nothing was written yet.
        os.stat(self.run.config_file)
        self._read_summary()
        self._read_metrics()
        attempt = self._attempt()
        last_write = max(filter(None, map(_modified, self._written_paths())), default=None)
        age_s = None if last_write is None else max(0.0, now - last_write)
        started = unix(attempt.get("started")) or 0.0
        # A resume begins at an earlier step: a rate across attempts would be wrong.
        points = [point for point in self._points if point.time >= started]
        state, reason = self._state(locked, age_s, points)
        running = state in (RunStatus.running, STALE)
        step = _whole(self._summary.get("step"))
        # The summary of a run that has not ended knows only the step at which the attempt began.
        if state in (RunStatus.running, STALE, RunStatus.killed) and points:
            step = points[-1].step
        total = _whole(self._summary.get("total_steps"))
        rate = _rate(points) if running else None
        eta_s = None
        if rate and step is not None and total is not None:
            eta_s = max(0.0, (total - step) / rate - (now - points[-1].time))
        checkpoint = self._newest_checkpoint()
        metric, value = self._validation()
        return RunView(
            self.run.path,
            state,
            reason,
            step,
            total,
            rate,
            self._loss,
            metric,
            value,
            eta_s,
            checkpoint,
            age_s,
            self._goodput(state, started, points),
            "".join(unread_lines(self.run.metrics_file, self._metrics.unread)),
        )

    def _goodput(self, state: str, started: float, points: list[_Point]) -> float | None:
        """The goodput in the summary; of an attempt that has not ended until its newest save, and of one that was
        killed until its newest record."""
        new = last_spent(self._history.read_rows().rows, started)
        self._spent = (started, new) if new is not None else self._spent
        if state not in (RunStatus.running, STALE, RunStatus.killed):
            goodput = self._summary.get("goodput")
            return goodput if isinstance(goodput, float) else None
        if self._spent is None or self._spent[0] != started:
            return None
        spent = self._spent[1]
        lasted_s = points[-1].time - started if points and state == RunStatus.killed else 0.0
        return compute_goodput(sum_until(attempts_of(self._summary)[:-1], spent, lasted_s))

    def _state(self, locked: bool, age_s: float | None, points: list[_Point]) -> tuple[str, str]:
        if locked:
            # Slow runs write seldom: ten of their own intervals, not a fixed time, are too long.
            interval = (points[-1].time - points[0].time) / (len(points) - 1) if len(points) > 1 else 0.0
            stale = age_s is not None and age_s > max(STALE_S, _STALE_INTERVALS * interval)
            return (STALE if stale else RunStatus.running), ""
        status = self._summary.get("status")
        if status in (None, RunStatus.running):
            if self.run.lock_file.exists():
                # Raises an OSError if it cannot be opened: then it is unknown whether the lock is held.
                self.run.lock_file.open("rb").close()
            return RunStatus.killed, "the process ended without a summary"
        return str(status), str(self._summary.get("reason") or "")

    def _written_paths(self) -> tuple[Path, ...]:
        run = self.run
        return run.metrics_file, run.log_file, run.summary_file, run.checkpoints_folder

    def _attempt(self) -> dict[str, Any]:
        attempts = attempts_of(self._summary)
        return attempts[-1] if attempts else {}

    def _read_summary(self) -> None:
        try:
            seen = identify(os.stat(self.run.summary_file))
        except FileNotFoundError:
            self._summary, self._summary_seen = {}, None
            return
        # Parsed only after a change: a table of hundreds of runs is drawn every two seconds.
        if self._summary_seen != seen:
            try:
                summary = json.loads(self.run.summary_file.read_bytes())
            except (ValueError, RecursionError):
                summary = None
            self._summary, self._summary_seen = sound_summary(summary), seen

    def _read_metrics(self) -> None:
        new = self._metrics.read_rows("step", "time")
        # A resume has dropped records that are counted here.
        if new.restarted:
            self._points.clear()
            self._loss = None
            self._measured.clear()
        for record in new.rows:
            self._points.append(_Point(record["step"], record["time"]))
            with suppress(ValueError, TypeError, OverflowError):
                if _LOSS in record:
                    self._loss = float(record[_LOSS])
                self._measured.update({key: float(record[key]) for key in record if is_validation_metric(key)})

    def _validation(self) -> tuple[str, float | None]:
        """The metric that decides which checkpoint is best, and its newest value; of a run that ended before it was
        read, from its summary."""
        last = self._summary.get("last_metrics")
        measured = {**(last if isinstance(last, dict) else {}), **self._measured}
        settings = BestSettings() if self._checkpoints is None else self._checkpoints[2]
        rule = best_rule(settings, measured)
        value = None if rule is None else measured[rule.metric]
        return ("", None) if rule is None or not isinstance(value, int | float) else (rule.metric, float(value))

    def _newest_checkpoint(self) -> str | None:
        folder = self._checkpoints_folder()
        if folder is None:
            return None
        try:
            names = self._listings.of(folder).folders
        except OSError:
            return None
        # By name, not by manifest: hundreds of manifests per look would be too slow.
        newest_first = sorted(names, key=_order, reverse=True)
        return next((name for name in newest_first if (folder / name / MANIFEST_FILE).is_file()), None)

    def _checkpoints_folder(self) -> Path | None:
        """The folder that the config names; for an object store that of the local copies."""
        # The config is parsed again only after a change.
        changed_ns = os.stat(self.run.config_file).st_mtime_ns
        if self._checkpoints is None or self._checkpoints[0] != changed_ns:
            try:
                folder: Path | None = checkpoints_of(self.run.path)
            except TrainError:
                folder = None
            self._checkpoints = changed_ns, folder, best_settings(run_config(self.run.path))
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


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
