"""`train validate`: evaluate checkpoints."""

from __future__ import annotations

import argparse

from trainer_cli.cli.main import add_allow_pickle, add_config_arguments

EXAMPLES = """examples:
  train validate ckpt='runs/digits/checkpoints/step*'
  train validate ckpt=runs/digits@latest data.batch_size=512
  train validate ckpt=none +experiment=digits
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides, and the flags that say where configs are and what may be loaded."""
    add_config_arguments(parser)
    add_allow_pickle(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate every checkpoint that matches."""
    from trainer_cli.run.validate import validate

    return validate(
        args.overrides, config_dir=args.config_dir, config_name=args.config_name, allow_pickle=args.allow_pickle
    )
