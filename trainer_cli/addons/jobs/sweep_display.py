"""A live table of the jobs of a sweep on a terminal: state, step, best metric and time left, and one bar over all."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from trainer_cli.addons.jobs.sweep_table import NOT_BEGUN, QUEUED, STATE_COLOURS, JobStatus, short_names
from trainer_cli.loggers import BarStyle, BottomLines
from trainer_cli.policy import BestRule
from trainer_cli.runs import BestSettings, Run, RunDir, RunView
from trainer_cli.steps import RunStatus
from trainer_cli.terminal import (
    LOADING_TORCH,
    cell_width,
    cut_begin,
    cut_end,
    format_clock,
    format_count,
    padded,
    painted,
)

_DRAW_S = 1.0
_MOST_RECORDS = 100_000
_LONGEST_BAR = 30
_FEWEST_JOBS = 3
_ORDER = (RunStatus.running, QUEUED, RunStatus.failed, RunStatus.killed, RunStatus.stopped, RunStatus.finished)
_STARTING = "starting"
_HEADER = ("job", "state", "step", "best", "ETA")


class SweepDisplay:
    """Draws the table at the bottom of a terminal, from `update` to `close`, at most once a second.

    Args:
        runs: run of each job by its name, in the order of the sweep.
        settings: what the configs of all jobs say about which is best.
        prunes: whether jobs are paused. How much is left then depends on results, and is not shown.
    """

    def __init__(
        self, stream: TextIO, runs: Mapping[str, RunDir], settings: BestSettings, prunes: bool = False
    ) -> None:
        self._stream, self._runs, self._settings, self._prunes = stream, runs, settings, prunes
        self._lines = BottomLines(stream)
        self._style = BarStyle(stream)
        self._rows: Sequence[JobStatus] = ()
        self._running: dict[str, Run] = {}
        self._views: dict[str, RunView | None] = {}
        """The states of the running jobs at the last drawing."""
        self._began: float | None = None
        """Monotonic time of the first drawing."""
        self._has_started = False
        """Whether a job has run."""
        self._first_share = 0.0
        """The share that was done at the first drawing, as after a resume."""
        self._drawn_at = -math.inf

    def update(self, rows: Sequence[JobStatus]) -> None:
        """Take over the states of the jobs, in the order of the sweep."""
        self._rows = rows
        running = [row for row in rows if row.status == RunStatus.running]
        # A search draws runs that were not known at the beginning.
        paths = {row.key: self._runs[row.key].path if row.key in self._runs else row.run_dir for row in running}
        self._running = {key: self._running.get(key) or Run(path, newest=_MOST_RECORDS) for key, path in paths.items()}
        self._has_started = self._has_started or bool(running)
        self._drawn_at = -math.inf

    def draw_if_due(self) -> None:
        """Draw, unless that was done less than a second ago."""
        seconds = time.monotonic()
        if seconds - self._drawn_at < _DRAW_S or not self._rows:
            return
        self._drawn_at = seconds
        self._views = {key: run.look(time.time()) for key, run in self._running.items()}
        try:
            self._lines.draw(self.text(seconds, self._lines.columns, self._lines.rows))
        except OSError:
            # The terminal is gone, and the jobs continue.
            return

    def close(self) -> None:
        """Clear the table."""
        try:
            self._lines.close()
        except OSError:
            return

    def text(self, seconds: float, width: int, height: int) -> list[str]:
        """The lines of the table: header, jobs and bar. Jobs without room are counted in the last line of jobs.

        Args:
            seconds: the time now, on the monotonic clock.
            width, height: of the terminal, in columns and lines.
        """
        rows = sorted(self._rows, key=lambda row: _ORDER.index(row.status) if row.status in _ORDER else len(_ORDER))
        # A job that has not begun has nothing to show but its name.
        begun = [row for row in rows if row.status != NOT_BEGUN]
        most = max(height // 2 - 2, _FEWEST_JOBS)
        # The count of the jobs that are not shown takes a line.
        shown = begun if len(begun) + (len(begun) < len(rows)) <= most else begun[: most - 1]
        measured = {name for run in self._running.values() for name in self._best(run)}
        rule = self._settings.rule(measured.union(*(row.best for row in rows)))
        cells = [self._cells(row, rule) for row in shown]
        header = list(_HEADER if rule is None else (*_HEADER[:3], f"best {rule.metric}", _HEADER[4]))
        if any(row.devices for row in shown):
            header.append("device")
            cells = [[*texts, row.devices] for texts, row in zip(cells, shown, strict=True)]
        widths = [max(map(cell_width, column)) for column in zip(header, *cells, strict=True)]
        # Only the names, in the first column, are shortened to fit.
        widths[0] = max(min(widths[0], width - sum(widths[1:]) - 2 * len(widths)), 8)
        for texts, name in zip(cells, _names(shown, self._rows, widths[0]), strict=True):
            texts[0] = name
        widths[0] = max([cell_width(header[0]), *(min(cell_width(texts[0]), widths[0]) for texts in cells)])
        lines = [painted(_join(header, widths), "dim", self._stream)] if shown else []
        for texts in cells:
            line, state = cut_end(_join(texts, widths), width), texts[1]
            colour = STATE_COLOURS.get(state, "dim")
            lines.append(line.replace(f"  {state}", f"  {painted(state, colour, self._stream)}", 1))
        hidden = Counter(row.status for row in rows)
        hidden.subtract(row.status for row in shown)
        if states := ", ".join(f"{count:,} {status}" for status, count in hidden.items() if count):
            more = f"… and {hidden.total():,} more: {states}" if shown else states
            lines.append(painted(cut_end(more, width), "dim", self._stream))
        return [*lines, self._bar(seconds, width)]

    def _cells(self, row: JobStatus, rule: BestRule | None) -> list[str]:
        """The cells of a job, as `_HEADER` names them; those of a running one from what it has written last."""
        run, view = self._running.get(row.key), self._views.get(row.key)
        step = row.step if view is None or view.step is None else view.step
        total = "" if view is None or view.total_steps is None else f"/{view.total_steps:,}"
        values = row.best if run is None else self._best(run)
        best = None if rule is None else values.get(rule.metric, {}).get("value")
        # The process imports torch, and makes data and model.
        is_starting = row.status == RunStatus.running and (view is None or view.step is None)
        return [
            row.key,
            _STARTING if is_starting else row.status,
            "" if step is None else f"{step:,}{total}",
            f"{best:.4g}" if isinstance(best, int | float) else "",
            format_clock(view.eta_s) if view is not None and view.eta_s is not None else "",
        ]

    def _best(self, run: Run) -> Mapping[str, Mapping[str, Any]]:
        """The best values so far of a running job, as a summary holds them."""
        return self._settings.summarize(run.ranges)[0]

    def _bar(self, seconds: float, width: int) -> str:
        """The bar over all jobs, unless some are paused; the counts and times for which there is room."""
        waiting = (NOT_BEGUN, QUEUED, RunView.PAUSED)
        shares = [
            _share(self._views.get(row.key)) if row.key in self._running else float(row.status not in waiting)
            for row in self._rows
        ]
        share = sum(shares) / len(shares)
        if self._began is None:
            self._began, self._first_share = seconds, share
        elapsed_s = seconds - self._began
        ended = sum(
            value == 1.0 and row.key not in self._running for row, value in zip(self._rows, shares, strict=True)
        )
        counts = Counter(row.status for row in self._rows)
        # Each with its rank; the highest rank is left out first where the terminal is narrow.
        # Before the first job runs, the server of the forks imports torch.
        starting = [] if self._has_started else [(0, LOADING_TORCH)]
        parts = [*starting, (0, f"{ended}/{format_count(len(self._rows), 'job')}")]
        if not self._prunes:
            parts.append((2, f"{int(100 * share)}%"))
        parts += [
            (rank, f"{counts[status]:,} {status}")
            for rank, status in (
                (4, RunStatus.running),
                (4, RunView.PAUSED),
                (1, RunStatus.failed),
                (1, RunStatus.killed),
            )
            if counts[status]
        ]
        parts.append((5, f"elapsed {format_clock(elapsed_s)}"))
        if share > self._first_share and not self._prunes:
            parts.append((3, f"ETA {format_clock(elapsed_s * (1 - share) / (share - self._first_share))}"))
        length = max(min(width - 60, _LONGEST_BAR), min(8, width // 4))
        while len(parts) > 1 and length + 1 + len("  ".join(text for _, text in parts)) > width:
            parts.remove(max(parts))
        words = cut_end("  ".join(text for _, text in parts), max(width - length - 1, 0))
        return words if self._prunes else f"{self._style.bar(share, length)} {words}"


def _share(view: RunView | None) -> float:
    """The fraction of its steps that a running job has made."""
    return view.step / view.total_steps if view and view.step is not None and view.total_steps else 0.0


def _names(shown: Sequence[JobStatus], rows: Sequence[JobStatus], width: int) -> list[str]:
    """The names of the jobs that are shown: whole if they fit, else by what differs between all jobs: short keys and
    values, or values alone."""
    names = [row.key for row in shown]
    if max(map(cell_width, names), default=0) <= width:
        return names
    keys = list(dict.fromkeys(key for row in rows for key in row.swept))
    differing = [key for key in keys if len({row.swept.get(key) for row in rows}) > 1]
    short = short_names(keys)
    shortened = [
        [",".join(f"{short[key]}={row.swept.get(key, '')}" for key in differing) for row in shown],
        [",".join(row.swept.get(key, "") for key in differing) for row in shown],
    ]
    if not differing:
        return names
    return next((names for names in shortened if max(map(cell_width, names)) <= width), shortened[-1])


def _join(texts: Sequence[str], widths: Sequence[int]) -> str:
    """The cells in columns: names and states on the left, numbers on the right. A long name is cut at its begin."""
    cells = []
    for index, (text, width) in enumerate(zip(texts, widths, strict=True)):
        # The names of jobs differ at their ends.
        cells.append(padded(cut_begin(text, width), width, right=index >= 2))
    return "  ".join(cells).rstrip()
