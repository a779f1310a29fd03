"""`train validate`: evaluate checkpoints in one process, without training."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainer_cli.commands.command_line import add_allow_pickle, add_config_arguments, add_no_replay
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.ranks import read_ranks
from trainer_cli.terminal import print_json

if TYPE_CHECKING:
    from trainer_cli.running import Results

EXAMPLES = """examples:
  train validate ckpt='runs/digits/checkpoints/step*'
  train validate ckpt=runs/digits@latest data.batch_size=512
  train validate digits ckpt=none
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the overrides, and the flags that say where configs are and what may be loaded."""
    add_config_arguments(parser)
    add_allow_pickle(parser)
    add_no_replay(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluate every checkpoint that matches."""
    ranks = read_ranks(os.environ)
    # Rank 0 prints the mistake for all.
    if ranks.rank > 0:
        return int(ExitCode.USER)
    if ranks.world_size > 1:
        raise UserError(
            f"this is one of {ranks.world_size} processes, but one process evaluates all checkpoints",
            cure="Start it without torchrun, or with srun --ntasks=1.",
        )
    # Imported here: it loads torch and Hydra, which the help and shell completion must not wait for.
    from trainer_cli.running import validate

    return validate(
        args.overrides,
        config_dir=args.config_dir,
        config_name=args.config_name,
        allow_pickle=args.allow_pickle,
        replays=not args.no_replay,
        show=_show_json if args.json else None,
    )


def _show_json(results: Results) -> None:
    """Print the results as JSON."""
    print_json({"folder": str(results.folder), "rows": [asdict(row) for row in results.rows]})
