"""Collect the metrics of each step into one record for the loggers; measure training time and samples per second.

Texts, images, histograms and tables of a step, as arrays on the host that every logger takes.

What anything that has the trainer may log for the current step: metrics, texts, images, histograms, tables.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer_cli.core.progress import Progress
from trainer_cli.data.position import kept_random_state
from trainer_cli.errors import UserError
from trainer_cli.loggers.base import Logger, Pauses, Record, RunFacts, Table
from trainer_cli.loggers.record_keeper import RecordKeeper


class Kind(StrEnum):
    """What is shown; the name is that of the field of a `Record`."""

    texts = "texts"
    images = "images"
    histograms = "histograms"
    tables = "tables"


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """One of them, in the record of a step."""

    kind: Kind
    name: str
    value: Any

    @property
    def key(self) -> str:
        """Its key among the metrics of the record, which may have the same name."""
        return f"{self.kind}: {self.name}"


def text_medium(name: str, value: str) -> Medium:
    """A text."""
    return Medium(Kind.texts, name, str(value))


def image_medium(name: str, value: Any) -> Medium:
    """An image as bytes of shape (height, width, channels); `value` as in `Trainer.log_image`.

    Raises:
        UserError: it has another shape.
    """
    given = _array(value)
    array = given[None] if given.ndim == 2 else given
    if array.ndim != 3 or array.shape[0] not in (1, 3, 4) or 0 in array.shape:
        raise UserError(
            f"image {name!r} has shape {given.shape}",
            cure="Give (height, width) or (channels, height, width), with 1, 3 or 4 channels.",
        )
    if array.dtype == np.bool_ or np.issubdtype(array.dtype, np.floating):
        array = np.nan_to_num(array.astype(np.float32), nan=0.0).clip(0, 1) * 255
    return Medium(Kind.images, name, np.ascontiguousarray(array.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)))


def histogram_medium(name: str, values: Any) -> Medium:
    """The finite ones of some values, flat."""
    array = _array(values).reshape(-1).astype(np.float64)
    return Medium(Kind.histograms, name, array[np.isfinite(array)])


def table_medium(name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Medium:
    """Rows under the names of their columns.

    Raises:
        UserError: a row has more or fewer values than there are columns, or something else than texts and numbers.
    """
    found = tuple(tuple(one.item() if hasattr(one, "item") else one for one in row) for row in rows)
    for row in found:
        if len(row) != len(columns) or not all(isinstance(one, str | int | float | None) for one in row):
            raise UserError(f"table {name!r} has the row {row!r} under the columns {list(columns)!r}")
    return Medium(Kind.tables, name, Table(tuple(map(str, columns)), found))


def _array(value: Any) -> NDArray[Any]:
    """Values on the host. A tensor is copied, since training goes on in place."""
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        # numpy has no bfloat16.
        value = (host.float() if host.is_floating_point() else host).numpy()
    return np.array(value)


log = logging.getLogger(__name__)

_MOST_WAITING = 1000
"""Records that are kept at most, so that their memory is bounded."""
EVALUATING, SAVING = "evaluating", "saving"
_SHORTEST_PAUSE_S = 0.01
"""Less is no pause: most of the steps at which a save may be made make none."""


_OWN_FIELDS = frozenset({"step", "epoch", "time"})


class MetricLogger:
    """Collects the metrics of a step and gives them to the loggers as one record."""

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self.loggers = loggers
        self._keepers = [RecordKeeper(name, logger) for name, logger in loggers.items()]
        self.record: dict[str, float | Tensor | Medium] = {}
        """What was logged for the current step, by name."""
        self.last: dict[str, float] = {}
        """The last record; empty if there is none."""
        self._waiting: list[tuple[Progress, float, float, dict[str, float | Tensor | Medium]]] = []
        """Records with metrics on a device that was not waited for: counts, epoch, time and content."""
        self.is_open = False
        """Whether the loggers are started."""
        self.was_closed = False
        """Whether they were closed, so that no later step of a fit takes what is logged now into its record."""
        self.activity = ""
        """What is done beside training at the moment, for displays."""
        self._pauses = {EVALUATING: Pauses(), SAVING: Pauses()}
        self._last_step = -1
        self._began, self._seconds_before = time.monotonic(), 0.0
        self._rate_mark = (time.monotonic(), 0)
        self.rate_seconds = 0.0
        """Seconds between the last two calls of `samples_per_second`, without evaluations and saves."""

    def start(self, facts: RunFacts, progress: Progress, *, keep: int, tolerant: bool = False) -> None:
        """Rewind every logger to step `keep`, start it, and start the clock.

        Args:
            tolerant: records that cannot be written to a disk are kept, with a warning, instead of ending the training.
        """
        self._began, self._seconds_before = time.monotonic(), progress.seconds
        self._rate_mark = (self._began, progress.samples)
        self.is_open = True
        # Libraries that a logger imports may draw random numbers (rich does), and the display must not change a run.
        with kept_random_state():
            for keeper in self._keepers:
                keeper.tolerant = tolerant
                keeper.start(facts, keep)

    def reopen(self, facts: RunFacts) -> None:
        """Start every logger for records outside of a fit."""
        self.is_open = True
        with kept_random_state():
            for keeper in self._keepers:
                keeper.start(facts, None)

    def add(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Add to the record of the current step.

        Raises:
            UserError: a name is one of the record's own fields, which readers and a resume go by.
        """
        if not _OWN_FIELDS.isdisjoint(metrics):
            names = " and ".join(f"'{name}'" for name in _OWN_FIELDS if name in metrics)
            raise UserError(
                f"{names} cannot be logged: every record has that field of its own",
                cure="Log it under another name, such as 'my/step'.",
            )
        for name, value in metrics.items():
            self.record[name] = value.detach() if isinstance(value, Tensor) else value

    def add_medium(self, medium: Medium) -> None:
        """Add a text, an image or a histogram to the record of the current step, in place of one of its name."""
        self.record[medium.key] = medium

    def flush(self, progress: Progress, epoch: float, *, wait: bool = True) -> dict[str, float]:
        """Pass the record of this step to every logger, and return its metrics.

        Args:
            wait: False: a record with metrics on a device other than the CPU is kept, and those after it, until a
                later call waits. They are returned and in `last` only then.
        """
        given = dict(self.record)
        self.record.clear()
        if not wait and (self._waiting or any(map(_is_away, given.values()))) and len(self._waiting) < _MOST_WAITING:
            if given:
                self._waiting.append((replace(progress), epoch, time.time(), given))
            return self._noted(progress, {key: value for key, value in given.items() if not _is_away(value)})
        self.settle()
        return self._pass_on(progress, epoch, time.time(), given)

    def flush_evaluation(self, progress: Progress, epoch: float) -> None:
        """Pass on the record of an evaluation outside of a fit, without the metrics that were logged at this step."""
        if progress.step == self._last_step:
            measured = metrics_in(self.record)
            for name in measured.keys() & self.last.keys():
                if measured[name] != self.last[name] and not math.isnan(measured[name]):
                    log.warning(
                        "%s of step %d is logged as %g already, so %g is returned but not logged",
                        name, progress.step, self.last[name], measured[name],
                    )  # fmt: skip
                del self.record[name]
        self.flush(progress, epoch)

    def settle(self) -> None:
        """Wait for the metrics of kept records, and pass these on."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._pass_on(*one)

    def _pass_on(
        self, progress: Progress, epoch: float, at: float, given: Mapping[str, float | Tensor | Medium]
    ) -> dict[str, float]:
        media = [value for value in given.values() if isinstance(value, Medium)]
        record = self._noted(progress, given)
        if record or media:
            kinds = {kind: {one.name: one.value for one in media if one.kind is kind} for kind in Kind} if media else {}
            entry = Record(progress.step, epoch, at, record, progress.samples, **kinds)
            for keeper in self._keepers:
                keeper.log(entry)
        return record

    def _noted(self, progress: Progress, given: Mapping[str, float | Tensor | Medium]) -> dict[str, float]:
        record = metrics_in(given)
        self.last = {**self.last, **record} if progress.step == self._last_step else record
        self._last_step = progress.step
        return record

    def write_out(self) -> None:
        """Write everything logged so far to the operating system, so that `make_durable` may follow later."""
        self.settle()
        for keeper in self._keepers:
            keeper.flush(durable=False)

    def make_durable(self) -> None:
        """Flush everything logged so far to the disk, before a checkpoint of this step is committed.

        Called in the writer thread; the main thread may log meanwhile.
        """
        for keeper in self._keepers:
            keeper.flush(durable=True)

    def seconds(self) -> float:
        """Seconds of training over all attempts."""
        return self._seconds_before + time.monotonic() - self._began

    def samples_per_second(self, samples: int) -> float:
        """Samples per second since the last call, without evaluations and saves."""
        (then, before), now = self._rate_mark, time.monotonic()
        self._rate_mark = (now, samples)
        self.rate_seconds = now - then
        return (samples - before) / max(self.rate_seconds, 1e-9)

    def exclude_time(self, seconds: float) -> None:
        """Exclude time from the rate."""
        self._rate_mark = (self._rate_mark[0] + seconds, self._rate_mark[1])

    @contextmanager
    def pause(self, activity: str, progress: Progress) -> Iterator[None]:
        """Exclude from the rate what is done meanwhile: EVALUATING or SAVING."""
        began, self.activity = time.monotonic(), activity
        try:
            yield
        except Exception as error:
            error.add_note(f"while {activity} at step {progress.step}")
            raise
        finally:
            seconds, self.activity = time.monotonic() - began, ""
            self.exclude_time(seconds)
            if seconds >= _SHORTEST_PAUSE_S:
                pauses = self._pauses[activity]
                self._pauses[activity] = Pauses(pauses.count + 1, pauses.seconds + seconds, progress.step)

    @property
    def pauses(self) -> tuple[Pauses, ...]:
        """The evaluations and the saves of this process."""
        return tuple(self._pauses.values())

    def close(self) -> None:
        """Close every logger, also after an error in one."""
        self.is_open, self.was_closed = False, True
        with ExitStack() as stack:
            for keeper in self._keepers:
                stack.callback(keeper.close)
            self.settle()


def _is_away(value: float | Tensor | Medium) -> bool:
    """Whether reading a value waits for a device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def metrics_in(record: Mapping[str, float | Tensor | Medium]) -> dict[str, float]:
    """The metrics of a record as numbers, without its texts, images and histograms.

    Raises:
        UserError: one is no number.
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if not isinstance(value, Medium):
            try:
                found[name] = float(value)
            except (TypeError, ValueError):
                got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise UserError(
                    f"the metric '{name}' is {got}, and no number", cure="Log a number, or use log_histogram, log_text."
                ) from None
    return found
