"""`train top [DIR]`: a live table of all runs below a folder, from their files alone."""

from __future__ import annotations

import argparse
import io
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.errors import UserError, first_sentence, one_line
from trainer_cli.runs import RunsBelow, RunView
from trainer_cli.strict_json import strict_json
from trainer_cli.sweep_file import find_jobs, show_paused
from trainer_cli.terminal import (
    COLOURS,
    cell_width,
    cut_begin,
    cut_end,
    format_age,
    format_clock,
    format_rate,
    is_terminal,
)

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """examples:
  train top                      all runs below runs/, until Ctrl-C
  train top runs/digits          a run, and those of its sweep
  train top --once               the table once
  train top --json               one JSON object for each run

goodput: share of a run's time spent computing steps that led to its state, not on data, evaluation, saves or start
"""
_COLUMNS = ("run", "state", "step", "steps/s", "train/loss", "metric", "ETA", "goodput", "checkpoint", "seen", "reason")
_RIGHT = ("step", "steps/s", "train/loss", "metric", "ETA", "goodput", "seen")
_GAP = 2
_MIN_REASON_WIDTH, _MIN_NAME_WIDTH = 12, 8
"""The smallest width at which a reason is shown, and a name is cut to."""
_LEAST_IMPORTANT = ("goodput", "seen", "checkpoint", "steps/s", "train/loss", "metric", "ETA")
"""Columns that a narrow terminal leaves out, in this order."""
_COLOURS = {"running": "green", "stale": "yellow", "stopped": "yellow", RunView.PAUSED: "yellow"}
_UNBOUNDED_WIDTH = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("dir", nargs="?", metavar="DIR", type=Path, default=Path("runs"), help="folder of runs (runs)")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="seconds between two refreshes (2)")
    parser.add_argument("--once", action="store_true", help="print the table once, as if stdout is not a terminal")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each run, once")


def run(args: argparse.Namespace) -> int:
    """Show the table until Ctrl-C, or print it once."""
    if not (math.isfinite(args.every) and args.every > 0):
        raise UserError(f"--every is {args.every:g}, but it must be a positive number of seconds")
    if not args.dir.is_dir():
        raise UserError(f"there is no folder {args.dir}", cure="Name the folder that holds your runs: train top DIR.")
    runs = RunsBelow(args.dir)
    if args.json:
        for view in _look(runs):
            facts = asdict(view)
            print(strict_json({"run": str(facts.pop("path")), **facts}))
    elif args.once or not is_terminal(sys.stdout):
        print(_render_text(_look(runs), args.dir))
    else:
        _follow(runs, args.dir, args.every)
    return 0


def _look(runs: RunsBelow) -> list[RunView]:
    """The states of the runs now."""
    views = runs.look(time.time())
    jobs = find_jobs(view.path for view in views)
    return [show_paused(view, jobs) for view in views]


