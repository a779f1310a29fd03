"""Collect what is logged at a step into one record for all loggers, and measure the training's time and rate."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer_cli.data import kept_random_state
from trainer_cli.errors import UserError
from trainer_cli.goodput import Activity
from trainer_cli.loggers import Logger, Pauses, Record, RecordKeeper, RunFacts, Table, loader_of
from trainer_cli.steps import Progress, RunStatus
from trainer_cli.trainer.time_account import TimeAccount

log = logging.getLogger(__name__)

_MOST_WAITING = 1000
"""Records that are kept at most, so that their memory is bounded."""


class Interruption(StrEnum):
    """What interrupts the training, in the words of displays and of notes on errors."""

    evaluating = "evaluating"
    saving = "saving"

    @property
    def activity(self) -> Activity:
        """The activity for which its time is counted."""
        return Activity.evaluation if self is Interruption.evaluating else Activity.saving


_KEPT = ""
"""Key of the seconds of kept training beside the states of loggers, all of which have names."""
_SHORTEST_PAUSE_S = 0.01
"""Shorter pauses are not counted: most steps that offer a save make none."""
_RECORD_FIELDS = frozenset({"step", "epoch", "time"})
_LARGEST = 9e19
"""The largest value in a histogram: TensorBoard's bins end at 1e20."""


class Kind(StrEnum):
    """Kinds of media, with the names of the fields of a `Record`."""

    texts = "texts"
    images = "images"
    histograms = "histograms"
    tables = "tables"


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """A text, image, histogram or table in the record of a step, as an array on the host."""

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
    source = _host_array(value)
    array = source[None] if source.ndim == 2 else source
    if array.ndim != 3 or array.shape[0] not in (1, 3, 4) or 0 in array.shape:
        raise UserError(
            f"image {name!r} has shape {source.shape}",
            cure="Give (height, width) or (channels, height, width), with 1, 3 or 4 channels.",
        )
    if array.dtype == np.bool_ or np.issubdtype(array.dtype, np.floating):
        array = np.nan_to_num(array.clip(0, 1).astype(np.float32), nan=0.0) * 255
    return Medium(Kind.images, name, np.ascontiguousarray(array.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)))


def histogram_medium(name: str, values: Any) -> Medium:
    """A histogram of the finite values.

    Raises:
        UserError: they are no numbers.
    """
    try:
        array = _host_array(values).reshape(-1).astype(np.float64)
    except (TypeError, ValueError):
        kind = type(values).__name__
        raise UserError(f"histogram {name!r} is of {kind}, which cannot be read as numbers") from None
    return Medium(Kind.histograms, name, array[np.isfinite(array)])


def table_medium(name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], matrix: bool = False) -> Medium:
    """A table of rows under the names of their columns; arguments as in `Trainer.log_table`.

    Raises:
        UserError: a row has more or fewer values than there are columns, or something else than texts and numbers.
    """
    try:
        columns, cells = [*columns], tuple(tuple(map(_plain_number, row)) for row in rows)
    except TypeError as error:
        raise UserError(f"table {name!r}: {error}", cure="Give a list of columns, and a list of lists.") from None
    for row in cells:
        if len(row) != len(columns) or not all(isinstance(cell, str | int | float | None) for cell in row):
            raise UserError(f"table {name!r} has the row {row!r} under the columns {list(columns)!r}")
        if matrix and not all(isinstance(cell, int | float) for cell in row[1:]):
            raise UserError(f"matrix {name!r} has the row {row!r}", cure="Give a label, and numbers after it.")
    return Medium(Kind.tables, name, Table(tuple(map(str, columns)), cells, matrix))


def _loader_or_empty(metric: str, loaders: Sequence[str]) -> str:
    """The loader that a metric belongs to; empty if it belongs to no loader."""
    loader = loader_of(metric, loaders)
    return loader if loader in loaders else ""


def _has_scope(metrics: Iterable[str], scope: str) -> bool:
    """Whether the name of a metric begins with `scope/`."""
    return any(name.startswith(f"{scope}/") for name in metrics)


def _plain_number(cell: Any) -> Any:
    """A number of numpy or torch as one of Python; anything else as it is."""
    try:
        cell = cell.item() if hasattr(cell, "item") else cell
        # Python writes no integers of thousands of digits, so they become floats.
        return float(cell) if isinstance(cell, int) and abs(cell) >> 64 else cell
    except (RuntimeError, ValueError):
        return cell  # An array of many numbers, or of none.
    except OverflowError:
        return math.inf if cell > 0 else -math.inf


