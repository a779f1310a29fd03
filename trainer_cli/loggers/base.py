"""The base class of loggers, which get each record once and can be rewound to an earlier step.

The order of calls over a run's life:

    load_state_dict(state)    only on a resume, if the checkpoint has a state of the logger
    rewind(run_dir, step)     only on a resume: drop everything later than `step`
    start(facts)              open files; heavy imports happen here, not at construction
    log(record) …             one record a step, steps rising; then one more of the last step, if more was logged at it
    flush(durable) …          before every checkpoint, durably: what is logged up to it must not be lost
    state_dict()              at a save, after the flush: what a rewind to this step can use
    note_end(status)          before `close`, if the fit ends by it: not before a rollback
    close()                   always, also after an error

For an evaluation outside of a training, and for records after one, the loggers are started, called and closed again
without `rewind`. The steps of these records are those of the evaluated checkpoints. The end of the fit before is noted
again, and without one that of the evaluation.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer_cli.errors import UserError
from trainer_cli.loggers.marks import MetricRange
from trainer_cli.schema import KeepBestConfig
from trainer_cli.signatures import CheckedArguments
from trainer_cli.steps import RunStatus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BINS = 64
RATE_KEY = "train/samples_per_s"
"""The metric that displays show as the rate."""
SAVES = logging.getLogger("trainer_cli.saves")
"""Log of every save: a progress bar may show its messages instead of a line."""


@dataclass(slots=True)
class Pauses:
    """Number and total seconds of the evaluations, or of the saves, of this process, and the step of the last."""

    count: int = 0
    seconds: float = 0.0
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class Now:
    """Snapshot of the current progress. `activity` is empty while steps are trained."""

    step: int
    samples: int = 0
    activity: str = ""
    pauses: tuple[Pauses, ...] = ()
    epoch: float | None = None
    """Epochs trained."""
    share: float | None = None
    """Fraction of the run that is trained; None if it is unknown."""
    time_left_s: float | None = None
    """Seconds until `loop.max_time` stops this process; None without it."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about the run for loggers.

    `run_dir` is None for a library user without a run directory; `total_steps` is None if it is unknown.
    `start_step` and `start_samples` are the counts from which this process starts, `start_time` its unix time.
    `console` is the value of `logging.console`. `config` is the run's config as YAML, empty without one.
    `hparams` are the hyperparameters of the run, by name. `keep_best` is the section of the config that names the best
    metric. `now` and `loss` may be called at any time, by any thread; `loss` returns the mean training loss since the
    last log, as it was at most a second ago, or None. `loaders` are the names of the validation sets; `average` returns
    the callback whose average of the weights is evaluated now, or None. `ranges` returns the values of all records so
    far. `repeats` says whether records after `start_step` that an earlier process has logged come again with the same
    values.
    """

    run_dir: Path | None = None
    name: str = "default"
    total_steps: int | None = None
    start_step: int = 0
    start_samples: int = 0
    start_time: float = field(default_factory=time.time)
    console: str = "auto"
    config: str = ""
    hparams: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    keep_best: KeepBestConfig | None = None
    now: Callable[[], Now] | None = None
    loss: Callable[[], float | None] | None = None
    loaders: tuple[str, ...] = ()
    average: Callable[[], str | None] | None = None
    ranges: Callable[[], Mapping[str, MetricRange]] | None = None
    repeats: bool = False

    @property
    def title(self) -> str:
        """The name, and in a sweep the swept values after it, because all runs of a sweep have the same name."""
        if self.run_dir is not None and self.run_dir.parent.name == "sweep":
            return f"{self.name} {self.run_dir.name}"
        return self.name


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts and numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | bool | None, ...], ...]
    is_matrix: bool = False
    """Whether each row is a label and numbers that are shown in shades, such as a confusion matrix."""


@dataclass(frozen=True, slots=True)
class Record:
    """All metrics of one step: `train/loss`, `val/accuracy`. Values are plain numbers.

    `time` is in unix seconds. `samples` counts from the start of the run, None if they are not counted. A record may
    also have texts, images, histograms and tables, or these alone; a logger leaves out what it cannot show.
    """

    step: int
    epoch: float
    time: float
    metrics: Mapping[str, float]
    samples: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    """Of shape (height, width, channels), with 1 (grey), 3 (RGB) or 4 (RGBA) channels."""
    histograms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """The values, flat and finite; it may be empty."""

    tables: Mapping[str, Table] = field(default_factory=dict)

    @property
    def has_media(self) -> bool:
        """Whether there is a text, an image, a histogram or a table."""
        return bool(self.texts or self.images or self.histograms or self.tables)

    def binned(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """For each histogram with values: the counts of equal bins from the smallest to the largest value, and the
        edges of the bins."""
        return {name: _bin_values(values) for name, values in self.histograms.items() if values.size}


def _bin_values(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The counts of equal bins over the range of the values, and the edges of the bins."""
    import numpy as np

    low, high = float(values.min()), float(values.max())
    # Between values that are nearly equal there are too few floats for the edges: use a wider range.
    min_width = 2 * _BINS * float(np.spacing(max(abs(low), abs(high))))
    if high - low < min_width:
        margin = 0.5 if min_width < 1 else min_width
        low, high = low - margin, high + margin
    return np.histogram(values, _BINS, (low, high))


