"""`train data RUN STEP`: which samples a step of a run used, or will use."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from trainer_cli.errors import ExitCode, UserError
from trainer_cli.runs.sample_view import as_dict, lines_of
from trainer_cli.runs.step_samples import read_step_samples
from trainer_cli.terminal import print_json

EXAMPLES = """examples:
  train data runs/digits 437          the samples of step 437: index, position in the epoch, rank and batch
  train data runs/digits 437..440     of four steps
  train data runs/digits 437 --json   as JSON
"""
_STEPS = re.compile(r"(\d+)(?:\.\.(\d+))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the steps and the flags."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument("steps", metavar="STEP[..LAST]", help="a step, or the first and the last of several")
    parser.add_argument("--json", action="store_true", help="print them as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the samples of the steps."""
    first, last = parse_steps(args.steps)
    steps = read_step_samples(args.run_dir, first, last)
    if args.json:
        print_json([as_dict(step) for step in steps])
        return int(ExitCode.DONE)
    for step in steps:
        print("\n".join(lines_of(step)))
    return int(ExitCode.DONE)


def parse_steps(text: str) -> tuple[int, int]:
    """The first and the last step of `STEP` or `STEP..LAST`.

    Raises:
        UserError: it is neither.
    """
    match = _STEPS.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is no step", cure="Write a number such as 437, or 437..440 for several steps.")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UserError(f"{text!r} ends before it begins", cure=f"Write {last}..{first}.")
    return first, last