def _host_array(value: Any) -> NDArray[Any]:
    """A copy of the values on the host: training changes a tensor in place later."""
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        # numpy has no bfloat16.
        value = (host.float() if host.is_floating_point() else host).numpy()
    return np.array(value)


class MetricLogger:
    """Collects the metrics of a step and gives them to the loggers as one record."""

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self.loggers = loggers
        # A keeper for each logger: one whose disk is full keeps its own records, and delays no other.
        self._keepers = [RecordKeeper(name, logger) for name, logger in loggers.items()]
        self.record: dict[str, float | Tensor | Medium] = {}
        """What was logged for the current step, by name."""
        self.last: dict[str, float] = {}
        """The last record; empty before the first."""
        self._waiting: list[tuple[Progress, float, float, dict[str, float | Tensor | Medium]]] = []
        """Records with metrics on a device that was not waited for: counts, epoch, time and content."""
        self.is_open = False
        """Whether the loggers are started."""
        self.was_closed = False
        """Whether the loggers were closed, so that no later record takes what is logged now."""
        self.activity = ""
        """An `Interruption`, or empty while the model trains; for displays."""
        self._pauses = {pause: Pauses() for pause in Interruption}
        self.time = TimeAccount()
        self._last_step = -1
        self._warned: set[str] = set()
        self._began, self._seconds_before = time.monotonic(), 0.0
        self._rate_mark = (time.monotonic(), 0)
        """Time and samples of the last call of `samples_per_second`; the time is moved by what is excluded."""
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
        # What an earlier fit could not pass on is of steps that this one makes again.
        self._waiting.clear()
        # Libraries that a logger imports may draw random numbers (rich does), and the display must not change a run.
        with kept_random_state():
            for keeper in self._keepers:
                keeper.tolerant = tolerant
                keeper.start(facts, keep)

    def reopen(self, facts: RunFacts) -> None:
        """Start every logger for records outside of a fit."""
        with kept_random_state():
            for keeper in self._keepers:
                keeper.start(facts, None)
        self.is_open = True

    @contextmanager
    def record_kept(self) -> Iterator[None]:
        """Begin with an empty record, and put the present one back after the block, also after an error."""
        record_before = dict(self.record)
        self.record.clear()
        try:
            yield
        finally:
            self.record.clear()
            self.record.update(record_before)

    def add(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Add to the record of the current step.

        Raises:
            UserError: a name is one of the record's own fields, which readers and a resume go by.
        """
        if not _RECORD_FIELDS.isdisjoint(metrics):
            names = " and ".join(f"'{name}'" for name in _RECORD_FIELDS if name in metrics)
            raise UserError(
                f"{names} cannot be logged: every record has that field of its own",
                cure="Log it under another name, such as 'my/step'.",
            )
        # Not read here: a float would wait for the device.
        for name, value in metrics.items():
            self.record[self._writable(name)] = value.detach() if isinstance(value, Tensor) else value

    def add_medium(self, medium: Medium) -> None:
        """Add a text, an image or a histogram to the record of the current step, in place of one of its name. What no
        logger can draw is replaced, with a warning, so that it never ends a training."""
        value = medium.value
        if medium.kind is Kind.texts:
            value = self._writable(value)
        elif medium.kind is Kind.tables:
            rows = (
                tuple(self._writable(cell) if isinstance(cell, str) else cell for cell in row) for row in value.rows
            )
            value = Table(tuple(map(self._writable, value.columns)), tuple(rows), value.is_matrix)
        elif medium.kind is Kind.histograms and (np.abs(value) > _LARGEST).any():
            self._warn_once("histogram %r has values beyond %g, which are drawn there", medium.name, _LARGEST)
            value = value.clip(-_LARGEST, _LARGEST)
        medium = Medium(medium.kind, self._writable(medium.name), value)
        self.record[medium.key] = medium

    def _writable(self, text: str) -> str:
        """The text as UTF-8 can hold it: bytes of a file name that are no UTF-8 become escapes."""
        if text.isascii():
            return text
        written = text.encode(errors="backslashreplace").decode()
        if written != text:
            self._warn_once("%r is logged, which is not valid Unicode; it is written with escapes", text)
        return written

    def _warn_once(self, message: str, *args: object) -> None:
        """Log a warning, unless the same one was logged before."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *args)

    def flush(self, progress: Progress, epoch: float, *, wait: bool = True) -> dict[str, float]:
        """Pass the record of this step to every logger, and return its metrics.

        Args:
            wait: False: a record with metrics on a device other than the CPU is kept, and those after it, until a
                later call waits. They are returned and in `last` only then.
        """
        content = dict(self.record)
        # Cleared, not replaced: the loop holds this dictionary.
        self.record.clear()
        # Behind a record that waits, later ones wait too: loggers get records in order.
        must_wait = bool(self._waiting) or any(map(_is_on_device, content.values()))
        if must_wait and not wait and len(self._waiting) < _MOST_WAITING:
            if content:
                self._waiting.append((replace(progress), epoch, time.time(), content))
            on_host = {name: value for name, value in content.items() if not _is_on_device(value)}
            return self._update_last(progress, on_host)
        self.settle()
        return self._pass_on(progress, epoch, time.time(), content)

    def flush_evaluation(self, progress: Progress, epoch: float, loaders: Iterable[str]) -> None:
        """Pass on the record of an evaluation outside of a fit.

        Metrics that the last record has with the same values, if it is of this step, are not logged again. A loader
        whose metrics differ from it has the scope `validate_N`, with the first unused number from 1 on.
        """
        if progress.step == self._last_step:
            self._separate(progress.step, list(loaders))
        self.flush(progress, epoch)

    def _separate(self, step: int, loaders: Sequence[str]) -> None:
        """Rename the metrics of loaders whose values differ from the last record, and drop those that repeat it."""
        measured = metrics_in(self.record)
        repeated = measured.keys() & self.last.keys()
        changed = [name for name in repeated if measured[name] != self.last[name] and not math.isnan(measured[name])]
        changed_loaders = {_loader_or_empty(name, loaders) for name in changed}
        candidates = (f"validate_{number}" for number in count(1))
        unused_scopes = (scope for scope in candidates if not _has_scope(self.last, scope))
        # The empty name stands for what callbacks have logged under names of no loader.
        scopes = {loader: next(unused_scopes) for loader in (*loaders, "") if loader in changed_loaders}
        for name in measured:
            loader = _loader_or_empty(name, loaders)
            if loader in scopes:
                self.record[f"{scopes[loader]}/{name.removeprefix(f'{loader}/')}"] = self.record.pop(name)
            elif name in repeated:
                del self.record[name]
        for loader, scope in scopes.items():
            log.info("step %d has other metrics of '%s': these are logged as %s/…", step, loader or "callbacks", scope)

    def settle(self) -> None:
        """Wait for the metrics of kept records, and pass these on."""
        while self._waiting:
            # Removed first: a logger that fails must not get the same record again.
            self._pass_on(*self._waiting.pop(0))

    def _pass_on(
        self, progress: Progress, epoch: float, logged_at: float, content: Mapping[str, float | Tensor | Medium]
    ) -> dict[str, float]:
        """Give the record of a step to every logger, and return its metrics. Waits for tensors on a device."""
        metrics = self._update_last(progress, content)
        media: dict[str, dict[str, Any]] = {}
        for value in content.values():
            if isinstance(value, Medium):
                media.setdefault(value.kind, {})[value.name] = value.value
        if metrics or media:
            record = Record(progress.step, epoch, logged_at, metrics, progress.samples, **media)
            for keeper in self._keepers:
                keeper.log(record)
        return metrics

    def _update_last(self, progress: Progress, content: Mapping[str, float | Tensor | Medium]) -> dict[str, float]:
        """Add the metrics to the last record, if they are of the same step, or make them the last record."""
        record = metrics_in(content)
        self.last = {**self.last, **record} if progress.step == self._last_step else record
        self._last_step = progress.step
        return record

    def last_at(self, step: int) -> dict[str, float]:
        """The last record, if it is of this step; else it is empty."""
        return dict(self.last) if step == self._last_step else {}

    def write_out(self) -> None:
        """Write everything logged so far to the operating system, so that `make_durable` may follow later."""
        self.settle()
        for keeper in self._keepers:
            keeper.flush(durable=False)

    def state_dict(self) -> dict[str, Any]:
        """The states of the loggers that have one, after `write_out`."""
        states = {name: state for name, logger in self.loggers.items() if (state := logger.state_dict())}
        return {**states, _KEPT: self.time.kept_s()}

    def load_state_dict(self, states: Any, *, trained_s: float = 0.0) -> None:
        """Give each logger its state, for the next rewind. What is of another version is left out.

        Args:
            trained_s: seconds of training that led to the checkpoint, if it is of a version that did not note them.
        """
        states = states if isinstance(states, Mapping) else {}
        kept_s = states.get(_KEPT)
        self.time.go_on_from(float(kept_s) if isinstance(kept_s, int | float) else trained_s)
        for name, state in states.items():
            if name in self.loggers and isinstance(state, Mapping):
                self.loggers[name].load_state_dict(state)

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
        (time_before, samples_before), now = self._rate_mark, time.monotonic()
        self._rate_mark = (now, samples)
        self.rate_seconds = now - time_before
        return (samples - samples_before) / max(self.rate_seconds, 1e-9)

    def exclude_time(self, seconds: float) -> None:
        """Exclude time from the rate."""
        self._rate_mark = (self._rate_mark[0] + seconds, self._rate_mark[1])

    @contextmanager
    def pause(self, activity: Interruption, progress: Progress) -> Iterator[None]:
        """Count the time inside the block for `activity`, and exclude it from the rate of the training."""
        began, self.activity = time.monotonic(), activity
        interrupted_activity = self.time.enter(activity.activity)
        try:
            yield
        except Exception as error:
            # An evaluation notes the validation set.
            if not any(note.startswith(f"while {activity} ") for note in getattr(error, "__notes__", ())):
                error.add_note(f"while {activity} at step {progress.step}")
            raise
        finally:
            # Also after an error, which an evaluation that was stopped raises.
            self.time.enter(interrupted_activity)
            seconds, self.activity = time.monotonic() - began, ""
            self.exclude_time(seconds)
            if seconds >= _SHORTEST_PAUSE_S:
                pauses = self._pauses[activity]
                self._pauses[activity] = Pauses(pauses.count + 1, pauses.seconds + seconds, progress.step)

    @property
    def pauses(self) -> tuple[Pauses, ...]:
        """The evaluations and the saves of this process."""
        return tuple(self._pauses.values())

    def close(
        self, status: RunStatus | None = None, status_after: Callable[[BaseException], RunStatus] = RunStatus.after
    ) -> None:
        """Close every logger, also after an error in one, which then is how the run ended for those closed later.

        Args:
            status: how the run ended; None: it has not.
            status_after: how an error ends it.
        """
        # First: what callbacks log from here on has no record to join.
        self.is_open, self.was_closed = False, True
        # In a stack: one logger's error must not keep others open. Waiting records are passed on first.
        with ExitStack() as stack:
            # A stack closes in reverse: files first, because one that cannot be closed fails the run; services last.
            for keeper in sorted(self._keepers, key=lambda keeper: not keeper.logger.is_remote):
                stack.push(partial(_close, keeper, status, status_after))
            self.settle()


def _close(
    keeper: RecordKeeper,
    status: RunStatus | None,
    status_after: Callable[[BaseException], RunStatus],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Close a logger, as the exit of a context.

    Args:
        status: how the run ended; None: it has not. An error of a logger that was closed before takes its place.
    """
    if status is not None and error is not None:
        status = status_after(error)
    keeper.close(status)


def _is_on_device(value: float | Tensor | Medium) -> bool:
    """Whether reading a value waits for a device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


@contextmanager
def noting_set(name: str, progress: Progress) -> Iterator[None]:
    """Add a note to an error of an evaluation that names the validation set."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {Interruption.evaluating} {name} at step {progress.step}")
        raise


def metrics_in(record: Mapping[str, float | Tensor | Medium]) -> dict[str, float]:
    """The metrics of a record as numbers, without its texts, images and histograms.

    Raises:
        UserError: one is not a number.
    """
    metrics: dict[str, float] = {}
    for name, value in record.items():
        if not isinstance(value, Medium):
            try:
                metrics[name] = float(value)
            except (TypeError, ValueError, OverflowError):
                got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise UserError(
                    f"the metric '{name}' is {got}, and no number", cure="Log a number, or use log_histogram, log_text."
                ) from None
    return metrics
