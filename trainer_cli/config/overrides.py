"""The command line's overrides: `ckpt=`, `experiment=` and `key+=value` are ours, the rest is Hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trainer_cli.config.suggest import did_you_mean
from trainer_cli.config.traps import DEEPEST, PYTHONS_NULL, instead_of, looks_like_number
from trainer_cli.config.words import closes_at_end, split_at_commas, unquoted
from trainer_cli.errors import ConfigError

KeyPath = tuple[str, ...]
COMMAND_LINE = "command line"


class Append(NamedTuple):
    """`key+=value`: what is put at the end of a list."""

    path: KeyPath
    values: list[Any]
    line: str
    said: Any = None
    """The value with the quotes that it was given in."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Overrides as Hydra shall see them; what it shall not see: `ckpt` and `+=`; and what cannot be read."""

    overrides: list[Override] = field(default_factory=list)
    ckpt: str | list[str] | None = None
    ckpt_given: bool = False
    appends: list[Append] = field(default_factory=list)
    mistakes: list[ConfigError] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """The overrides as text."""
        return [line_of(override) for override in self.overrides]


def line_of(override: Override) -> str:
    """The override as it was written."""
    return override.input_line or ""


def path_of(override: Override) -> KeyPath:
    """The key as its parts."""
    return tuple(part for part in re.split(r"[.\[\]]+", override.key_or_group) if part)


def read(arguments: Sequence[str]) -> CommandLine:
    """The overrides, all of which can be read.

    Raises:
        ConfigError: naming every argument that is no override, with a hint on quoting.
    """
    line = parsed(arguments)
    raise_all(line.mistakes)
    return line


def parsed(arguments: Sequence[str]) -> CommandLine:
    """Split off `ckpt=` and `key+=value`, rewrite `experiment=x` to `+experiment=x`, and parse the rest.

    Every argument that is no override stands in `mistakes`.
    """
    line = CommandLine()
    patterns: list[str] = []
    given, single = False, True
    parser = OverridesParser.create()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key.lstrip("+").rstrip("+") == "ckpt":
            given = True
            try:
                text, is_list = _patterns(value, argument)
            except ConfigError as error:
                line.mistakes.append(error)
                continue
            single = single and not is_list and not key.endswith("+")
            patterns += text
            continue
        appends = bool(equals) and key.endswith("+")
        if appends and key.startswith(("+", "~")):
            cure = f"To add to the end of a list, write '{key.strip('+~')}+={value}'."
            line.mistakes.append(ConfigError(f"cannot read the override {argument!r}", where=COMMAND_LINE, cure=cure))
            continue
        text_of = f"{key[:-1]}={value}" if appends else argument
        try:
            override = parser.parse_override("+" + text_of if key == "experiment" and equals else text_of)
            deep = not override.is_sweep_override() and _depth(override.value()) > DEEPEST
        except (HydraException, ValueError, RecursionError):
            line.mistakes.append(_unreadable(argument))
            continue
        if deep:
            what = f"{argument[:40]}... is nested more than {DEEPEST} deep"
            line.mistakes.append(ConfigError(what, where=COMMAND_LINE))
        elif override.is_sweep_override():
            line.mistakes.append(_sweep(argument))
        elif appends:
            added: Any = override.value()
            values = added if isinstance(added, list) else [added]
            line.appends.append(Append(path_of(override), values, argument, override._value))
        else:
            line.overrides.append(override)
            # What was added to a list before goes with the list.
            line.appends[:] = [append for append in line.appends if not _replaces(override, append.path)]
    ckpt = patterns if not single or len(patterns) > 1 else (patterns[0] if patterns else None)
    return CommandLine(line.overrides, ckpt, given, line.appends, line.mistakes)


