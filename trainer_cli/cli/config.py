"""`train config`: the composed config, where each value comes from, what differs, what keys there are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trainer_cli.cli.main import add_config_arguments
from trainer_cli.config.garbage import uncollected

EXAMPLES = """examples:
  train config +experiment=digits optimizer.lr=0.01
  train config +experiment=digits --provenance
  train config +experiment=digits model=mlp --diff=+experiment=digits
  train config --diff runs/digits +experiment=digits
  train config --fields
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_config_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--provenance", action="store_true", help="show where each value comes from")
    what.add_argument(
        "--diff",
        nargs="?",
        const="",
        metavar="OTHER",
        help="show only what differs, from OTHER's value to this config's. OTHER is a run directory, a checkpoint or "
        "RUN@latest; or overrides after an equals sign (--diff='model=mlp seed=1'); without OTHER: the config without "
        "overrides",
    )
    what.add_argument(
        "--fields",
        nargs="?",
        const="",
        metavar="KEY",
        help="show every key with its default and meaning; with KEY that one, and those below it",
    )
    what.add_argument("--json", action="store_true", help="print the composed config as JSON")
    what.add_argument("--schema", action="store_true", help="print the JSON Schema that editors check YAML with")


def before_parsing(words: Sequence[str]) -> list[str]:
    """Join `--diff` and its OTHER by an equals sign. An override after `--diff` is one of this config, and no OTHER."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--diff" and not word.startswith("-"):
            from trainer_cli.run.recover import is_on_disk

            is_override = ("=" in word or word.startswith("~")) and not is_on_disk(word)
            joined[-1:] = ["--diff=", word] if is_override else [f"--diff={word}"]
        else:
            joined.append(word)
    return joined


@uncollected()
def run(args: argparse.Namespace) -> int:
    """Print the config. Values that must still be given show as `???`."""
    places = {"config_dir": args.config_dir, "config_name": args.config_name, "missing_ok": True}
    # Each way imports only what it needs: flags and help need no Hydra, and the schema too.
    if args.schema:
        import json

        from trainer_cli.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    elif args.provenance or args.fields is not None or args.diff is not None:
        from trainer_cli.cli import config_views

        if args.fields is not None:
            lines = config_views.field_lines(args.fields)
        elif args.provenance:
            lines = config_views.provenance_lines(args.overrides, places)
        else:
            lines = config_views.difference_lines(args.diff, args.overrides, places)
        print("\n".join(lines))
    else:
        from trainer_cli.config.compose import compose, to_yaml

        text = to_yaml(compose(args.overrides, **places))
        if args.json:
            import yaml

            from trainer_cli.cli.table import print_json

            print_json(yaml.safe_load(text))
        else:
            print(text, end="")
    return 0
