"""Show metrics on stderr: a progress bar and a table on a terminal, `key=value` lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, TextIO

from trainer_cli.errors import UserError
from trainer_cli.loggers.base import RATE_KEY, Logger, Now, Record, RunFacts
from trainer_cli.loggers.pace import Pace
from trainer_cli.terminal import format_clock, is_terminal, stamp

STYLES = ("auto", "rich", "plain", "off")


class ConsoleLogger(Logger):
    """Shows step, metrics, rate and remaining time.

    `style` is auto, rich, plain or off; null takes `logging.console`. `rich` is a bar that a thread draws four times a
    second, and above it a table with a row for each evaluation, and at most one other a second. `plain` is one line of
    `key=value` per record, with the time in front if the stream is not a terminal. If the terminal is gone, the display
    ends and the training continues.
    """

    is_display = True

    def __init__(self, style: str | None = None, stream: TextIO | None = None) -> None:
        if style is not None and style not in STYLES:
            raise UserError(f"console style is {style!r}, but it must be one of {', '.join(STYLES)}")
        self.style = style
        self._given_stream = stream
        self._display: _Display | None = None

    def start(self, facts: RunFacts) -> None:
        """Choose the style by the stream, if it is auto, and begin to show it."""
        stream = self._given_stream or sys.stderr
        style = self.style or facts.console
        if style == "auto":
            style = "rich" if is_terminal(stream) else "plain"
        if style == "rich":
            from trainer_cli.loggers.progress_bar import ProgressBar

            self._display = ProgressBar(stream, facts)
        elif style == "plain":
            self._display = _Lines(stream, facts)

    def log(self, record: Record) -> None:
        """Show a record, unless it has nothing but texts, images, histograms and tables."""
        has_media_alone = record.has_media and not record.metrics
        if self._display is None or has_media_alone:
            return
        try:
            self._display.show(record)
        except OSError:
            # The terminal is gone. A training in the background continues without it.
            self.close()

    def close(self) -> None:
        """Clear what is shown; an error of a terminal that is gone is ignored."""
        display, self._display = self._display, None
        if display is not None:
            try:
                display.close()
            except OSError:
                return


class _Display(Protocol):
    """Shows records."""

    def show(self, record: Record) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """Writes one line of `key=value` per record."""

    def __init__(self, stream: TextIO, facts: RunFacts) -> None:
        self._stream, self._facts = stream, facts
        self._pace = Pace(facts.start_step)
        self._pace.begin(Now(facts.start_step, facts.start_samples), facts.start_time)

    def show(self, record: Record) -> None:
        total = self._facts.total_steps
        texts = [f"step={record.step}" if total is None else f"step={record.step}/{total}", f"epoch={record.epoch:g}"]
        texts += [f"{key}={value:.4g}" for key, value in record.metrics.items() if key != RATE_KEY]
        line = " ".join([*texts, *self._speed(record)])
        self._stream.write(f"{stamp(self._stream, record.time)}{line}\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()

    def _speed(self, record: Record) -> Iterator[str]:
        """The rate, as logged or measured over the last minute, and the remaining time."""
        present = self._facts.now() if self._facts.now else Now(record.step)
        progress = replace(present, step=record.step, samples=record.samples or 0, activity="")
        self._pace.read(progress, record.time)
        rate, unit = (record.metrics[RATE_KEY], "samples") if RATE_KEY in record.metrics else self._pace.rate
        if rate:
            yield f"{unit}/s={rate:.0f}" if rate >= 100 else f"{unit}/s={rate:.3g}"
        remaining = self._pace.end_s(progress, self._facts.total_steps, record.time)
        if remaining is not None:
            yield f"eta={format_clock(remaining[0])}"
