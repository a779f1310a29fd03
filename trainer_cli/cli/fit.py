"""`train fit`: train, or go on training; with `-m` one run for each combination of several values."""

from __future__ import annotations

import argparse

from trainer_cli.cli.main import add_config_arguments
from trainer_cli.errors import UserError

EXAMPLES = """examples:
  train fit +experiment=digits
  train fit +experiment=digits optimizer.lr=3e-4 name=slow
  train fit resume=runs/digits loop.max_duration=40ep
  train fit -m --jobs 2 +experiment=digits optimizer.lr=1e-3,3e-3 'seed=range(3)'
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
    parser.add_argument("--jobs", type=int, metavar="N", help="with -m: so many runs at a time (1)")


def run(args: argparse.Namespace) -> int:
    """Compose and check the config, then fit; or do so for each job of a sweep."""
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

    return fit(composed)
