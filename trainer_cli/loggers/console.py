"""Metrics on stderr: a live bar on a terminal, plain lines elsewhere.

Rate and time left of a training, from a few readings of its counts; pauses for evaluations and saves set apart.

The bottom line of a terminal, kept for a display; whatever is printed scrolls above it.

The terminal itself does this (DECSTBM, as `apt` uses it): lines of other threads, of data workers and of libraries in
C come out whole, and a debugger's prompt can be typed at. Each drawing is one write, so nothing comes in between.

The bar of a training on a terminal: drawn by a thread, by the clock, from counts that the training keeps anyway.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from trainer_cli.errors import UserError
from trainer_cli.loggers.base import SAVES, Logger, Now, Pauses, Record, RunFacts
from trainer_cli.terminal import (
    columns,
    format_bytes,
    format_clock,
    format_rate,
    has_colours,
    is_terminal,
    stamp,
    wrapped,
)

_WINDOW_S = 60.0
"""The rate is that of the last minute, or of the last two steps if they took longer."""


@dataclass(frozen=True, slots=True)
class _Mark:
    time: float
    train_s: float
    step: int
    samples: int


class Pace:
    """How fast a training goes, and how long it will still take.

    Args:
        start_step: the step that this process began at.
    """

    def __init__(self, start_step: int) -> None:
        self._start_step = start_step
        self._marks: deque[_Mark] = deque()

    def begin(self, now: Now, time: float) -> None:
        """Take this moment as the first, instead of the end of the first step: that one may be slow."""
        self._marks.append(_Mark(time, time, now.step, now.samples))

    def read(self, now: Now, time: float) -> None:
        """Note the counts of a moment; only steps that were made since the last call count."""
        if now.step == (self._marks[-1].step if self._marks else self._start_step):
            return
        paused = sum(pause.seconds for pause in now.pauses)
        self._marks.append(_Mark(time, time - paused, now.step, now.samples))
        while len(self._marks) > 2 and self._marks[1].time < time - _WINDOW_S:
            self._marks.popleft()

    @property
    def begun(self) -> bool:
        """Whether a step of this process is done."""
        return bool(self._marks)

    @property
    def steps_per_s(self) -> float | None:
        """Optimizer steps per second of training; None before the second reading."""
        return self._per_s(self._marks[-1].step - self._marks[0].step) if self._marks else None

    @property
    def shown(self) -> str:
        """Samples, or steps if samples are not counted, per second of training; empty before the second reading."""
        samples = self._per_s(self._marks[-1].samples - self._marks[0].samples) if self._marks else None
        if samples:
            return f"{format_rate(samples)} samples/s"
        return f"{format_rate(self.steps_per_s)} steps/s" if self.steps_per_s else ""

    def left_s(self, now: Now, total_steps: int, time: float) -> float | None:
        """Seconds until the last step, with the evaluations and saves to come; None if that is not known yet."""
        rate = self.steps_per_s
        if not rate:
            return None
        last = self._marks[-1]
        left = (total_steps - last.step) / rate
        left += sum(_pauses_left(pause, self._start_step, total_steps) for pause in now.pauses)
        return left if now.activity else max(left - (time - last.time), 0.0)

    def _per_s(self, count: int) -> float | None:
        seconds = self._marks[-1].train_s - self._marks[0].train_s
        return count / seconds if seconds > 0 else None


def _pauses_left(pause: Pauses, start_step: int, total_steps: int) -> float:
    """Seconds of the pauses to come, if they come as often as before and take as long."""
    made = pause.last_step - start_step
    if not pause.count or made <= 0:
        return 0.0
    return (total_steps - pause.last_step) * pause.count // made * pause.seconds / pause.count


_SAVE, _RESTORE, _TO_END = "\x1b7", "\x1b8", "\x1b[J"
_FEWEST_ROWS = 4


class BottomLine:
    """Keeps the bottom line of the terminal that a stream is connected to, from `draw` to `close`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._size: tuple[int, int] | None = None
        self._pid = os.getpid()
        try:
            self._number: int | None = stream.fileno()
        except (OSError, ValueError):
            self._number = None  # Text in memory, as in tests.

    @property
    def columns(self) -> int:
        """Columns that a line may have: one less than the terminal, whose last one would wrap."""
        return max(columns(self._stream) - 1, 1)

    def draw(self, line: str) -> None:
        """Show a line, which may have colours. A terminal that changed its size, or is too low, is taken note of.

        Raises:
            OSError: the terminal is gone.
        """
        size = self._present_size()
        if size != self._size:
            self.close()
            if size[1] < _FEWEST_ROWS:
                return
            self._size = size
            atexit.register(self.close)
            # The new line moves the cursor off the bottom; setting the region would move it to the top.
            self._write(f"\n{_SAVE}\x1b[1;{size[1] - 1}r{_RESTORE}\x1b[1A")
        self._write(f"{_SAVE}\x1b[{size[1]};1H\x1b[2K{line}{_RESTORE}")

    def close(self) -> None:
        """Give the line back, empty."""
        if self._size is None or os.getpid() != self._pid:
            return
        self._size = None
        atexit.unregister(self.close)
        self._write(f"{_SAVE}\x1b[r{_RESTORE}{_TO_END}")

    def _present_size(self) -> tuple[int, int]:
        try:
            return tuple(os.get_terminal_size(self._number)) if self._number is not None else (80, 24)  # type: ignore[return-value]
        except OSError:
            return (80, 24)

    def _write(self, text: str) -> None:
        if self._number is None:
            self._stream.write(text)
            return
        left = text.encode(errors="replace")
        while left:
            left = left[os.write(self._number, left) :]


