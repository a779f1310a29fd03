"""How a run stands, read from its files again and again: each look reads only what is new."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.checkpoint.naming import MANIFEST_FILE, numbers_within, parse_step, step_within
from trainer_cli.checkpoint.storage.url_path import is_url
from trainer_cli.errors import TrainError
from trainer_cli.run.find_runs import Listings, RunFinder
from trainer_cli.run.growing_file import GrowingFile
from trainer_cli.run.run_dir import RunDir, RunStatus
from trainer_cli.run.select import checkpoints_of

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


def _modified(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def _unix(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
