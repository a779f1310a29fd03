"""`train compare A B`: whether B is better than A, by pairs of runs with the same seed."""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.commands import add_config_dir, add_job_limits, add_overrides, tolerate_lost_output
from trainer_cli.errors import UserError
from trainer_cli.fit_parts import JobLimits
from trainer_cli.terminal import line_width, print_json, table, wrapped_report

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES = """examples:
  train compare digits_mlp optimizer.lr=0.01             the experiment, and with a change
  train compare digits_mlp digits --budget 200steps      two experiments, at the same length
  train compare optimizer.lr=0.1 optimizer.lr=0.01 -- digits_mlp loop.eval_interval=50
  train compare runs/digits model.hidden=[128] --margin 0.002 --seeds 20
  train compare digits_mlp optimizer.lr=0.01 --budget 5min --json

A is the baseline, and the verdict is about B: better (exit code 0), worse (1), no difference above the margin (2), not
decided (3). Errors have 64 more than elsewhere: 66 is a mistake in the command. 75: stopped; the same command goes on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add A and B, overrides of both, and the flags."""
    side = "an experiment, a run, overrides in quotes, or one of the first two with overrides"
    parser.add_argument("first", metavar="A", help=side)
    parser.add_argument("second", metavar="B", help="the same; overrides alone are changes of A")
    add_overrides(parser, "of both, after --: an experiment, key=value")
    add_config_dir(parser)
    parser.add_argument("--budget", metavar="LENGTH", help="of each run: 500steps, 5min, 10000samples (as configured)")
    parser.add_argument("--seeds", metavar="N", type=int, default=10, help="the most pairs, with seeds 1 to N (10)")
    parser.add_argument("--metric", help="the metric that decides, such as val/accuracy (that of the best checkpoint)")
    parser.add_argument("--mode", choices=("min", "max"), help="whether less or more is better (by the metric)")
    parser.add_argument("--margin", metavar="M", type=float, default=0.0, help="the least difference that matters (0)")
    add_job_limits(parser, "1")
    parser.add_argument("--name", help="of the folder in runs/compare (made of A and B)")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON, and all else on stderr")


def run(args: argparse.Namespace) -> int:
    """Compare, print the verdict, and return its exit code."""
    tolerate_lost_output()
    limits = JobLimits.read(args)
    if args.seeds < 1 or not (math.isfinite(args.margin) and args.margin >= 0):
        raise UserError("--seeds must be at least 1, and --margin a number of at least 0")
    if args.name is not None and not re.fullmatch(r"[^./-][^/]*", args.name):
        cure = "Take a name of one folder, which begins with neither a dot nor a hyphen."
        raise UserError(f"--name is {args.name!r}", where="--name", cure=cure)
    from trainer_cli.addons.compare.pairs import COMPARE_FOLDER, SPEC_FILE, PairedRuns
    from trainer_cli.addons.compare.sides import read_sides
    from trainer_cli.layout import SWEEP_FOLDER
    from trainer_cli.messages import to_console
    from trainer_cli.runs import refuse_nested
    from trainer_cli.steps import Duration

    budget = None
    if args.budget is not None:
        budget = int(args.budget) if args.budget.isdecimal() else args.budget
        Duration.read("--budget", budget)
    sides = read_sides(args.first, args.second, args.overrides, budget=budget, config_dir=args.config_dir)
    a, b = sides
    name = args.name or _name(a.text, b.text, a.digest, b.digest)
    runs = Path(a.composed.config.run_dir).parent
    # A may be a run of another comparison, such as the best so far, or of a sweep.
    runs = runs.parents[1] if (runs / SPEC_FILE).exists() or runs.name == SWEEP_FOLDER else runs
    folder = runs / COMPARE_FOLDER / name
    refuse_nested(folder / "a-seed1")
    to_console(a.composed.config.logging.level)
    comparison = PairedRuns(sides, folder, args.seeds, args.margin, args.metric, args.mode)
    comparison.run(limits, args.config_dir)
    report = comparison.as_dict()
    print_json(report) if args.json else print(wrapped_report(_as_text(report), line_width(sys.stdout)))
    return int(report["exit_code"])


def _name(a: str, b: str, *digests: str) -> str:
    """The name of the folder: readable, and another one for other configs."""
    readable = "-vs-".join(re.sub(r"[^a-z0-9_.=-]+", "-", text.lower()).strip("-.")[:40] for text in (a, b))
    return f"{readable}-{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:8]}"


def _as_text(report: Mapping[str, Any]) -> str:
    """The report as it is printed."""
    columns = ("a", "b", "mean", "low", "high")
    rows = [
        [str(pair["seed"]), *("" if pair[key] is None else f"{pair[key]:.4g}" for key in columns)]
        for pair in report["pairs"]
    ]
    lines = [f"A: {report['a']}", f"B: {report['b']}"]
    lines += [f"  {key}: {values['a']} -> {values['b']}" for key, values in report["differs"].items()]
    lines += [f"  {file}: the source differs" for file in report["source_differs"]]
    if not report["differs"]:
        lines.append("A and B have the same config.")
    if not report["same_batches"]:
        lines.append("The batches are not the same: the data, or the size of a batch, differs.")
    if rows:
        numbers = ["seed", "A", "B", "mean difference", "low", "high"]
        head = f"{report['metric']}, best of each run ({report['mode']}), {report['length']}"
        lines += [f"{head}; a difference above 0: B is better", table(numbers, rows, right=numbers)]
    noise, mean = report["noise"], report["a_mean"]
    if noise is not None:
        share = f" ({abs(noise / mean):.2%})" if mean else ""
        lines.append(f"A varies by ±{noise:.3g}{share} over seeds (standard deviation).")
    return "\n".join([*lines, report["sentence"], "next:", f"  train report {shlex.quote(report['folder'])}"])