def _replaces(override: Override, key: KeyPath) -> bool:
    """Whether an override sets `key`. A mapping is merged, and sets only what it names."""
    path = path_of(override)
    if path != key[: len(path)]:
        return False
    value = override.value()
    for name in key[len(path) :]:
        if override.is_delete() or not isinstance(value, dict):
            return True
        if name not in value:
            return False
        value = value[name]
    return True


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def raise_all(mistakes: Sequence[ConfigError]) -> None:
    """Raise the mistakes as one error, if there are any; each is told once."""
    mistakes = list({str(mistake): mistake for mistake in mistakes}.values())
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        listed = "\n".join(f"  - {mistake}" for mistake in mistakes)
        raise ConfigError(f"{len(mistakes)} mistakes:\n{listed}\n")


def _patterns(value: str, argument: str) -> tuple[list[str], bool]:
    """What `ckpt=VALUE` names: one pattern, or the parts of `[a,b]`."""
    text = unquoted(value.strip())
    if text == "null":
        return [], False
    if value.strip() == PYTHONS_NULL:
        cure = "Write ckpt=null."
        raise ConfigError(f"ckpt: {PYTHONS_NULL} is a text here, and not null", where=COMMAND_LINE, cure=cure)
    if not text:
        raise ConfigError("ckpt= names nothing", where=COMMAND_LINE, cure="Give a path, a glob, or ckpt=null.")
    if not (text.startswith("[") and text.endswith("]") and closes_at_end(text)):
        return [text], False
    parts = [unquoted(part.strip()) for part in split_at_commas(text[1:-1])]
    if not all(parts):
        raise ConfigError(f"{argument} has an empty part", where=COMMAND_LINE, cure="Write ckpt='[a,b]'.")
    return parts, True


def _unreadable(argument: str) -> ConfigError:
    from trainer_cli.config.unreadable import cure_of  # For mistakes alone.

    what = f"cannot read the override {argument!r}" if "=" in argument else f"{argument!r} is no override"
    return ConfigError(what, where=COMMAND_LINE, cure=cure_of(argument))


def _sweep(argument: str) -> ConfigError:
    key, _, value = argument.partition("=")
    number = looks_like_number(value)
    instead = f"For a number write '{key}={instead_of(value, number)}', for" if number is not None else "For"
    instead += f" a list write '{key}=[{value}]', for a text '{key}=\"{value}\"', or -m to run each (train fit -m)."
    return ConfigError(
        f"{argument!r} gives several values, but one run takes one",
        where=COMMAND_LINE,
        cure=instead,
    )


def add(values: dict[str, Any], append: Append) -> ConfigError | None:
    """Put the values at the end of their list, in place; null begins a new one. Else why that cannot be."""
    key, whole = ".".join(append.path), f"[{','.join(map(str, append.values))}]"
    above: Any = values
    last: Any = values
    place: Any = None
    for depth, part in enumerate(append.path):
        if not isinstance(above, Mapping | list):
            shown = "null" if above is None else "no mapping"
            return ConfigError(f"{append.line}: {'.'.join(append.path[:depth])} is {shown}", where=COMMAND_LINE)
        known = {str(index) for index in range(len(above))} if isinstance(above, list) else set(above)
        if part not in known:
            prefix = ".".join(append.path[:depth])
            hint = did_you_mean(key, [f"{prefix}.{name}" for name in known]).strip()
            cure = f"{hint} To make the list, write '+{key}={whole}'.".strip()
            return ConfigError(f"there is no key '{key}'", where=COMMAND_LINE, cure=cure)
        last, place = above, (int(part) if isinstance(above, list) else part)
        above = last[place]
    if above is not None and not isinstance(above, list):
        shown = "has no value yet" if above == "???" else f"is {above!r}, and no list"
        single = above != "???" and not isinstance(above, Mapping) and len(append.values) == 1
        cure = f"Write {key}={append.values[0] if single else whole}."
        return ConfigError(f"{append.line}: {key} {shown}", where=COMMAND_LINE, cure=cure)
    last[place] = [*(above or []), *append.values]
    return None
