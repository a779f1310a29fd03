"""`train check`: the checks that add-ons bring, each with arguments of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer_cli.commands.command_line import Parser
from trainer_cli.parts import CHECKS

EXAMPLES = "Exit code 0: all is equal, or nothing was found. 1: something was; it is printed.\n"


class Check(NamedTuple):
    """A check: its help, arguments and function, which returns the exit code."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: Sequence[str]
    about: str
    """What it does, in a paragraph for the help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each check."""
    subparsers = parser.add_subparsers(title="checks", metavar="CHECK", parser_class=Parser)
    examples, paragraphs = ["examples:"], []
    for checks in CHECKS.each():
        for name, check in checks.items():
            subparser = subparsers.add_parser(name, help=check.summary, allow_abbrev=False)
            check.add_arguments(subparser)
            subparser.add_argument("--json", action="store_true", help="print the result as JSON")
            subparser.set_defaults(check=check.run)
            examples += [f"  {example}" for example in check.examples]
            paragraphs.append(f"`{name}` {check.about}")
    parser.epilog = "\n\n".join(["\n".join(examples), *paragraphs, EXAMPLES])


def run(args: argparse.Namespace) -> int:
    """Run the check that the command names."""
    return int(args.check(args))
