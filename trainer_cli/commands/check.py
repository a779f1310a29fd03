"""`train check resume`: check on a user's experiment that stopping and resuming changes no value."""

from __future__ import annotations

import argparse
import json
import signal
import sys

from trainer_cli.commands.main import add_config_arguments
from trainer_cli.errors import ExitCode

EXAMPLES = """examples:
  train check resume +experiment=digits
  train check resume +experiment=mine data.num_workers=2 --steps 30
  train check resume +experiment=mine --json

It trains a few steps without a stop, and again in processes that are stopped or killed at every kind of place and
started again, in a temporary folder; runs/ is not touched. Every value of every step must be equal, bit for bit.
Exit code 0: all are. 1: some are not; the first that differs is printed with its likely cause and the cure.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of the check, the overrides, and the flags."""
    parser.add_argument("check", choices=["resume"], metavar="resume", help="what to check")
    add_config_arguments(parser)
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of each run (12)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Train without a stop, then with stops of every kind, and compare every value."""
    from trainer_cli.config.compose import compose, refuse_shipped_default
    from trainer_cli.testing.resume import STEPS, check_resume

    composed = compose(args.overrides, config_dir=args.config_dir, config_name=args.config_name)
    refuse_shipped_default(composed)
    show = _show_in_place if sys.stderr.isatty() else lambda text: None
    # Under nohup SIGHUP is ignored, and stays so.
    ending = [signal.SIGTERM] + [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
    before = {number: signal.signal(number, _raise_exit) for number in ending}
    try:
        with composed.placing():
            report = check_resume(
                composed, steps=STEPS if args.steps is None else args.steps, config_dir=args.config_dir, show=show
            )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        # The line of progress is cleared before the report, or an error, is printed.
        show("")
    print(json.dumps(report.as_dict(), indent=2) if args.json else report)
    return int(ExitCode.DONE if report.exact else ExitCode.FAILED)


def _raise_exit(number: int, frame: object) -> None:
    """End by an exception, so that child processes are killed and the temporary folder is removed."""
    sys.exit(128 + number)


def _show_in_place(text: str) -> None:
    """Show a line on stderr in place of the previous one."""
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()
