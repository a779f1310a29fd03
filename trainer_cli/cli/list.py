"""`train list [GROUP]`: what there is to choose from, each with a line on what it is; experiments first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer_cli.cli.main import add_config_dir
from trainer_cli.config import locate
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("group", nargs="?", metavar="GROUP", help="show only this group")
    add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Print the groups, each as `group=option  description` lines that can be pasted after a verb."""
    package = Path(__file__).resolve().parents[1]
    dirs = locate.config_dirs(args.config_dir, Path.cwd(), package)
    names = locate.groups(dirs)
    if args.group is not None:
        if args.group not in names:
            cure = did_you_mean(args.group, names).strip() or f"There are: {', '.join(names)}."
            raise UserError(f"there is no group {args.group!r}", cure=cure)
        names = [args.group]
    print("\n\n".join(_table(group, dirs) for group in names))
    return 0


def _table(group: str, dirs: Sequence[Path]) -> str:
    options = locate.options(dirs, group)
    width = max((len(option) for option in options), default=0)
    rows = [f"  {group}={option:{width}}  {locate.description(path)}".rstrip() for option, path in options.items()]
    return "\n".join([group, *rows])
