"""`train diverge A B`: where two runs part, and what differs first."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer_cli.commands import add_config_dir, add_overrides
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.terminal import line_width, print_json, wrapped_report

EXAMPLES = """examples:
  train diverge runs/digits runs/other               the first step that differs, and what differs first in it
  train diverge runs/digits runs/other --until 500   look no further than step 500
  train diverge runs/digits@attempt1 runs/digits     an attempt, and the one that went back and made steps again
  train diverge runs/digits runs/other --json        as JSON

Configs, source, samples, versions and threads are compared, then the records and the kept checkpoints. Then both runs
are replayed from where they are known to be equal to where they differ. Exit code 0: they are equal as far as both go.
1: they diverge.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two runs and the flags."""
    parser.add_argument("first", metavar="A", type=Path, help="a run's directory, a checkpoint, or RUN@attempt2")
    parser.add_argument("second", metavar="B", type=Path, help="another")
    add_overrides(parser, "changes of both configs, such as where the data is now")
    add_config_dir(parser)
    parser.add_argument("--until", metavar="STEP", type=int, help="the last step to compare")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compare the runs and print where they part."""
    if args.until is not None and args.until < 1:
        raise UserError(f"--until {args.until} is not a step", cure="The first step is 1.")
    from trainer_cli.addons.exact.diverge import find_divergence

    def show(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    report = find_divergence(
        args.first, args.second, until=args.until, overrides=args.overrides, config_dir=args.config_dir, show=show
    )
    if args.json:
        print_json(report.as_dict())
    else:
        print(wrapped_report(str(report), line_width(sys.stdout)))
    return int(ExitCode.DONE if report.equal else ExitCode.FAILED)
