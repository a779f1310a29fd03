"""`train fit`: train or resume; with `-m` one run for each combination of several values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from trainer_cli.cli.main import add_allow_pickle, add_config_arguments
from trainer_cli.errors import ExitCode, UserError

EXAMPLES = """examples:
  train fit +experiment=digits
  train fit +experiment=digits optimizer.lr=3e-4 name=slow
  train fit resume=runs/digits loop.max_duration=40ep
  train fit -m --jobs 2 +experiment=digits optimizer.lr=1e-3,3e-3 'seed=range(3)'

`train list` shows what there is to choose, `train config --fields` every key with its default and meaning.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides, the flags that say where configs are, and those of a sweep."""
    add_config_arguments(parser)
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="one run for each combination of values: key=a,b, range(…), choice(…), glob(…)",
    )
    add_allow_pickle(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="with -m: so many runs at a time (1)")


def run(args: argparse.Namespace) -> int:
    """Compose and check the config, then fit; or do so for each job of a sweep."""
    if not _is_first_process(os.environ):
        return int(ExitCode.USER)
    if args.multirun:
        from trainer_cli.run.sweep import sweep

        at_once = 1 if args.jobs is None else args.jobs
        return sweep(args.overrides, config_dir=args.config_dir, config_name=args.config_name, at_once=at_once)
    if args.jobs is not None:
        raise UserError("--jobs is for a sweep", cure="Add -m.")
    from trainer_cli.run.compose_fit import compose_fit

    composed = compose_fit(args.overrides, config_dir=args.config_dir, config_name=args.config_name)
    # Only now: a mistake in the config is answered without what training needs.
    from trainer_cli.run.fit import fit

    return fit(composed, allow_pickle=args.allow_pickle)


def _is_first_process(environ: Mapping[str, str]) -> bool:
    """Refuse to be one of several processes, which would all train the same run; only the first one says so.

    torchrun sets WORLD_SIZE and RANK, srun SLURM_STEP_NUM_TASKS and SLURM_PROCID.
    """
    for size, rank in (("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")):
        count, number = environ.get(size, "1"), environ.get(rank)
        if number is None or not count.isdecimal() or int(count) < 2:
            continue
        if number != "0":
            return False
        raise UserError(
            f"this is one of {count} processes ({size}), but train uses one process on one device",
            cure="Start it without torchrun, or with srun --ntasks=1.",
        )
    return True
