"""`train check resume`: stopping and resuming changes no value. `train check run`: a run is what its config gives."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from trainer_cli.commands import Check, add_config_arguments, add_overrides
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.running import showing_import
from trainer_cli.signals import SignalHandlers, stopping
from trainer_cli.terminal import is_terminal, line_width, wrapped

STRETCHES = 3


def _add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of each run (12)")


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory")
    add_overrides(parser, "changes of the run's config, such as where its data is now")
    parser.add_argument(
        "--stretches",
        metavar="K",
        default=str(STRETCHES),
        help=f"how many stretches between two checkpoints to replay, or all ({STRETCHES})",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the result here, not into RUN/replayed")


def _check_run(args: argparse.Namespace) -> int:
    from trainer_cli.addons.exact.check_run import check_run

    count = None if args.stretches == "all" else int(args.stretches) if args.stretches.isdecimal() else 0
    if count == 0:
        raise UserError(f"--stretches {args.stretches} is not a number of stretches", cure="Write 1 or more, or: all.")
    show = (lambda text: None) if args.json else lambda text: print(text, flush=True)
    check = check_run(args.run_dir, count, show=show, output=args.output, overrides=args.overrides)
    text = str(check)
    print(json.dumps(check.as_dict(), indent=2) if args.json else wrapped(text, line_width(sys.stdout)))
    return int(ExitCode.DONE if check.equal else ExitCode.FAILED)


def _check_resume(args: argparse.Namespace) -> int:
    """Train without a stop, then with stops of every kind, and compare every value."""
    with showing_import():
        from trainer_cli.addons.exact.resume import STEPS, check_resume
        from trainer_cli.config import compose

    composed = compose(args.overrides, config_dir=args.config_dir, config_name=args.config_name)
    composed.refuse_shipped_default()
    show = _show_in_place if is_terminal(sys.stderr) else lambda text: None
    ending = [number for number in stopping() if number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        with SignalHandlers(_raise_exit, ending), composed.placing():
            report = check_resume(
                composed, steps=STEPS if args.steps is None else args.steps, config_dir=args.config_dir, show=show
            )
    finally:
        # The line of progress is cleared before the report, or an error, is printed.
        show("")
    text = str(report)
    print(json.dumps(report.as_dict(), indent=2) if args.json else wrapped(text, line_width(sys.stdout), indent=7))
    return int(ExitCode.DONE if report.exact else ExitCode.FAILED)


def _raise_exit(number: int, frame: object) -> None:
    """End by an exception, so that child processes are killed and the temporary folder is removed."""
    sys.exit(128 + number)


def _show_in_place(text: str) -> None:
    """Show a line on stderr in place of the previous one."""
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()


CHECKS = {
    "resume": Check(
        "stopping and resuming an experiment changes no value",
        _add_resume_arguments,
        _check_resume,
        ("train check resume digits", "train check resume mine data.num_workers=2 --steps 30"),
        "trains a few steps without a stop, and again in processes that are stopped or killed at every kind of place "
        "and started again, in a temporary folder; runs/ is not touched. Every value of every step must be equal, bit "
        "for bit.",
    ),
    "run": Check(
        "a run's directory is what its config gives",
        _add_run_arguments,
        _check_run,
        ("train check run runs/digits", "train check run runs/digits --stretches all --json"),
        "replays stretches between the checkpoints of a run, and compares every record and every tensor, bit for bit. "
        "It writes what it found into RUN/replayed/check.json.",
    ),
}
