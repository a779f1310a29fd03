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
        if self._display is None or (not record.metrics and record.has_media):
            return
        try:
            self._display.show(record)
        # The terminal is gone. A training in the background continues without it.
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
        latest = self._facts.now() if self._facts.now else Now(record.step)
        now = replace(latest, step=record.step, samples=record.samples or 0, activity="")
        self._pace.read(now, record.time)
        rate, unit = (record.metrics[RATE_KEY], "samples") if RATE_KEY in record.metrics else self._pace.rate
        if rate:
            yield f"{unit}/s={rate:.0f}" if rate >= 100 else f"{unit}/s={rate:.3g}"
        end = self._pace.end_s(now, self._facts.total_steps, record.time)
        if end is not None:
            yield f"eta={format_clock(end[0])}"
