"""The base class of loggers: each gets the metrics of a step once, and can be rewound to an earlier step.

The order of calls over a run's life:

    rewind(run_dir, step)     only on a resume: drop everything later than `step`
    start(facts)              open files; heavy imports happen here, not at construction
    log(record) …             one record a step, steps rising; then one more of the last step, if more was logged at it
    flush(durable) …          before every checkpoint, durably: what is logged up to it must not be lost
    close()                   always, also after an error

For an evaluation outside of a training, and for what is logged after one, the loggers are started, given records and
closed again, without `rewind`. The steps of these are those of the evaluated checkpoints.

The id of a run at a service, kept in the run directory so that every attempt continues the same one.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer_cli.core.files import replace
from trainer_cli.core.types import CheckedArguments
from trainer_cli.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAVES = logging.getLogger("trainer_cli.saves")
"""For what happens at each save: a display of the console may show it instead of a line."""


@dataclass(slots=True)
class Pauses:
    """The evaluations, or the saves, of this process: how many, their seconds, and the step of the last."""

    count: int = 0
    seconds: float = 0.0
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class Now:
    """What a training is at, at the moment of asking. `activity` is empty while it trains."""

    step: int
    samples: int = 0
    activity: str = ""
    pauses: tuple[Pauses, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about the run for loggers.

    `run_dir` is None for a library user without a run directory; `total_steps` is None if it is not known.
    `start_step` and `start_samples` are the counts that this process starts from, `start_time` its unix time.
    `console` is the style that `logging.console` names. `config` is the run's config as YAML, empty without one.
    `hparams` are the values that tell this run from others, by name. `now` may be called at any time, by any thread.
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
    now: Callable[[], Now] | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts and numbers under the names of their columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | bool | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """All metrics of one step: `train/loss`, `val/accuracy`. Values are plain numbers.

    `time` is unix seconds; `samples` counts since the run's beginning, None if they are not counted. A record may
    also have texts, images, histograms and tables, or these alone; a logger that cannot show a kind leaves it out.
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
    """The values, flat and finite; there may be none."""

    tables: Mapping[str, Table] = field(default_factory=dict)

    @property
    def has_media(self) -> bool:
        """Whether there is a text, an image, a histogram or a table."""
        return bool(self.texts or self.images or self.histograms or self.tables)


class Logger(CheckedArguments, ABC):
    """Base class of loggers; only `log` must be implemented. Calls come from the main thread, one at a time; except
    `flush(durable=True)`, which another thread may call while `log` runs.

    A record that `log` could not write, and raised an OSError for, may be given again: nothing of it is to be left.
    """

    is_remote: ClassVar[bool] = False
    """Whether records go to a service: whatever it raises, the training goes on, and the records are sent later."""

    def rewind(self, run_dir: Path, step: int) -> None:
        """Drop every record later than `step`, and a torn last one, or note to do so when the first record is written.
        Comes before `start`.

        -1 drops everything. A crash at any moment leaves the records up to `step` whole, and calling it again
        finishes the work. Without a file there is nothing to do.
        """

    def start(self, facts: RunFacts) -> None:
        """Open what `log` needs."""

    @abstractmethod
    def log(self, record: Record) -> None:
        """Log one record. Called inside the training loop, so it must be fast."""

    def flush(self, durable: bool = False) -> None:
        """Write everything logged so far to the operating system; `durable`: fsync it."""

    def close(self) -> None:
        """Flush and close. May be called twice, and without `start`."""


def in_run_dir(path: str | Path, run_dir: Path | None) -> Path:
    """A logger's path, relative to the run directory if there is one."""
    return (run_dir / path) if run_dir is not None else Path(path)


def saved_id(file: Path | None) -> str | None:
    """The id that an earlier attempt has written; None without one."""
    try:
        found = json.loads(file.read_text()) if file is not None else {}
    except (FileNotFoundError, ValueError):
        return None
    return str(found["run_id"]) if isinstance(found, dict) and "run_id" in found else None


def save_id(file: Path | None, run_id: str) -> None:
    """Write the id, durably."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, [f"{json.dumps({'run_id': run_id})}\n".encode()])


def imported(module: str, extra: str) -> Any:
    """A module of an extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"this needs the package {module.partition('.')[0]}, which is not installed",
            cure=f'Install it: pip install "trainer-cli[{extra}]".',
        ) from error
