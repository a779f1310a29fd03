"""`train bisect RUN CONDITION`: the first step of a run at which a condition holds."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from trainer_cli.addons.exact.bisect import Bisection, Condition, TestedStep
from trainer_cli.addons.exact.replay_command import name_bad_samples, under
from trainer_cli.addons.exact.step_samples import find_known_samples
from trainer_cli.commands import add_config_dir, add_overrides
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.terminal import format_count, line_width, print_json, wrapped

EXAMPLES = """examples:
  train bisect runs/digits 'val/loss > 2'                           the first step whose weights have such a loss
  train bisect runs/digits 'val/loss is not finite'
  train bisect runs/digits 'train/loss is not finite'                 the first step whose batch has such a loss
  train bisect runs/digits --command 'python probe.py {checkpoint}'   by a program, as git bisect run: 0 is good
  train bisect runs/digits 'val/loss > 2' --first 400 --last 500

It looks into the records first, then evaluates kept checkpoints, then steps that it replays. The condition must not
hold at the first step, and hold at the last. If it changes several times, one of its changes is found.
Run the same command again to continue an interrupted search.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the condition and the flags."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument("condition", metavar="CONDITION", nargs="?", help="such as 'val/loss > 2'")
    add_overrides(parser, "changes of the config, such as where the data is now")
    parser.add_argument("--command", metavar="COMMAND", help="tests {checkpoint}: exit code 0 if it is good, else bad")
    parser.add_argument("--first", type=int, metavar="STEP", help="a step at which the condition does not hold (0)")
    parser.add_argument("--last", type=int, metavar="STEP", help="a step at which it holds (the newest)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Search, and print the step, its samples, and the commands that look closer."""
    overrides = list(args.overrides)
    if args.command is not None and args.condition is not None and not _is_condition(args.condition):
        # With a command the first override is parsed as the condition.
        overrides.insert(0, args.condition)
        args.condition = None
    if (args.condition is None) == (args.command is None):
        raise UserError(
            "bisect needs either a condition or --command", cure="For example: train bisect RUN 'val/loss > 2'."
        )
    tests: list[TestedStep] = []

    def show(tested: TestedStep) -> None:
        if tested.step in [earlier.step for earlier in tests]:
            return
        tests.append(tested)
        if not args.json:
            print(_line_of(tested), flush=True)

    condition = None if args.condition is None else Condition.parse(args.condition)
    bisection = Bisection(
        args.run_dir, condition, args.command, overrides=overrides, config_dir=args.config_dir, show=show
    )
    change = bisection.find(args.first, args.last)
    samples = find_known_samples(
        args.run_dir, change.step, change.step, overrides=overrides, config_dir=args.config_dir
    ).get(change.step)
    run_name = shlex.quote(str(args.run_dir))
    commands = [f"train replay {run_name} {change.step}", f"train data {run_name} {change.step} --show"]
    if args.json:
        facts = {**asdict(change), "tests": [asdict(tested) for tested in tests]}
        print_json({**facts, "samples": None if samples is None else samples.as_dict(), "commands": commands})
        return int(ExitCode.DONE)
    condition_text = args.condition or "the condition"
    in_training = condition is not None and condition.metric.startswith(TRAIN_PREFIX)
    count = format_count(change.evaluations, "replayed step" if in_training else "evaluation")
    print(f"\n{condition_text}: not at step {change.step - 1}, but at step {change.step} ({count})")
    if samples is not None:
        print(wrapped("\n".join(samples.lines()), line_width(sys.stdout)))
    bad = under("not finite", name_bad_samples(change.batches, samples))
    print("\n".join([*bad, "next:", *(f"  {command}" for command in commands)]))
    return int(ExitCode.DONE)


def _is_condition(word: str) -> bool:
    try:
        Condition.parse(word)
    except UserError:
        return False
    return True


def _line_of(tested: TestedStep) -> str:
    value = "" if tested.value is None else f"{tested.value:.6g}, "
    origin = " (recorded)" if tested.recorded else ""
    return f"step {tested.step:,}: {value}{'holds' if tested.holds else 'does not hold'}{origin}"
