"""Show metrics on stderr: a progress bar on a terminal, plain lines elsewhere.

A thread draws the bar on the bottom line from counts that the training keeps anyway. The terminal itself reserves the
line (DECSTBM, as `apt` does), so that output of other threads, data workers and C libraries scrolls above it, and a
debugger's prompt works. Each drawing is one write, so no other output comes in between.
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
"""The rate is measured over the last minute, or over the last two steps if they took longer."""


@dataclass(frozen=True, slots=True)
class _Mark:
    time: float
    train_s: float
    step: int
    samples: int


class Pace:
    """Rate and remaining time of a training, without the pauses for evaluations and saves.

    Args:
        start_step: the first step of this process.
    """

    def __init__(self, start_step: int) -> None:
        self._start_step = start_step
        self._marks: deque[_Mark] = deque()

    def begin(self, now: Now, time: float) -> None:
        """Measure from now, and not from the end of the first step."""
        self._marks.append(_Mark(time, time, now.step, now.samples))

    def read(self, now: Now, time: float) -> None:
        """Record the counts of a moment, if a step has ended since the last call."""
        if now.step == (self._marks[-1].step if self._marks else self._start_step):
            return
        paused = sum(pause.seconds for pause in now.pauses)
        self._marks.append(_Mark(time, time - paused, now.step, now.samples))
        # Two marks stay, because a rate needs a difference, however long a step takes.
        while len(self._marks) > 2 and self._marks[1].time < time - _WINDOW_S:
            self._marks.popleft()

    @property
    def begun(self) -> bool:
        """Whether a step of this process has ended."""
        return bool(self._marks)

    @property
    def steps_per_s(self) -> float | None:
        """Optimizer steps per second of training; None before the second reading."""
        return self._per_s(self._marks[-1].step - self._marks[0].step) if self._marks else None

    @property
    def shown(self) -> str:
        """The rate as text: samples per second, or steps if samples are not counted; empty before two readings."""
        samples = self._per_s(self._marks[-1].samples - self._marks[0].samples) if self._marks else None
        if samples:
            return f"{format_rate(samples)} samples/s"
        return f"{format_rate(self.steps_per_s)} steps/s" if self.steps_per_s else ""

    def eta_s(self, now: Now, total_steps: int, time: float) -> float | None:
        """Seconds until the last step, including future evaluations and saves; None if it is unknown."""
        rate = self.steps_per_s
        if not rate:
            return None
        last = self._marks[-1]
        remaining_s = (total_steps - last.step) / rate
        remaining_s += sum(_future_pauses_s(pause, self._start_step, total_steps) for pause in now.pauses)
        # During an evaluation or a save no step progresses, so the time since the last step is not subtracted.
        return remaining_s if now.activity else max(remaining_s - (time - last.time), 0.0)

    def _per_s(self, count: int) -> float | None:
        seconds = self._marks[-1].train_s - self._marks[0].train_s
        return count / seconds if seconds > 0 else None


def _future_pauses_s(pause: Pauses, start_step: int, total_steps: int) -> float:
    """Seconds of future pauses, if they are as frequent and as long as before."""
    steps = pause.last_step - start_step
    if not pause.count or steps <= 0:
        return 0.0
    return (total_steps - pause.last_step) * pause.count // steps * pause.seconds / pause.count


_SAVE, _RESTORE, _TO_END = "\x1b7", "\x1b8", "\x1b[J"
_FEWEST_ROWS = 4


class BottomLine:
    """Reserves the bottom line of the terminal of a stream, from `draw` to `close`."""

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
        """Show a line, which may have colours. The size of the terminal is read anew; a very low one shows nothing.

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
        """Clear and release the line."""
        # A forked child, such as a data worker, must not change the terminal when it exits.
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
        # Not by the stream, which may split a drawing into several writes.
        content = text.encode(errors="replace")
        while content:
            content = content[os.write(self._number, content) :]


_DRAW_S = 0.25
_SLOW_S = 2.0
"""Without a step for this long, the bar shows the time since the last one."""
_LONGEST_BAR, _SHORTEST_BAR = 30, 8
_JOIN_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")


