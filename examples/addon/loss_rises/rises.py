"""`train rises RUN`: the steps at which the logged loss rose most."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

from trainer_cli import UserError

EXAMPLES = """examples:
  train rises runs/digits             the five largest rises of train/loss
  train rises runs/digits --count 20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a run")
    parser.add_argument("--count", type=int, default=5, metavar="N", help="how many steps are listed (5)")


def run(args: argparse.Namespace) -> int:
    """Print the steps, the largest rise first."""
    file = args.run / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{file} does not exist", cure="Name a run that was logged with loggers=default.")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    # A loss that is not finite is written as text.
    losses = [(record["step"], float(record["train/loss"])) for record in records if "train/loss" in record]
    rises = sorted(pairwise(losses), key=lambda pair: pair[0][1] - pair[1][1])
    for (_, before), (step, after) in rises[: args.count]:
        print(f"step {step}: {before:.4f} -> {after:.4f}")
    return 0
