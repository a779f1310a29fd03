"""A run, read from its files.

`look` tells its state now, for `train top`, `tail`, `serve` and sweeps; `record` everything that it did, for
`train report` and `serve`. Its attempts and the checkpoints that they continued from are for what makes steps again.

    RUN               the whole run
    RUN@attempt2      the run as it was when attempt 2 ended; later attempts may have gone back, and made steps again

Nothing is written, torch is not imported, and no file is kept open. A file is read again only after it has changed, and
of a file of lines only those that are new.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import re
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_cli.catalog import Catalog, Entry, Life, Spent
from trainer_cli.environment import unix
from trainer_cli.errors import RunDirectoryError, TrainError, UserError
from trainer_cli.files import FileIdentity, GrowingFile, as_path, is_url, read_rows
from trainer_cli.goodput import compute_goodput
from trainer_cli.keys import whole_values
from trainer_cli.layout import MANIFEST_FILE, numbers_within, parse_step, step_within
from trainer_cli.loggers import MEDIA_FILE, Mark, MetricRange, is_validation_metric
from trainer_cli.runs.damage import collecting, damaged_files, explain, unread_lines
from trainer_cli.runs.find_runs import Listings, RunFinder
from trainer_cli.runs.metrics import BestSettings
from trainer_cli.runs.record import RunRecord, RunView, SavedCheckpoint, as_text
from trainer_cli.runs.replayed import is_abandoned, replayed_entries
from trainer_cli.runs.run_dir import RunDir, attempts_of, how_ended
from trainer_cli.runs.spent_time import sum_until
from trainer_cli.runs.validation_rows import ValidationRow
from trainer_cli.steps import RunStatus
from trainer_cli.strict_json import read_number

if TYPE_CHECKING:
    from trainer_cli.runs.columns import GrowingColumns

log = logging.getLogger(__name__)

STALE_S = 600.0
"""A running process that writes nothing for this long, and for ten intervals of its records, is shown as stale."""
_STALE_INTERVALS = 10
_MAX_RECORDS = 64
"""Newest records from which the rate is computed."""
_MAX_HISTORY_LINES = 64
"""Newest lines of its history that are searched for a save of the present attempt."""
_LOSS = "train/loss"
_NOTES_BYTES = 1 << 16
_RETRY_S = 10.0
"""A run of which something cannot be read is read again so often."""
_AT_ATTEMPT = re.compile(r"(?P<run>.+)@attempt(?P<number>\d+)")


class RunsBelow:
    """Follows all runs below a folder, also those that appear later."""

    def __init__(self, root: Path) -> None:
        self._finder = RunFinder(root)
        self._runs: dict[Path, Run] = {}

    def find(self) -> Collection[Run]:
        """The runs that exist now; of two calls the same objects."""
        runs: dict[Path, Run] = {}
        for path, unreadable in self._finder.find():
            run = runs[path] = self._runs.get(path) or Run(path, self._finder.listings)
            run.unreadable = unreadable
        # Runs that have vanished are not among the new ones.
        self._runs = runs
        return runs.values()

    def look(self, now: float) -> list[RunView]:
        """The states at unix time `now`, in the order of their positions."""
        views = [view for run in self.find() if (view := run.look(now)) is not None]
        return sorted(views, key=lambda view: view.position)


class _Point(NamedTuple):
    """A record of the training, as far as the rate needs it."""

    step: int
    time: float
    """In unix seconds."""


class Run:
    """One run, which may be in training, or as it was when an attempt ended.

    Its summary, checkpoints and records are read when they are first asked for; `look` reads the summary again.

    Args:
        newest: number of its newest records that the first look reads.
    """

    def __init__(self, path: Path, listings: Listings | None = None, *, newest: int = _MAX_RECORDS) -> None:
        self.directory = RunDir(path)
        self._last_attempt: int | None = None
        """The number of the last attempt that counts; None: all count."""
        self.unreadable: str | None = None
        """Why its directory cannot be listed."""
        self._listings = listings or Listings()
        self._metrics = GrowingFile(self.directory.metrics_file, newest)
        self._history = GrowingFile(self.directory.history_file, _MAX_HISTORY_LINES)
        self._noted_time: tuple[float, Spent] | None = None
        """When the newest attempt began, and what its newest save has noted."""
        self._points: deque[_Point] = deque(maxlen=_MAX_RECORDS)
        self._loss: float | None = None
        self._measured = Mark()
        self._summary: Mapping[str, Any] | None = None
        self._summary_seen: FileIdentity | None = None
        self._config_seen: FileIdentity | None = None
        self._config: dict[str, str] | None = None
        self._settings = BestSettings()
        self._folder: Path | None = None
        """The folder of its checkpoints; None if it is unknown."""
        self._columns: tuple[GrowingColumns, GrowingColumns] | None = None
        """The records of its training, and those of its machine."""
        self.last_record: RunRecord | None = None
        """What `record` has returned last, which may be older than the files."""
        self._last_version = ""

    @classmethod
    def open(cls, path: Path) -> Run:
        """The run at a path, or the one that `RUN@attempt2` names.

        Raises:
            UserError: there is no such run, or no such attempt.
        """
        path, number = split_attempt(path)
        run = cls(RunDir.open(path).path)
        return run if number is None else run.until(number)

    def until(self, number: int) -> Run:
        """The run as it was when an attempt ended: without later attempts, and what they saved and recorded."""
        run = copy.copy(self)
        run._last_attempt = number
        return run

    @property
    def path(self) -> Path:
        """How a command names it."""
        path = self.directory.path
        return path if self.is_whole else Path(f"{path}@attempt{self.attempts[-1]['attempt']}")

    @property
    def summary(self) -> Mapping[str, Any]:
        """The contents of summary.json."""
        if self._summary is None:
            self._summary = self.directory.read_summary()
        return self._summary

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """Those up to the last one that counts."""
        last = self._last_attempt
        attempts = attempts_of(self.summary)
        return attempts if last is None else [entry for entry in attempts if int(entry.get("attempt") or 0) <= last]

    @property
    def replaced_after(self) -> int | None:
        """The step at which the earliest later attempt began; None if all attempts count."""
        if (last := self._last_attempt) is None:
            return None
        later = [attempt for attempt in attempts_of(self.summary) if int(attempt.get("attempt") or 0) > last]
        return min((int(attempt.get("start_step") or 0) for attempt in later), default=None)

    @property
    def is_whole(self) -> bool:
        """Whether the last attempt of the run counts."""
        return self.replaced_after is None

    @property
    def records(self) -> Sequence[Mapping[str, Any]]:
        """The lines of `metrics.jsonl` that no later attempt has replaced."""
        end = self.replaced_after
        return self._rows if end is None else [row for row in self._rows if int(row.get("step") or 0) <= end]

    # It is read only where it is asked for: a long run has many.
    @cached_property
    def _rows(self) -> Sequence[Mapping[str, Any]]:
        """All lines of `metrics.jsonl`."""
        return read_rows(self.directory.metrics_file)

    @property
    def kept(self) -> Sequence[tuple[Entry, Path]]:
        """The valid checkpoints of these attempts, by step; for a removed one its copy, if there is one."""
        last = self._last_attempt
        return [
            (entry, path)
            for entry, path in self.valid_checkpoints
            if last is None or (entry.manifest is not None and entry.manifest.attempt <= last)
        ]

    @cached_property
    def valid_checkpoints(self) -> Sequence[tuple[Entry, Path]]:
        """The valid checkpoints of all attempts, by step. Set it to none where they cannot be listed."""
        run = self.directory
        folder, run_id = run.stored_checkpoints(), run.run_id
        entries = {entry.step: (entry, folder / entry.name) for entry in run.catalog(folder).valid(run_id)}
        section = run.values.get("checkpoint")
        copy_to = section.get("copy_to") if isinstance(section, dict) else None
        copies = copy_to.get("folder") if isinstance(copy_to, dict) else None
        if isinstance(copies, str) and "${" not in copies:
            name = str(run.values.get("name") or "default")
            catalog = Catalog.of(as_path(copies.replace("{run_name}", name)), run.copies_cache)
            try:
                for entry in catalog.valid(run_id):
                    entries.setdefault(entry.step, (entry, catalog.folder / entry.name))
            except OSError as error:
                log.warning("the copies in %s cannot be listed, so none is used: %s", catalog.folder, error)
        return [entries[step] for step in sorted(entries)]

    @property
    def entries(self) -> list[tuple[Entry, Path]]:
        """The valid checkpoints that no later attempt has abandoned, by step."""
        attempts = self.attempts
        return [(entry, path) for entry, path in self.kept if not is_abandoned(entry, attempts)]

    @property
    def replayed(self) -> list[tuple[Entry, Path]]:
        """The checkpoints of steps that were computed again, by step; none of an earlier attempt."""
        folder = self.directory.replayed_folder
        return [(entry, folder / entry.name) for entry in replayed_entries(self.directory)] if self.is_whole else []

    @property
    def reached(self) -> int:
        """The last step that was made, as far as it is known; of a run in training the step of its newest save."""
        saved = max((entry.step for entry, _ in self.entries), default=0)
        if self.is_whole and self.directory.is_locked():
            return saved
        recorded = max((int(record.get("step") or 0) for record in self.records), default=0)
        return max(saved, recorded, int(self.end.get("step") or 0))

    @property
    def end(self) -> Mapping[str, Any]:
        """How it ended: the summary of the run, or the entry of the last attempt."""
        return self.summary if self.is_whole else self.attempts[-1]

    @property
    def is_finished(self) -> bool:
        """Whether it reached the end that its config gave."""
        return self.end.get("status") == RunStatus.finished

    @property
    def first_step(self) -> int:
        """The step at which the first attempt began; 0 if none is recorded."""
        return int(self.attempts[0].get("start_step") or 0) if self.attempts else 0

    def attempt_of(self, step: int) -> int:
        """The number of the attempt that made a step: the last one that began before it."""
        earlier = [attempt for attempt in self.attempts if int(attempt.get("start_step") or 0) < max(step, 1)]
        return int((earlier or self.attempts or [{}])[-1].get("attempt") or 1)

    def read_status(self) -> tuple[str | None, str]:
        """How it is by its lock and its summary alone, and why: a `RunStatus`; None if no attempt has begun."""
        # The lock is read before the summary: if it is free, the summary is what its process wrote last.
        locked = self.directory.is_locked()
        self._summary = self.directory.read_summary()
        return (RunStatus.running, "") if locked else how_ended(self._summary)

    @property
    def ranges(self) -> Mapping[str, MetricRange]:
        """The validation metrics of the records that were read for the last look."""
        return self._measured.ranges

    @property
    def config(self) -> Mapping[str, str]:
        """Its stored config: dotted key -> value, a list as one text. Empty if it cannot be read."""
        with suppress(OSError):
            self._read_config()
        if self._config is None:
            self._config = _flatten(self.directory.values)
        return self._config

    @property
    def notes(self) -> str:
        """What is written in its notes.md, up to 64 KiB; empty without it."""
        with suppress(OSError), open(self.directory.notes_file, "rb") as file:
            return file.read(_NOTES_BYTES).decode("utf-8", "replace").replace("\0", "").strip()
        return ""

    @property
    def version(self) -> str:
        """Changes with its files."""
        run = self.directory
        files = (
            run.metrics_file, run.system_file, run.path / MEDIA_FILE, run.summary_file, run.config_file,
            run.history_file, run.checkpoints_folder, run.validation_folder / "validation.jsonl", run.log_file,
            run.notes_file,
        )  # fmt: skip
        # What could not be read may be readable by now, with the same identity.
        has_problems = self.last_record is not None and bool(self.last_record.problems)
        period = int(time.time() / _RETRY_S) if has_problems else 0
        # The lock tells a killed run from a running one: both have the same files.
        seen = (*(FileIdentity.at(file) for file in files), run.is_locked(), self.unreadable, period)
        return hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()

    def look(self, now: float) -> RunView | None:
        """Its state at unix time `now`; None if its directory is gone."""
        if self.unreadable is not None:
            return RunView(self.path, RunView.UNREADABLE, self.unreadable)
        try:
            return self._look(now)
        except FileNotFoundError:
            return None
        except OSError as error:
            return RunView(self.path, RunView.UNREADABLE, explain(error, self.path))

    def record(self, now: float) -> RunRecord:
        """Everything that can be read, as at unix time `now`; read again only after a file has changed."""
        version = self.version
        if self.last_record is None or version != self._last_version:
            self.last_record, self._last_version = self._read(now), version
        return self.last_record

    def _read(self, now: float) -> RunRecord:
        """Read all files again, for `record`."""
        # Imported here: `train top` looks at runs without numpy.
        from trainer_cli.runs.columns import Columns, GrowingColumns, best_values

        # It is looked at before it is read: if it has ended by then, all that is read below is complete.
        view = self.look(now)
        if view is None or self.unreadable is not None:
            view = view or RunView(self.path, RunView.UNREADABLE, "its directory is gone")
            empty = Columns()
            return RunRecord(
                self.path, view, empty, empty, {}, [], [], [], {}, {}, {}, BestSettings(), problems=[view.reason]
            )
        run = self.directory
        problems = [view.reason] if view.state == RunView.UNREADABLE else []
        problems += damaged_files(run)
        if self._columns is None:
            self._columns = GrowingColumns(run.metrics_file), GrowingColumns(run.system_file)
        columns = [Columns(), Columns()]
        for index, (reader, file) in enumerate(zip(self._columns, (run.metrics_file, run.system_file), strict=True)):
            with collecting(problems, self.path):
                columns[index] = reader.read()
            problems += unread_lines(file, columns[index].unread)
        modes = self._settings.modes(columns[0].metrics)
        try:
            environment = run.read_environment()
        except RunDirectoryError:
            environment = {}
        history, validation = list[dict[str, Any]](), list[ValidationRow]()
        with collecting(problems, self.path):
            history = read_rows(run.history_file)
        with collecting(problems, self.path):
            validation = ValidationRow.read_all(run.validation_folder)
        return RunRecord(
            self.path,
            view,
            columns[0],
            columns[1],
            self.summary,
            self.attempts,
            self._join_checkpoints(Life.read_all(history)),
            validation,
            self.config,
            run.read_provenance() or dict.fromkeys(_find_overridden_keys(run, self.config), "command line"),
            _flatten(environment),
            self._settings,
            best_values(columns[0], modes),
            modes,
            self.notes,
            list(dict.fromkeys(problems)),
        )

    def _join_checkpoints(self, history: Sequence[Life]) -> list[SavedCheckpoint]:
        """All checkpoints on the disk or in the history, in order of their saves.

        An object store is not listed: there, and where the folder is unknown or cannot be read, the history decides.
        """
        kept = self.summary.get("checkpoints") or ()
        reasons = {str(item.get("name")): str(item.get("why")) for item in kept if isinstance(item, dict)}
        folder, entries = self._folder, dict[str, Entry]()
        is_listed = folder is not None and not is_url(folder)
        if folder is not None and is_listed:
            try:
                listed = self.directory.catalog(folder).entries()
                entries = {entry.name: entry for entry in listed if entry.manifest}
            except (TrainError, OSError):
                is_listed = False
        checkpoints = []
        for life in history:
            # A name may be saved again after a removal: the checkpoint on the disk is the one not removed since.
            is_last = life.removed_at is None
            entry = entries.pop(life.name, None) if is_last else None
            if entry is not None:
                _take_manifest(life, entry)
            why = reasons.get(life.name, "") if entry is None or not entry.pinned else "pinned"
            checkpoints.append(SavedCheckpoint(life, entry is not None or (is_last and not is_listed), why))
        for name, entry in entries.items():
            assert folder is not None
            life = Life(name, saved_at=_modification_time(folder / name / MANIFEST_FILE))
            _take_manifest(life, entry)
            checkpoints.append(SavedCheckpoint(life, True, "pinned" if entry.pinned else reasons.get(name, "")))
        return sorted(checkpoints, key=lambda saved: (saved.life.saved_at or 0.0, saved.life.step or 0))

    def _look(self, now: float) -> RunView:
        """The state of a run whose directory can be listed, for `look`."""
        # The lock is read first: if it is free, everything that its process wrote is read below.
        locked = self.directory.is_locked()
        # Raises FileNotFoundError if the run is gone: other missing files only mean that nothing was written yet.
        self._read_config()
        self._read_summary()
        self._read_metrics()
        attempt = self.attempts[-1] if self.attempts else {}
        last_write = max(filter(None, map(_modification_time, self._written_paths())), default=None)
        age_s = None if last_write is None else max(0.0, now - last_write)
        started = unix(attempt.get("started")) or 0.0
        # A resume begins at an earlier step: a rate across attempts would be wrong.
        points = [point for point in self._points if point.time >= started]
        state, reason = self._find_state(locked, age_s, points)
        running = state in (RunStatus.running, RunView.STALE)
        step = _int_or_none(self.summary.get("step"))
        # The summary of a run that has not ended knows only the step at which the attempt began.
        if state in (RunStatus.running, RunView.STALE, RunStatus.killed) and points:
            step = points[-1].step
        total = _int_or_none(self.summary.get("total_steps"))
        rate = _compute_rate(points) if running else None
        eta_s = None
        if rate and step is not None and total is not None:
            eta_s = max(0.0, (total - step) / rate - (now - points[-1].time))
        checkpoint = self._find_newest_checkpoint()
        metric, value = self._find_best_metric()
        return RunView(
            self.path,
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
            self._read_goodput(state, started, points),
            "".join(unread_lines(self.directory.metrics_file, self._metrics.unread)),
        )

    def _read_goodput(self, state: str, started: float, points: list[_Point]) -> float | None:
        """The goodput in the summary; of an attempt that has not ended until its newest save, and of one that was
        killed until its newest record."""
        if saves := Spent.noted(self._history.read_rows().rows, started):
            self._noted_time = started, saves[-1][2]
        if state not in (RunStatus.running, RunView.STALE, RunStatus.killed):
            goodput = self.summary.get("goodput")
            return goodput if isinstance(goodput, float) else None
        if self._noted_time is None or self._noted_time[0] != started:
            return None
        spent = self._noted_time[1]
        lasted_s = points[-1].time - started if points and state == RunStatus.killed else 0.0
        return compute_goodput(sum_until(self.attempts[:-1], spent, lasted_s))

    def _find_state(self, locked: bool, age_s: float | None, points: list[_Point]) -> tuple[str, str]:
        """The `state` and `reason` of its `RunView`; it wrote last `age_s` seconds ago."""
        if locked:
            # Slow runs write seldom: for them the time is ten of their own intervals.
            interval = (points[-1].time - points[0].time) / (len(points) - 1) if len(points) > 1 else 0.0
            stale = age_s is not None and age_s > max(STALE_S, _STALE_INTERVALS * interval)
            return (RunView.STALE if stale else RunStatus.running), ""
        # A process that is killed before its first attempt leaves no summary.
        state, reason = how_ended({"status": RunStatus.running, **self.summary})
        if state == RunStatus.killed and self.directory.lock_file.exists():
            # Raises an OSError if it cannot be opened: then it is unknown whether the lock is held.
            self.directory.lock_file.open("rb").close()
        return str(state), reason

    def _written_paths(self) -> tuple[Path, ...]:
        """The files that change while it trains."""
        run = self.directory
        return run.metrics_file, run.log_file, run.summary_file, run.checkpoints_folder

    def _read_summary(self) -> None:
        """Read `summary.json` if it has changed."""
        try:
            seen = FileIdentity.of(os.stat(self.directory.summary_file))
        except FileNotFoundError:
            self._summary, self._summary_seen = {}, None
            return
        # It is parsed only after a change: a table of hundreds of runs is drawn every two seconds.
        if self._summary_seen != seen:
            # Raises an OSError if it cannot be read.
            self.directory.summary_file.open("rb").close()
            self._summary, self._summary_seen = self.directory.read_summary(), seen

    def _read_config(self) -> None:
        """Read the folder of checkpoints and the rule of the best from its config if it has changed."""
        seen = FileIdentity.of(os.stat(self.directory.config_file))
        if self._config_seen == seen:
            return
        self._config, self._config_seen = None, seen
        self._settings = BestSettings.of(self.directory.values)
        try:
            self._folder = self.directory.stored_checkpoints()
        except TrainError:
            self._folder = None

    def _read_metrics(self) -> None:
        """Read the records that are new since the last call."""
        new = self._metrics.read_rows("step", "time")
        # A resume has dropped records that are counted here.
        if new.restarted:
            self._points.clear()
            self._loss = None
            self._measured = Mark()
        for record in new.rows:
            self._points.append(_Point(record["step"], record["time"]))
            if (loss := read_number(record.get(_LOSS, ""))) is not None:
                self._loss = loss
            values = {key: read_number(record[key]) for key in record if is_validation_metric(key)}
            if values:
                numbers = {key: value for key, value in values.items() if value is not None}
                self._measured = self._measured.after(0, record["step"], numbers)

    def _find_best_metric(self) -> tuple[str, float | None]:
        """The metric that decides which checkpoint is best, and its newest value; of a run that ended before it was
        read, from its summary."""
        last = self.summary.get("last_metrics")
        newest = {name: values.last for name, values in self.ranges.items()}
        measured = {**(last if isinstance(last, dict) else {}), **newest}
        rule = self._settings.rule(measured)
        value = None if rule is None else measured[rule.metric]
        return ("", None) if rule is None or not isinstance(value, int | float) else (rule.metric, float(value))

    def _find_newest_checkpoint(self) -> str | None:
        """The newest checkpoint by the names in its folder; of an object store among the local copies."""
        if self._folder is None:
            return None
        folder = self.directory.checkpoints_folder if is_url(self._folder) else self._folder
        try:
            names = self._listings.of(folder).folders
        except OSError:
            return None
        # Manifests are not read: hundreds of them per look would be too slow.
        newest_first = sorted(names, key=_order_by_step, reverse=True)
        return next((name for name in newest_first if (folder / name / MANIFEST_FILE).is_file()), None)


def split_attempt(path: Path) -> tuple[Path, int | None]:
    """The run and the number of the attempt that `RUN@attempt2` names; None for the newest, and for any other path.

    Raises:
        UserError: the run has no such attempt.
    """
    match = None if path.exists() else _AT_ATTEMPT.fullmatch(str(path))
    if match is None:
        return path, None
    run, number = RunDir(match["run"]), int(match["number"])
    numbers = [attempt.get("attempt") for attempt in run.attempts]
    if run.exists_as_run() and number not in numbers:
        cure = f"Its attempts are {', '.join(map(str, numbers))}." if numbers else None
        raise UserError(f"{run.path} has no attempt {number}", cure=cure)
    return run.path, number if numbers and number != numbers[-1] else None


def _order_by_step(name: str) -> tuple[int, list[int], str]:
    """A key that sorts names of checkpoints by their step."""
    step = parse_step(name)
    step = step_within(name) if step is None else step
    return -1 if step is None else step, numbers_within(name), name


def _compute_rate(points: list[_Point]) -> float | None:
    """Steps per second; None for fewer than two records."""
    steps, seconds = (points[-1].step - points[0].step, points[-1].time - points[0].time) if points else (0, 0.0)
    return steps / seconds if steps > 0 and seconds > 0 else None


def _int_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> value as text."""
    return {".".join(keys): as_text(value) for keys, value in whole_values(values)}


def _find_overridden_keys(run: RunDir, config: Mapping[str, str]) -> list[str]:
    """The keys that the overrides of the command line set, by themselves or with a section."""
    try:
        text = run.overrides_file.read_text("utf-8", errors="replace")
    except OSError:
        return []
    overridden = [line.lstrip('- "+').partition("=")[0] for line in text.splitlines()]
    return [key for key in config if any(key == name or key.startswith(f"{name}.") for name in overridden)]


def _take_manifest(life: Life, entry: Entry) -> None:
    """Take step, kind and reason from the manifest, which decides over the history."""
    assert entry.manifest is not None
    life.step, life.kind, life.reason = entry.step, entry.manifest.kind.value, entry.manifest.reason


def _modification_time(path: Path) -> float | None:
    """When a file or folder was changed, in unix seconds; None if it is missing or cannot be read."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