def _follow(runs: RunsBelow, root: Path, every_s: float) -> None:
    """Redraw the table on a screen of its own, which the terminal drops at the end."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    try:
        # No refresh thread: it would redraw tables that have not changed.
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                views = _look(runs)
                # Without the lines of the heading, the header and the count of hidden rows.
                rows = max(1, console.height - 3)
                hidden = f"{len(views) - rows} more" if len(views) > rows else ""
                heading = f"{_count_states(views, root)}   Ctrl-C ends this view"
                live.update(
                    Group(Text(heading, "bold"), _make_table(views[:rows], root, console.width), Text(hidden, "dim")),
                    refresh=True,
                )
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _render_text(views: Sequence[RunView], root: Path) -> str:
    """The table as plain text, as wide as the terminal, or as its cells if stdout is not a terminal.

    Where reasons are left out, those of failed runs stand below it.
    """
    if not views:
        return _count_states(views, root)
    from rich.console import Console

    out = io.StringIO()
    # In a pipe no cell is cut: a program may read it.
    width = Console().width if sys.stdout.isatty() else _UNBOUNDED_WIDTH
    table = _make_table(views, root, width)
    Console(file=out, width=width, color_system=None).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if str(table.columns[-1].header) != "reason":
        rows = [_cells(view, root, names_metric=False) for view in views if view.state == "failed"]
        lines += [cut_end(f"{cut_begin(row['run'], width // 3)}: {row['reason']}", width) for row in rows]
    return "\n".join(lines)


def _count_states(views: Sequence[RunView], root: Path) -> str:
    """`runs: 2 running, 1 failed`."""
    counts = Counter(view.state for view in views)
    return f"{root}: {', '.join(f'{count} {state}' for state, count in counts.items()) or 'no runs'}"


def _make_table(views: Sequence[RunView], root: Path, width: int) -> Table:
    """The table in `width` columns.

    On a narrow terminal the reason is cut, then left out; then the name of the run is cut, and columns are left out.
    """
    from rich.table import Table
    from rich.text import Text

    # The name of the metric is in the header, unless runs have different ones.
    metrics = {view.metric for view in views if view.metric}
    titles = {name: name for name in _COLUMNS}
    if len(metrics) == 1:
        titles["metric"] = one_line(metrics.pop())
    rows = [_cells(view, root, names_metric=titles["metric"] == "metric") for view in views]
    longest = {name: max(cell_width(titles[name]), *(cell_width(row[name]) for row in rows)) for name in titles if rows}
    # An empty column takes room from the names.
    shown = [name for name in longest if any(row[name] for row in rows)]
    # Columns that are left for the name of the run and the reason.
    room = width - sum(longest[name] + _GAP for name in shown if name not in ("run", "reason"))
    if "reason" in shown and longest["run"] + _GAP + min(longest["reason"], _MIN_REASON_WIDTH) > room:
        shown.remove("reason")
    for name in _LEAST_IMPORTANT:
        if name in shown and min(longest["run"], _MIN_NAME_WIDTH) + _GAP > room:
            shown.remove(name)
            room += longest[name] + _GAP
    grid = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for name in shown:
        grid.add_column(
            Text(titles[name]), justify="right" if name in _RIGHT else "left", no_wrap=True, overflow="ellipsis"
        )
    for row in rows:
        row["run"] = cut_begin(row["run"], max(room - _GAP, _MIN_NAME_WIDTH))
        row["reason"] = cut_end(row["reason"], room - longest["run"] - _GAP)
        colour = COLOURS[_COLOURS.get(row["state"], "red")]
        styles = {"state": "dim" if row["state"] == "finished" else f"color({colour})", "reason": "dim"}
        grid.add_row(*(Text(row[name], styles.get(name, "")) for name in shown))
    return grid


def _cells(view: RunView, root: Path, *, names_metric: bool) -> dict[str, str]:
    """Column -> text of its cell; with `names_metric` the metric is named beside its value."""
    name = str(view.path.relative_to(root)) if view.path != root else view.path.resolve().name
    step = "" if view.step is None else f"{view.step:,}"
    metric = "" if view.value is None else f"{view.value:.4g}"
    if metric and names_metric:
        metric = f"{one_line(view.metric)} {metric}"
    reasons = [" ".join(text.split()) for text in (view.reason, view.problem)]
    return {
        "run": one_line(name),
        "state": view.state,
        "step": f"{step}/{view.total_steps:,}" if step and view.total_steps is not None else step,
        "steps/s": "" if view.steps_per_s is None else format_rate(view.steps_per_s),
        "train/loss": "" if view.loss is None else f"{view.loss:.4g}",
        "metric": metric,
        "ETA": "" if view.eta_s is None else format_clock(view.eta_s),
        "goodput": "" if view.goodput is None else f"{view.goodput:.1%}",
        "checkpoint": view.checkpoint or "",
        "seen": "" if view.age_s is None else format_age(view.age_s),
        "reason": one_line("; ".join(first_sentence(text) for text in reasons if text)),
    }
