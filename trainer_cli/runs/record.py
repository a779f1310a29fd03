"""The state of a run, the record of what its files hold, and the jobs of a sweep; `runs/run.py` reads the files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer_cli.catalog import Life
from trainer_cli.environment import unix
from trainer_cli.runs.metrics import BestSettings
from trainer_cli.runs.validation_rows import ValidationRow
from trainer_cli.steps import RunStatus

if TYPE_CHECKING:
    from trainer_cli.runs.columns import Columns


@dataclass(frozen=True, slots=True)
class RunView:
    """The state of a run now. None: unknown, or, for rate and remaining time, not running."""

    STALE: ClassVar = "stale"
    """The state of a process that holds the lock, but writes nothing."""
    PAUSED: ClassVar = "paused"
    """The state of a run that a search has stopped before its end."""
    UNREADABLE: ClassVar = "unreadable"
    """The state of a run whose files cannot be read."""

    path: Path
    state: str
    """A `RunStatus`, `STALE`, `PAUSED` or `UNREADABLE`."""
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
        return self.state in (RunStatus.running, self.STALE)

    @property
    def position(self) -> tuple[bool, float, Path]:
        """The key by which runs are sorted: running ones by path, then ended ones, the newest first."""
        age_s = math.inf if self.age_s is None else self.age_s
        return not self.is_running, 0.0 if self.is_running else age_s, self.path


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
    validation: Sequence[ValidationRow]
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
    curves: dict[tuple[str, str, int], str] = field(default_factory=dict)
    """Its curves, as far as a server has drawn them."""

    @property
    def began(self) -> float:
        """Unix seconds of its first attempt's start or its first record, whichever is earlier; 0 if unknown."""
        started = [unix(attempt.get("started")) for attempt in self.attempts[:1]]
        times = [time for time in started if time is not None]
        return min([*times, *self.columns.time[:1]], default=0.0)


def as_text(value: Any) -> str:
    """A value of a config or of the environment on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