_DRAW_S = 0.25
_SLOW_S = 2.0
"""After so long without a step the bar says how long it has been."""
_LONGEST_BAR, _SHORTEST_BAR = 30, 8
_JOIN_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")


class ProgressBar:
    """Step, rate, time left, last loss, last save and memory on the bottom line; evaluations as lines above it."""

    def __init__(self, stream: TextIO, facts: RunFacts) -> None:
        from rich.console import Console
        from rich.spinner import Spinner

        self._stream, self._facts = stream, facts
        self._line = BottomLine(stream)
        self._out = io.StringIO()
        self._console = Console(file=self._out, force_terminal=True, no_color=not has_colours(stream))
        utf8 = (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
        self._spinner = Spinner("dots" if utf8 else "line")
        self._pace = Pace(facts.start_step)
        self._loss = ""
        self._seen: tuple[int, float] | None = None
        self._saves = _Saves()
        self._format_warning = warnings.formatwarning
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if facts.now is not None:
            SAVES.addHandler(self._saves)
            warnings.formatwarning = self._wrapped_warning
            self._draw()
            self._thread = threading.Thread(target=self._run, name="progress-bar", daemon=True)
            self._thread.start()

    def show(self, record: Record) -> None:
        """Take a record: the loss into the bar, an evaluation as a line."""
        if "train/loss" in record.metrics:
            self._loss = f"loss {record.metrics['train/loss']:.4g}"
        found = {key: value for key, value in record.metrics.items() if not key.startswith("train/")}
        if not found:
            return
        if "train/loss" in record.metrics:
            found = {"train/loss": record.metrics["train/loss"], **found}
        numbers = "  ".join(f"{key} {value:.4g}" for key, value in found.items())
        line = f"{position(record.step, self._facts)}  {numbers}"
        self._stream.write(f"{wrapped(line, self._line.columns)}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the thread, and clear the line."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        SAVES.removeHandler(self._saves)
        warnings.formatwarning = self._format_warning
        self._line.close()

    def _wrapped_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        return wrapped(self._format_warning(message, category, filename, lineno, line), self._line.columns)

    def _run(self) -> None:
        while not self._over.wait(_DRAW_S):
            try:
                self._draw()
            except OSError:
                return  # The terminal is gone, and the training goes on.

    def _draw(self) -> None:
        assert self._facts.now is not None
        if not _in_foreground(self._stream):
            return
        self._line.draw(self.text(self._facts.now(), time.monotonic(), self._line.columns))

    def text(self, now: Now, seconds: float, width: int) -> str:
        """The bar at a moment, not longer than `width`; what matters least is left out first."""
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        self._pace.read(now, seconds)
        if self._seen is None or now.step != self._seen[0]:
            self._seen = now.step, seconds
        parts = list(self._parts(now, seconds - self._seen[1], seconds))
        # Of one width as long as the terminal is, so that it does not jump as numbers grow.
        length = max(min(width - 70, _LONGEST_BAR), _SHORTEST_BAR)
        while len(parts) > 1 and len("  ".join(part for _, part in parts)) + length + 1 > width:
            parts.remove(max(parts, key=lambda part: part[0]))
        words = "  ".join(part for _, part in parts)
        total = self._facts.total_steps
        grid = Table.grid(padding=(0, 1, 0, 0))
        if total is None or not self._pace.begun:
            sign = self._spinner.render(seconds)
        else:
            sign = Bar(total, now.step, width=max(min(length, width - len(words) - 1), 1))
        grid.add_row(sign, Text(words, no_wrap=True, overflow="ellipsis"))
        self._out.seek(0)
        self._out.truncate()
        self._console.width = width
        self._console.print(grid, end="")
        return self._out.getvalue().rstrip("\n")

    def _parts(self, now: Now, idle: float, seconds: float) -> Iterator[tuple[int, str]]:
        """The parts in order, each with a number that is the larger, the less it matters."""
        facts, pace = self._facts, self._pace
        yield 0, position(now.step, facts)
        doing = now.activity or ("" if pace.begun else "waiting for the first step")
        if idle >= _SLOW_S:
            doing = f"{doing} {format_clock(idle)}" if doing else f"({format_clock(idle)})"
        if doing:
            yield 1, doing
        if self._loss:
            yield 2, self._loss
        if pace.shown:
            yield 4, pace.shown
        left = None if facts.total_steps is None else pace.left_s(now, facts.total_steps, seconds)
        if left is not None:
            yield 3, f"ETA {format_clock(left)}"
        if self._saves.last:
            yield 5, self._saves.last
        yield 7, f"RAM {format_bytes(_host_bytes())}"
        if gpu := _gpu_bytes():
            yield 6, f"GPU {format_bytes(gpu)}"


class _Saves(logging.Handler):
    """Keeps the last message about a save, and marks the record as shown."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            record.in_bar = True
            if record.args and record.msg.startswith("committed"):
                self.last = f"saved {record.args[0]:,}"  # type: ignore[index]


def position(step: int, facts: RunFacts) -> str:
    """`step 1,234/10,000`."""
    return f"step {step:,}" if facts.total_steps is None else f"step {step:,}/{facts.total_steps:,}"


def _host_bytes() -> int:
    """Memory of this process in use; without /proc the most so far."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _gpu_bytes() -> int:
    """GPU memory that PyTorch holds in this process; 0 without a GPU in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())


def _in_foreground(stream: TextIO) -> bool:
    """Whether the terminal is this process's at the moment, and not that of the shell that put it aside."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True


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
            yield f"{format_rate(record.metrics[_RATE_KEY])} samples/s"
        elif speed := self._pace.shown:
            yield speed
        total = self._facts.total_steps
        left = None if total is None else self._pace.left_s(now, total, record.time)
        if left is not None:
            yield f"ETA {format_clock(left)}"
