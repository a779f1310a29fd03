"""`train tail RUN [-f]`: the last log lines and metrics of a run, followed until it ends."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import UserError
from trainer_cli.run.find_runs import RunFinder
from trainer_cli.run.run_dir import RunDir
from trainer_cli.run.run_view import RunReader
from trainer_cli.run.tail import Tail

EXAMPLES = """examples:
  train tail runs/digits         the last 10 lines
  train tail -n 50 runs/digits   the last 50
  train tail -f runs/digits      and those that follow, until the run ends
"""
_POLL_S = 0.5
"""Pause between two looks at the files."""
_RUNS = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument("-f", "--follow", action="store_true", help="print what is added, until the run ends")
    parser.add_argument("-n", "--lines", type=int, default=10, metavar="N", help="begin with the last N lines (10)")


def run(args: argparse.Namespace) -> int:
    """Print the lines. With `--follow` Ctrl-C ends it too."""
    if args.lines < 0:
        raise UserError(f"--lines is {args.lines}, but it cannot be negative")
    if not RunDir(args.run_dir).exists_as_run():
        raise no_run(args.run_dir)
    try:
        _print(args.run_dir, args.lines, follow=args.follow)
    except KeyboardInterrupt:
        if not args.follow:
            raise
    return 0


def _print(path: Path, most: int, *, follow: bool) -> None:
    tail, run = Tail(path, most), RunDir(path)
    while True:
        # Before the look: what a process wrote last must be seen.
        goes_on = follow and run.is_locked()
        lines = tail.read()
        if lines:
            print("\n".join(lines), flush=True)
        if not goes_on:
            break
        time.sleep(_POLL_S)
    if follow and (view := RunReader(path).look(time.time())) is not None:
        step = "" if view.step is None else f" at step {view.step:,}"
        print(f"{view.state}{step}" + (f": {view.reason}" if view.reason else ""))


def no_run(path: Path) -> UserError:
    """No run is there: with the nearest of those below `runs`."""
    known = [str(one.path) for one in RunFinder(_RUNS).find()]
    inside = str(_RUNS / path)
    cure = f"Did you mean '{inside}'?" if inside in known else did_you_mean(str(path), known).strip()
    return UserError(f"{path} holds no run", cure=cure or "`train top DIR` lists the runs below a folder.")
