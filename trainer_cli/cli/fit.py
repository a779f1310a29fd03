"""`train fit`: train, or go on training."""

from __future__ import annotations

import argparse

from trainer_cli.cli.main import add_config_arguments

EXAMPLES = """examples:
  train fit +experiment=digits
  train fit +experiment=digits optimizer.lr=3e-4 name=slow
  train fit resume=runs/digits loop.max_duration=40ep
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides, and the flags that say where configs are."""
    add_config_arguments(parser)
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(args: argparse.Namespace) -> int:
    """Compose and check the config, then fit."""
    from trainer_cli.run.fit import compose_fit, fit

    return fit(compose_fit(args.overrides, config_dir=args.config_dir, config_name=args.config_name))
