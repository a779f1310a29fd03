"""`train predict`: write a model's outputs for every sample of a dataset."""

from __future__ import annotations

import argparse
import os

from trainer_cli.commands import add_allow_pickle, add_config_arguments, add_no_replay
from trainer_cli.ranks import read_ranks

EXAMPLES = """examples:
  train predict ckpt=runs/digits@best                         outputs of the validation data, as JSON lines
  train predict ckpt=runs/digits@best predict.outputs=[logits] predict.folder=out
  torchrun --nproc-per-node 4 -m trainer_cli predict ckpt=runs/digits@best
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the overrides, and the flags that say where configs are and what may be loaded."""
    add_config_arguments(parser)
    add_allow_pickle(parser)
    add_no_replay(parser)


def run(args: argparse.Namespace) -> int:
    """Write the predictions of every checkpoint that matches."""
    ranks = read_ranks(os.environ)
    # Imported here: it loads torch and Hydra, which the help and shell completion must not wait for.
    from trainer_cli.addons.predict.predict import predict

    return predict(
        args.overrides,
        ranks,
        config_dir=args.config_dir,
        config_name=args.config_name,
        allow_pickle=args.allow_pickle,
        replays=not args.no_replay,
    )
