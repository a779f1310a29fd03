"""Metrics on stderr: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Protocol, TextIO

from trainer_cli.errors import UserError
from trainer_cli.loggers.base import Logger, Now, Record, RunFacts
from trainer_cli.loggers.eta import Pace, clock, rate
from trainer_cli.loggers.progress_bar import ProgressBar, position
from trainer_cli.terminal import is_terminal, stamp

STYLES = ("auto", "rich", "plain", "off")
_RATE_KEY = "train/samples_per_s"


class ConsoleLogger(Logger):
    """Shows step, metrics, rate and remaining time.

    `style` is auto, rich, plain or off; null takes `logging.console`. `rich` is a bar that a thread of its own draws
    four times a second; evaluations are lines above it. `plain` is a line a record, with the time in front if the
    stream is no terminal. If the terminal is gone, the display ends and the training continues.
    """

    def __init__(self, style: str | None = None, stream: TextIO | None = None) -> None:
        if style is not None and style not in STYLES:
            raise UserError(f"console style is {style!r}, but it must be one of {', '.join(STYLES)}")
        self.style = style
        self._given_stream = stream
        self._display: _Display | None = None

    def start(self, facts: RunFacts) -> None:
        stream = self._given_stream or sys.stderr
        style = self.style or facts.console
        if style == "auto":
            style = "rich" if is_terminal(stream) else "plain"
        if style == "rich":
            self._display = ProgressBar(stream, facts)
        elif style == "plain":
            self._display = _Lines(stream, facts)

    def log(self, record: Record) -> None:
        if self._display is None or (not record.metrics and record.has_media):
            return
        try:
            self._display.show(record)
        except OSError:
            self.close()

    def close(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            try:
                display.close()
            except OSError:
                return


class _Display(Protocol):
    """A display of records."""

    def show(self, record: Record) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """A line for each record."""

    def __init__(self, stream: TextIO, facts: RunFacts) -> None:
        self._stream, self._facts = stream, facts
        self._pace = Pace(facts.start_step)
        self._pace.begin(Now(facts.start_step, facts.start_samples), facts.start_time)

    def show(self, record: Record) -> None:
        numbers = "  ".join(f"{key} {value:.4g}" for key, value in record.metrics.items() if key != _RATE_KEY)
        parts = (position(record.step, self._facts), numbers, *self._speed(record))
        line = "  ".join(part for part in parts if part)
        self._stream.write(f"{stamp(self._stream, record.time)}{line}\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()

    def _speed(self, record: Record) -> Iterator[str]:
        """The rate (measured, else since the last minute), and the time left."""
        now = Now(record.step, record.samples or 0, pauses=self._facts.now().pauses if self._facts.now else ())
        self._pace.read(now, record.time)
        if _RATE_KEY in record.metrics:
            yield f"{rate(record.metrics[_RATE_KEY])} samples/s"
        elif speed := self._pace.shown:
            yield speed
        total = self._facts.total_steps
        left = None if total is None else self._pace.left_s(now, total, record.time)
        if left is not None:
            yield f"ETA {clock(left)}"