class ProgressBar:
    """Shows step, rate, remaining time, loss, last save and memory on the bottom line, and evaluations above it."""

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
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if facts.now is not None:
            SAVES.addHandler(self._saves)
            warnings.formatwarning = self._wrapped_warning
            self._draw()
            # A daemon: an error that skips `close` must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="progress-bar", daemon=True)
            self._thread.start()

    def show(self, record: Record) -> None:
        """Show a record: the loss in the bar, an evaluation as a line."""
        if "train/loss" in record.metrics:
            self._loss = f"loss {record.metrics['train/loss']:.4g}"
        metrics = {key: value for key, value in record.metrics.items() if not key.startswith("train/")}
        if not metrics:
            return
        if "train/loss" in record.metrics:
            metrics = {"train/loss": record.metrics["train/loss"], **metrics}
        numbers = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        line = f"{position(record.step, self._facts)}  {numbers}"
        self._stream.write(f"{wrapped(line, self._line.columns)}\n")
        self._stream.flush()

    def close(self) -> None:
        """Stop the thread and clear the line."""
        self._stopped.set()
        if self._thread is not None:
            # With a limit: a write to a terminal that is stopped (Ctrl-S) blocks without end.
            self._thread.join(_JOIN_S)
        SAVES.removeHandler(self._saves)
        warnings.formatwarning = self._format_warning
        # Last: the thread must no longer draw on a line that is released.
        self._line.close()

    def _wrapped_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        return wrapped(self._format_warning(message, category, filename, lineno, line), self._line.columns)

    def _run(self) -> None:
        while not self._stopped.wait(_DRAW_S):
            try:
                self._draw()
            except OSError:
                # The terminal is gone, and the training continues.
                return

    def _draw(self) -> None:
        assert self._facts.now is not None
        # A background process that writes to the terminal would draw over the shell's prompt.
        if not _in_foreground(self._stream):
            return
        self._line.draw(self.text(self._facts.now(), time.monotonic(), self._line.columns))

    def text(self, now: Now, seconds: float, width: int) -> str:
        """The bar at a moment, at most `width` columns; the least important parts are left out first."""
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        self._pace.read(now, seconds)
        if self._seen is None or now.step != self._seen[0]:
            self._seen = now.step, seconds
        parts = list(self._parts(now, seconds - self._seen[1], seconds))
        # The width depends on the terminal alone, so that the bar does not jump as numbers grow.
        length = max(min(width - 70, _LONGEST_BAR), _SHORTEST_BAR)
        while len(parts) > 1 and len("  ".join(text for _, text in parts)) + length + 1 > width:
            parts.remove(max(parts, key=lambda ranked: ranked[0]))
        words = "  ".join(text for _, text in parts)
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
        """The parts in order, each with its rank; the highest rank is left out first."""
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
        eta_s = None if facts.total_steps is None else pace.eta_s(now, facts.total_steps, seconds)
        if eta_s is not None:
            yield 3, f"ETA {format_clock(eta_s)}"
        if self._saves.last:
            yield 5, self._saves.last
        yield 7, f"RAM {format_bytes(_host_bytes())}"
        if gpu := _gpu_bytes():
            yield 6, f"GPU {format_bytes(gpu)}"


class _Saves(logging.Handler):
    """Keeps the last message about a save, and marks its log record as shown."""

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
    """Resident memory of this process; without /proc its maximum so far."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _gpu_bytes() -> int:
    """GPU memory that PyTorch holds in this process; 0 without a GPU in use."""
    torch = sys.modules.get("torch")
    # A logger must neither load torch nor initialise CUDA, which takes seconds.
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())


def _in_foreground(stream: TextIO) -> bool:
    """Whether this process is in the foreground of the terminal, and not suspended by a shell."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True


STYLES = ("auto", "rich", "plain", "off")
_RATE_KEY = "train/samples_per_s"


class ConsoleLogger(Logger):
    """Shows step, metrics, rate and remaining time.

    `style` is auto, rich, plain or off; null takes `logging.console`. `rich` is a bar that a thread draws four times a
    second, with evaluations as lines above it. `plain` is one line per record, with the time in front if the stream is
    no terminal. If the terminal is gone, the display ends and the training continues.
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
    """Writes one line per record."""

    def __init__(self, stream: TextIO, facts: RunFacts) -> None:
        self._stream, self._facts = stream, facts
        self._pace = Pace(facts.start_step)
        self._pace.begin(Now(facts.start_step, facts.start_samples), facts.start_time)

    def show(self, record: Record) -> None:
        numbers = "  ".join(f"{key} {value:.4g}" for key, value in record.metrics.items() if key != _RATE_KEY)
        texts = (position(record.step, self._facts), numbers, *self._speed(record))
        line = "  ".join(text for text in texts if text)
        self._stream.write(f"{stamp(self._stream, record.time)}{line}\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()

    def _speed(self, record: Record) -> Iterator[str]:
        """The rate, as logged or measured over the last minute, and the remaining time."""
        now = Now(record.step, record.samples or 0, pauses=self._facts.now().pauses if self._facts.now else ())
        self._pace.read(now, record.time)
        if _RATE_KEY in record.metrics:
            yield f"{format_rate(record.metrics[_RATE_KEY])} samples/s"
        elif speed := self._pace.shown:
            yield speed
        total = self._facts.total_steps
        eta_s = None if total is None else self._pace.eta_s(now, total, record.time)
        if eta_s is not None:
            yield f"ETA {format_clock(eta_s)}"
