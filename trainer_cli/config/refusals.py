"""What is wrong with overrides and defaults lists, in our words: before Hydra sees them, and after it refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from trainer_cli.config import check, locate
from trainer_cli.config.origins import label
from trainer_cli.config.overrides import COMMAND_LINE, CommandLine, line_of, path_of
from trainer_cli.config.place import Place
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError

SCHEMA = "train_schema"
"""Name under which the schema is listed first in a primary config's defaults."""


def wrong_overrides(place: Place, line: CommandLine) -> Iterator[ConfigError]:
    """Overrides that can be refused by looking at them: unknown keys, groups and options."""
    schema = check.typed()
    for override in line.overrides:
        key, path = override.key_or_group, path_of(override)
        if key == "experiment" and not place.is_group(override):
            yield ConfigError(
                f"there are no experiments: no folder experiment/ in {place.listed()}",
                where=COMMAND_LINE,
            )
        elif path[:1] == ("hydra",):
            yield ConfigError(
                f"{line_of(override)} has no effect",
                where=COMMAND_LINE,
                cure="Hydra only composes the config here.",
            )
        elif place.is_group(override):
            yield from _wrong_options(place, override)
        elif unknown := check.unknown_key(path, schema):
            wrong, known = unknown
            groups = locate.groups(place.dirs) if len(wrong) == 1 else []
            yield check.no_such_key(wrong, [*known, *(g for g in groups if g not in known)], COMMAND_LINE)


def _wrong_options(place: Place, override: Override) -> Iterator[ConfigError]:
    value = override.value()
    known = list(locate.options(place.dirs, override.key_or_group))
    chosen = value if isinstance(value, list) else [value]
    schema = check.typed()
    key = override.key_or_group
    closed = key in schema and check.is_closed(schema._get_node(key))
    for option in chosen:
        if override.is_delete():
            continue
        if option is None and closed:
            yield ConfigError(f"{override.key_or_group} is a section, and never null", where=COMMAND_LINE)
        if option is None:
            continue
        if isinstance(option, dict) or str(option).removesuffix(".yaml") not in known:
            yield _no_option(override.key_or_group, str(option), known, COMMAND_LINE)


def _no_option(group: str, option: str, known: Sequence[str], where: str) -> ConfigError:
    cure = f"There are: {', '.join(known) or 'none'}.{did_you_mean(option, known)}"
    return ConfigError(f"there is no {group} called {option!r}", where=where, cure=cure)


_NOT_THERE = re.compile(r"Could not override '([^']+)'\.\nTo append to your config use")


def culprit(error: HydraException, pending: Sequence[Override]) -> Override | None:
    """The override whose key the composed config does not have, if that is what the error says."""
    match = _NOT_THERE.match(str(error))
    return next((o for o in pending if match and o.key_or_group == match.group(1)), None)


def no_value(override: Override, composed: DictConfig, primary: str) -> ConfigError:
    """The error for an override, in the open part of the tree, of a key that the config does not have."""
    path = path_of(override)
    if path[0] not in composed:
        return ConfigError(
            f"{primary}.yaml does not begin with the schema, so {path[0]!r} is not in it",
            where=COMMAND_LINE,
            cure=f"Put '- {SCHEMA}' first in its defaults list.",
        )
    node: Any = composed
    for depth, part in enumerate(path):
        if not isinstance(node, DictConfig):
            above = ".".join(path[:depth])
            shown = "null" if node is None else "not a mapping"
            cure = f"Choose one first, as in {above}=NAME." if node is None else None
            return ConfigError(f"{line_of(override)}: {above} is {shown}", where=COMMAND_LINE, cure=cure)
        if part not in node:
            known = [".".join((*path[:depth], str(name))) for name in node]
            hint = did_you_mean(".".join(path), known).strip()
            add = f"To add it, write '+{line_of(override)}'."
            return ConfigError(f"there is no key '{'.'.join(path)}'", where=COMMAND_LINE, cure=f"{hint} {add}".strip())
        node = node._get_node(part) if OmegaConf.is_missing(node, part) else node[part]
    return ConfigError(f"cannot set {line_of(override)}", where=COMMAND_LINE)


_REPLIES: list[tuple[str, Callable[[re.Match[str]], tuple[str, str]]]] = [
    (
        r"Could not override '([^']+)'\. No match in the defaults list",
        lambda m: (f"{m[1]} is not in the defaults list", f"To add it, write '+{m[1]}=NAME'."),
    ),
    (
        r"Could not append to config\. An item is already at '([^']+)'",
        lambda m: (f"{m[1]} exists already", "Leave out the '+'."),
    ),
    (
        r"(?:Multiple values for ([^.]+)\.|(\S+) appears more than once in the final defaults list)",
        lambda m: (f"{m[1] or m[2]} is chosen twice", "Name it once."),
    ),
    (
        r"Could not delete from config\. '([^']+)' does not exist",
        lambda m: (f"there is no '{m[1]}' to remove", ""),
    ),
    (
        r"Could not delete '([^']+)'\. No match in the defaults list",
        lambda m: (f"{m[1]} is not in the defaults list, so it cannot be removed", ""),
    ),
]


def translated(error: HydraException, place: Place, command: CommandLine) -> ConfigError:
    """Hydra's error in our words."""
    text = str(error)
    if isinstance(error, MissingConfigException):
        return _missing_file(text, place, command)
    for pattern, reply in _REPLIES:
        if match := re.search(pattern, text):
            what, cure = reply(match)
            return ConfigError(what, where=COMMAND_LINE, cure=cure or None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if error.__cause__ is not None:
        lines += str(error.__cause__).splitlines()[:1]
    return ConfigError(" ".join(lines) or "Hydra cannot compose this config")


def _missing_file(text: str, place: Place, command: CommandLine) -> ConfigError:
    """A defaults list names a file that is not there: one that the command line chose, or the one Hydra blames."""
    parent = re.search(r"In '([^']+)'", text)
    wanted = re.search(r"(?:Could not find|Could not load) '([^']+)'", text)
    if wanted is None:
        return ConfigError(" ".join(text.split("Config search path")[0].split()))
    group, _, option = wanted[1].removesuffix(".yaml").rpartition("/")
    chosen = [f"{o.key_or_group}/{o.value()}" for o in command.overrides if place.is_group(o)]
    files = [file for name in [*chosen, parent[1] if parent else ""] if (file := locate.find(place.dirs, name))]
    where = next((found for file in files if (found := _mention(file, group, option, place.cwd))), "defaults list")
    if not group:
        return ConfigError(f"the defaults list names {option}.yaml, which is not there", where=where)
    return _no_option(group, option, list(locate.options(place.dirs, group)), where)


def _mention(file: Path, group: str, option: str, cwd: Path) -> str | None:
    """`file:line` of the line that chooses the option."""
    choice = re.compile(rf"{re.escape(group)}\S*[:/]\s*{re.escape(option)}\b")
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        if choice.search(line.partition("#")[0]):
            return f"{label(file, cwd)}:{number}"
    return None