class Logger(CheckedArguments, ABC):
    """Base class of loggers; only `log` must be implemented. Calls come from the main thread, one at a time; except
    `flush(durable=True)`, which another thread may call while `log` runs.

    A record for which `log` raised an OSError may be passed again, so `log` must leave no part of it behind.
    """

    needs_package: ClassVar[str] = ""
    """The optional dependency that it imports, for a message before the run begins."""
    is_remote: ClassVar[bool] = False
    """True if records go to a service: no error of it ends a training, and the records are sent later."""
    is_display: ClassVar[bool] = False
    """True if it shows metrics on a terminal or in a notebook, in place of the display that a trainer adds."""

    def rewind(self, run_dir: Path, step: int) -> None:
        """Drop every record later than `step` and a truncated last one, at once or when the first record is written.

        Called before `start`; -1 drops everything. A crash at any moment leaves the records up to `step` intact, and
        another call finishes the work. Without a file there is nothing to do.
        """

    def rewind_shared(self, step: int) -> None:
        """On a resume without a run directory, drop what this training has logged later than `step`. Its files may
        hold records of other trainings, which stay where a logger can tell them apart; this default cannot."""
        if step >= 0:
            self.rewind(Path(), step)

    def state_dict(self) -> dict[str, Any]:
        """What a rewind to the present step can use, for a checkpoint; called after `flush`."""
        return {}

    def metric_ranges(self, file: Path | None = None) -> Mapping[str, MetricRange] | None:
        """The validation metrics of all records in its file, those of earlier attempts too.

        Returns None if this logger does not know all of it, or writes to another file than `file`.
        """
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what `state_dict` has returned at the step of the next rewind. The files may have changed since."""

    def start(self, facts: RunFacts) -> None:
        """Open files or connections that `log` needs."""

    @abstractmethod
    def log(self, record: Record) -> None:
        """Log one record. Called inside the training loop, so it must be fast."""

    def last_step(self) -> int | None:
        """The newest step of which a service holds a record of this run, -1 if it holds none; None if it does not say.
        Called after `start`. With a number, records up to the start that the service lacks are passed to `log`."""
        return None

    def flush(self, durable: bool = False) -> None:
        """Write everything logged so far to the operating system; `durable`: fsync it."""

    def note_end(self, status: RunStatus) -> None:
        """Note how the run ended, as `summary.json` says it: `finished`; `stopped`, to be started again; `failed`; or
        `interrupted`, by a second Ctrl-C. Called after the last record and before `close`, and only after `start`."""

    def close(self) -> None:
        """Flush and close. It may be called twice, or without `start`."""


def in_run_dir(path: str | Path, run_dir: Path | None) -> Path:
    """A logger's path, relative to the run directory if there is one."""
    return (run_dir / path) if run_dir is not None else Path(path)


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional dependency.

    Raises:
        UserError: the package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"this needs the package {module.partition('.')[0]}, which is not installed",
            cure=f'Install it: pip install "trainer-cli[{extra}]".',
        ) from error
