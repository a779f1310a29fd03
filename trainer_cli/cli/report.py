"""`train report RUN…`: curves, checkpoints, config and more of runs, as one HTML file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from trainer_cli.cli.table import size
from trainer_cli.cli.tail import no_run
from trainer_cli.errors import UserError

EXAMPLES = """examples:
  train report runs/digits                     into report.html
  train report runs/digits runs/other          several runs, compared
  train report runs/digits/sweep               a sweep: best table, parallel coordinates
  train report runs/digits/validation          only what train validate measured
  train report runs -o all.html                all runs below a folder
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("run_dir", metavar="RUN", nargs="+", type=Path, help="a run's directory, or a folder of runs")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help="file to write (report.html)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report, and print what it holds."""
    for path in args.run_dir:
        if not path.is_dir():
            raise no_run(path)
    from trainer_cli.run.html_report import report

    try:
        made = report(args.run_dir, args.output, now=time.time())
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    runs = f"{made.runs} run{'' if made.runs == 1 else 's'}, " if made.runs else ""
    print(f"{args.output}: {runs}{made.charts} charts, {size(made.size_bytes)}; open it in a browser")
    return 0
