"""The bar of a training on a terminal: drawn by a thread, by the clock, from counts that the training keeps anyway."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from trainer_cli.loggers.base import SAVES, Now, Record, RunFacts
from trainer_cli.loggers.bottom_line import BottomLine
from trainer_cli.loggers.eta import Pace, clock
from trainer_cli.terminal import has_colours, wrapped

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
            doing = f"{doing} {clock(idle)}" if doing else f"({clock(idle)})"
        if doing:
            yield 1, doing
        if self._loss:
            yield 2, self._loss
        if pace.shown:
            yield 4, pace.shown
        left = None if facts.total_steps is None else pace.left_s(now, facts.total_steps, seconds)
        if left is not None:
            yield 3, f"ETA {clock(left)}"
        if self._saves.last:
            yield 5, self._saves.last
        yield 7, f"RAM {memory(_host_bytes())}"
        if gpu := _gpu_bytes():
            yield 6, f"GPU {memory(gpu)}"


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


def memory(count: int) -> str:
    """Bytes in GB, or in MB below one."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


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
