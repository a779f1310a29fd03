"""A progress bar on the bottom line of a terminal, a status line above it, and records as rows of a table.

A thread draws four times a second from counts that the training keeps anyway, also while a step takes long.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from trainer_cli.loggers.base import RATE_KEY, SAVES, Now, Record, RunFacts
from trainer_cli.loggers.bottom_lines import BottomLines
from trainer_cli.loggers.marks import loader_of
from trainer_cli.loggers.metric_table import LOSS, BestValues, MetricTable
from trainer_cli.loggers.pace import Pace, position
from trainer_cli.memory import peak_resident_bytes, resident_bytes
from trainer_cli.terminal import (
    cell_width,
    cut_end,
    format_bytes,
    format_clock,
    format_rate,
    has_colours,
    is_utf8,
    padded,
    painted,
    wrapped,
)

_DRAW_S = 0.25
_ROW_S = 1.0
"""Least time between two rows of the table that are of no evaluation. The files have all records."""
_SLOW_S = 2.0
"""Without a step for this long, the bar shows the time since the last one."""
_LONGEST_BAR, _SHORTEST_BAR = 30, 8
_JOIN_S = 5.0
_GAP = "  "


class ProgressBar:
    """Shows the progress on the bottom line, saves on the line above it, and above that as rows each evaluation and at
    most one other record a second."""

    def __init__(self, stream: TextIO, facts: RunFacts) -> None:
        self._stream, self._facts = stream, facts
        self._lines = BottomLines(stream)
        self._table = MetricTable(facts, stream)
        self._best = BestValues(facts)
        self._pace = Pace(facts.start_step)
        self._style = BarStyle(stream)
        self._loss: float | None = None
        self._averaged = False
        """Whether the validation sets are evaluated with an average of the weights."""
        self._last_step: tuple[int, float] | None = None
        """The last step that was drawn, and when it was first drawn."""
        self._saves = _Saves()
        self._format_warning = warnings.formatwarning
        # Rows are written by the thread of the training and by the one that draws.
        self._lock = threading.Lock()
        self._waiting: tuple[Record, set[str]] | None = None
        """The record of the next row, and its metrics that are the best so far."""
        self._row_at = float("-inf")
        self._began = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if facts.now is not None:
            SAVES.addHandler(self._saves)
            warnings.formatwarning = self._wrapped_warning
            # An error of a terminal that is gone comes again in the thread, which then ends.
            with suppress(OSError):
                self._draw()
            # A daemon: an error that skips `close` must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="progress-bar", daemon=True)
            self._thread.start()

    def show(self, record: Record) -> None:
        """Show a record as a row: one of a validation set at once, another when a second has passed since the last row.
        If more than one waits, the newest is shown.
        """
        facts = self._facts
        self._loss = record.metrics.get(LOSS, self._loss)
        is_evaluation = any("/" in name and loader_of(name, facts.loaders) in facts.loaders for name in record.metrics)
        # Not where the row is written, which the thread may do: it must not read the state of a callback.
        if facts.average is not None:
            self._averaged = facts.average() is not None
        with self._lock:
            self._waiting = record, self._best.update(record.metrics)
            self._write_row(time.monotonic(), at_once=is_evaluation)

    def close(self) -> None:
        """Stop the thread, write the row that waits, and clear the lines."""
        self._stopped.set()
        if self._thread is not None:
            # With a limit: a write to a terminal that is stopped (Ctrl-S) blocks without end.
            self._thread.join(_JOIN_S)
        SAVES.removeHandler(self._saves)
        warnings.formatwarning = self._format_warning
        try:
            # Not with the lock, which a thread that blocks in a write may hold.
            self._write_row(time.monotonic(), at_once=True)
        finally:
            # Last: the thread must no longer draw on lines that are released.
            self._lines.close()

    def _write_row(self, seconds: float, *, at_once: bool = False) -> None:
        """Write the record that waits, unless the last row was written less than a second ago."""
        is_early = seconds - self._row_at < _ROW_S and not at_once
        if self._waiting is None or is_early:
            return
        (record, best), self._waiting, self._row_at = self._waiting, None, seconds
        rate = record.metrics.get(RATE_KEY)
        shown = self._pace.shown if rate is None else f"{format_rate(rate)} samples/s"
        lines = self._table.lines(record, shown, self._lines.columns, best=best, averaged=self._averaged)
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()

    def _present_loss(self) -> float | None:
        """The mean loss since the last log if it is known, else the one that was logged last."""
        loss = None if self._facts.loss is None else self._facts.loss()
        return self._loss if loss is None else loss

    def _wrapped_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """A warning of Python as text that fits the terminal."""
        return wrapped(self._format_warning(message, category, filename, lineno, line), self._lines.columns)

    def _run(self) -> None:
        """Draw at intervals, as the thread, and write the row that waits."""
        while not self._stopped.wait(_DRAW_S):
            try:
                self._draw()
                with self._lock:
                    self._write_row(time.monotonic())
            except OSError:
                # The terminal is gone, and the training continues.
                return

    def _draw(self) -> None:
        """Draw the status line and the bar of the present progress."""
        assert self._facts.now is not None
        # A background process that writes to the terminal would draw over the shell's prompt.
        if not _in_foreground(self._stream):
            return
        self._lines.draw(self.text(self._facts.now(), time.monotonic(), self._lines.columns))

    def text(self, now: Now, seconds: float, width: int) -> tuple[str, str]:
        """The status line and the bar at a moment, each of at most `width` columns.

        What the bar has no room for is on the right of the status line, the least important parts first.
        """
        self._pace.read(now, seconds)
        if self._last_step is None or now.step != self._last_step[0]:
            self._last_step = now.step, seconds
        parts = list(self._parts(now, seconds - self._last_step[1], seconds))
        # The width depends on the terminal alone, so that the bar does not jump as numbers grow.
        length = max(min(width - 80, _LONGEST_BAR), min(_SHORTEST_BAR, width // 4))
        moved = []
        while len(parts) > 1 and cell_width(_GAP.join(text for _, text in parts)) + length + 1 > width:
            moved.append(max(parts, key=lambda ranked: ranked[0]))
            parts.remove(moved[-1])
        words = cut_end(_GAP.join(text for _, text in parts), max(width - length - 1, 0))
        share = now.share if self._facts.total_steps is None else now.step / self._facts.total_steps
        sign = self._style.spinner(seconds) if share is None or not self._pace.begun else self._style.bar(share, length)
        return self._status(moved, width), f"{sign} {words}"

    def _status(self, moved: list[tuple[int, str]], width: int) -> str:
        """The last save or removal on the left, and on the right what the bar has no room for."""
        parts = [text for _, text in reversed(moved)]
        host_bytes = resident_bytes() or peak_resident_bytes()
        parts += [f"RAM {format_bytes(host_bytes)}", *(f"GPU {format_bytes(gpu)}" for gpu in _gpu_bytes())]
        message = self._saves.last
        while parts and cell_width(_GAP.join([message, *parts] if message else parts)) > width:
            parts.pop()
        right_text = _GAP.join(parts)
        room = width - len(right_text) - len(_GAP) if right_text else width
        left_text = padded(cut_end(message, room), max(width - len(right_text), 0))
        return painted(f"{left_text}{right_text}".rstrip(), "dim", self._stream)

    def _parts(self, now: Now, idle: float, seconds: float) -> Iterator[tuple[int, str]]:
        """The parts of the bar in order, each with its rank: the highest rank is moved to the status line first.

        Args:
            idle: seconds since the last step.
            seconds: the present time, by a monotonic clock.
        """
        facts, pace = self._facts, self._pace
        total = facts.total_steps
        share = now.share if total is None else now.step / total
        yield 0, position(now.step, facts)
        if share is not None:
            yield 1, f"{int(100 * share)}%"
        if now.epoch is not None:
            yield 5, f"epoch {now.epoch:.1f}"
        activity = now.activity or ("" if pace.begun else "waiting for the first step")
        if idle >= _SLOW_S:
            activity = f"{activity} {format_clock(idle)}" if activity else f"({format_clock(idle)})"
        if activity:
            yield 3, activity
        if (loss := self._present_loss()) is not None:
            yield 4, f"loss {loss:.4g}"
        if pace.shown:
            yield 6, pace.shown
        if pace.begun:
            yield 7, f"elapsed {format_clock(seconds - self._began)}"
        if (end := pace.end_s(now, total, seconds)) is not None:
            end_s, by_max_time = end
            yield 2, f"{'max_time in' if by_max_time else 'ETA'} {format_clock(end_s)}"


class BarStyle:
    """Letters and colours of a bar on a stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        letters = ("━", "╸", "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏") if is_utf8(stream) else ("=", "-", "|/-\\")
        self._full, self._half, self._spinner = letters
        self._empty = self._full if has_colours(stream) else " "

    def bar(self, share: float, length: int) -> str:
        """A bar of `length` letters, of which this share is full, to half a letter."""
        halves = int(min(max(share, 0.0), 1.0) * length * 2)
        full = self._full * (halves // 2) + self._half * (halves % 2)
        return painted(full, "blue", self._stream) + painted(self._empty * (length - len(full)), "dim", self._stream)

    def spinner(self, seconds: float) -> str:
        """A letter that turns, for a length that is unknown."""
        return self._spinner[int(seconds * 8) % len(self._spinner)]


class _Saves(logging.Handler):
    """Keeps the last message about a save or a removal, and marks its log record as shown."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the last message of a save, which the bar shows."""
        if record.levelno == logging.INFO:
            record.in_bar = True
            self.last = record.getMessage()


def _gpu_bytes() -> list[int]:
    """GPU memory that PyTorch holds in this process; empty without a GPU in use."""
    torch = sys.modules.get("torch")
    # A logger must neither load torch nor initialise CUDA, which takes seconds.
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [int(torch.cuda.memory_reserved())]


def _in_foreground(stream: TextIO) -> bool:
    """Whether this process is in the foreground of the terminal, and not suspended by a shell."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True
