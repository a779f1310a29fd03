"""Metrics on stderr: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from trainer_cli.errors import UserError
from trainer_cli.loggers.base import Logger, Record, RunFacts

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STYLES = ("auto", "rich", "plain", "off")
_REDRAW_S = 0.1
_LOSS_KEY = "train/loss"
_RATE_KEY = "train/samples_per_s"


class ConsoleLogger(Logger):
    """Shows step, metrics, rate and remaining time.

    `style` is auto, rich, plain or off; null takes `logging.console`. The live bar is drawn when a record
    comes and needs no thread; records with other than training metrics also leave a line above it. If the terminal is
    gone, the display ends and the training continues.
    """

    def __init__(self, style: str | None = None, stream: TextIO | None = None) -> None:
        if style is not None and style not in STYLES:
            raise UserError(f"console style is {style!r}, but it must be one of {', '.join(STYLES)}")
        self.style = style
        self._given_stream = stream
        self._display: _Display | None = None
        self._facts = RunFacts()
        self._last: tuple[float, int, int | None] = (0.0, 0, None)

    def start(self, facts: RunFacts) -> None:
        self._facts = facts
        self._last = (facts.start_time, facts.start_step, facts.start_samples)
        stream = self._given_stream or sys.stderr
        style = self.style or facts.console
        if style == "auto":
            style = "rich" if stream.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        if style == "rich":
            self._display = _Bar(stream, facts)
        elif style == "plain":
            self._display = _Lines(stream)

    def log(self, record: Record) -> None:
        if self._display is None or (not record.metrics and record.has_media):
            return
        try:
            self._display.show(record, self._position(record), _numbers(record), self._speed(record))
        except OSError:
            self._display = None
        self._last = (record.time, record.step, record.samples)

    def close(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            try:
                display.close()
            except OSError:
                return

    def _position(self, record: Record) -> str:
        total = self._facts.total_steps
        return f"step {record.step:,}" if total is None else f"step {record.step:,}/{total:,}"

    def _speed(self, record: Record) -> str:
        """The rate (measured, else since the last record), and the time left at this process's mean rate."""
        last_time, last_step, last_samples = self._last
        facts, parts = self._facts, []
        seconds, steps = record.time - last_time, record.step - last_step
        if _RATE_KEY in record.metrics:
            parts.append(f"{_rate(record.metrics[_RATE_KEY])} samples/s")
        elif seconds > 0 and steps > 0:
            if record.samples is not None and last_samples is not None:
                parts.append(f"{_rate((record.samples - last_samples) / seconds)} samples/s")
            else:
                parts.append(f"{_rate(steps / seconds)} steps/s")
        done, elapsed = record.step - facts.start_step, record.time - facts.start_time
        if facts.total_steps is not None and done > 0 and elapsed > 0:
            parts.append(f"ETA {_clock(elapsed / done * max(0, facts.total_steps - record.step))}")
        return "  ".join(parts)


class _Display(Protocol):
    """A display of records."""

    def show(self, record: Record, position: str, numbers: str, speed: str) -> None: ...

    def close(self) -> None: ...


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, record: Record, position: str, numbers: str, speed: str) -> None:
        self._stream.write("  ".join(part for part in (position, numbers, speed) if part) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class _Bar:
    def __init__(self, stream: TextIO, facts: RunFacts) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._drawn = 0.0
        self._progress: Progress = Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream, force_terminal=True),
            auto_refresh=False,
        )
        self._task: TaskID = self._progress.add_task(facts.name, total=facts.total_steps, completed=facts.start_step)
        self._progress.start()

    def show(self, record: Record, position: str, numbers: str, speed: str) -> None:
        short = f"loss {record.metrics[_LOSS_KEY]:.4g}" if _LOSS_KEY in record.metrics else ""
        text = "  ".join(part for part in (position, short, speed) if part)
        self._progress.update(self._task, completed=record.step, description=text)
        if any(not key.startswith("train/") for key in record.metrics):
            line = f"{position}  {numbers}"
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if abs(record.time - self._drawn) >= _REDRAW_S:
            self._drawn = record.time
            self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


def _numbers(record: Record) -> str:
    return "  ".join(f"{key} {value:.4g}" for key, value in record.metrics.items() if key != _RATE_KEY)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
