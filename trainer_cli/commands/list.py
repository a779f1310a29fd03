"""`train list [GROUP]`: the options of every group, each with its description; experiments and the user's own first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from trainer_cli.commands.choices import keys, options_of, search_configs, spell
from trainer_cli.commands.command_line import add_config_dir
from trainer_cli.config import SearchPath
from trainer_cli.patterns import check_name
from trainer_cli.terminal import beside, line_width, painted, print_json

EXAMPLES = """examples:
  train list              every group with its options
  train list experiment   one group, and the file of each option
  train list loop         the keys of a section too
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("group", nargs="?", metavar="GROUP", help="show only this group, and more of it")
    add_config_dir(parser)
    parser.add_argument("--json", action="store_true", help="print JSON: group, option, description and file of each")


def run(args: argparse.Namespace) -> int:
    """Print the groups, each as `group=option  description` lines that can be pasted after a verb."""
    search = search_configs(args.config_dir)
    names = search.groups()
    if args.group is not None:
        check_name("group", args.group, names)
        names = [args.group]
    if args.json:
        print_json({group: _plain_rows(group, search) for group in names})
        return 0
    if args.group is not None:
        print(
            "\n".join(
                [
                    *_describe_options(args.group, search),
                    *_list_files(args.group, search),
                    *_describe_keys(args.group),
                ]
            )
        )
        return 0
    print("\n\n".join("\n".join(_describe_options(group, search)) for group in names))
    # The star is explained only where it occurs.
    if any(search.is_own(file) for group in names for file in options_of(search, group).values()):
        print("\n* yours")
    elif above := search.advise_project_above():
        print(f"\n{above.strip()}")
    return 0


def _plain_rows(group: str, search: SearchPath) -> list[dict[str, object]]:
    """The options of a group as plain values, for JSON."""
    return [
        {
            "option": option,
            "description": SearchPath.describe_file(file),
            "file": str(file),
            "own": search.is_own(file),
        }
        for option, file in options_of(search, group).items()
    ]


def _describe_options(group: str, search: SearchPath) -> Iterator[str]:
    """The name of a group, and a line for each option; the user's own have a star."""
    options = options_of(search, group)
    width = max((len(option) for option in options), default=0)
    yield painted(group, "bold", sys.stdout)
    for option, file in options.items():
        mark = "*" if search.is_own(file) else " "
        label = f"{mark} {spell(group, f'{option:{width}}')}  "
        line = beside(label, SearchPath.describe_file(file), line_width(sys.stdout))
        yield painted("*", "green", sys.stdout) + line[1:] if mark == "*" else line


def _list_files(group: str, search: SearchPath) -> Iterator[str]:
    """The file of each option of a group."""
    yield f"\n{painted('files', 'bold', sys.stdout)}"
    for option, file in options_of(search, group).items():
        yield f"  {option}: {search.label(file)}"


def _describe_keys(group: str) -> Iterator[str]:
    """The keys of a closed section with their defaults and meanings."""
    entries = [entry for entry in keys().values() if entry.path[0] == group and len(entry.path) > 1]
    if entries:
        settings = {entry.key: f"{entry.key}={_to_argument(entry.default)}" for entry in entries}
        width = max(map(len, settings.values()))
        yield f"\n{painted('keys', 'bold', sys.stdout)}"
        for entry in entries:
            yield beside(f"  {settings[entry.key]:{width}}  ", entry.meaning, line_width(sys.stdout))


def _to_argument(value: object) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value)
