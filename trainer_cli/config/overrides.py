"""The overrides of the command line: `ckpt=`, `experiment=` and `key+=value`, and Hydra's grammar for the rest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Sweep
from hydra.errors import HydraException

from trainer_cli.config.fields import DATA_KEYS, KeyPath, sections
from trainer_cli.config.hydra_compat import value_in_quotes
from trainer_cli.config.override_syntax import closes_at_end, hint_for, in_quotes, split_at_commas, unquoted
from trainer_cli.config.suggest import did_you_mean, of_a_section
from trainer_cli.config.yaml_traps import DEEPEST, PYTHONS_NULL, instead_of, looks_like_number
from trainer_cli.errors import Code, ConfigError, raise_all

COMMAND_LINE = "command line"
_USUAL = ("optimizer.lr", "optimizer.weight_decay", "data.batch_size", "data.num_workers")
"""Keys of open sections that most components have."""


class Append(NamedTuple):
    """`key+=value`: what is added to the end of a list."""

    path: KeyPath
    values: list[Any]
    line: str
    quoted: Any = None
    """The value with the quotes that it was given in."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Overrides in Hydra's grammar; `ckpt` and `+=`, which are not; and what is in neither."""

    overrides: list[Override] = field(default_factory=list)
    ckpt: str | list[str] | None = None
    ckpt_given: bool = False
    appends: list[Append] = field(default_factory=list)
    mistakes: list[ConfigError] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """The overrides as text."""
        return [line_of(override) for override in self.overrides]


def refused(what: str, hint: str | None = None, code: Code = Code.override) -> ConfigError:
    """The error for something on the command line."""
    return ConfigError(what, source=COMMAND_LINE, code=code, hint=hint)


def no_such_key(path: KeyPath, known: Sequence[str], source: str) -> ConfigError:
    """The error for a key that does not exist, with the nearest that does."""
    above = ".".join(path[:-1])
    names = [f"{above}.{name}" if above else name for name in known]
    if not above and source != COMMAND_LINE:
        names.append("defaults")  # Hydra's own, which no schema knows.
    key = ".".join(path)
    below = [*_USUAL, *(".".join((*at, one.name)) for at, kind in sections().items() for one in fields(kind))]
    hint = did_you_mean(key, names) or ("" if above else of_a_section(key, below))
    hint = hint.strip() or f"Known here: {', '.join(known)}."
    return ConfigError(f"there is no key '{key}'", location=key, source=source, code=Code.unknown_key, hint=hint)


def no_option(group: str, option: str, known: Sequence[str], source: str) -> ConfigError:
    """The error for an option that a group does not have."""
    meant = did_you_mean(option, known) or did_you_mean(option.removesuffix(".yaml").rpartition("/")[2], known)
    hint = f"There are: {', '.join(known) or 'none'}.{meant}"
    return ConfigError(f"there is no {group} called {option!r}", source=source, code=Code.unknown_option, hint=hint)


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
            hint = f"To add to the end of a list, write '{key.strip('+~')}+={value}'."
            line.mistakes.append(refused(f"cannot read the override {argument!r}", hint))
            continue
        text_of = f"{key[:-1]}={value}" if appends else argument
        try:
            override = parser.parse_override(f"{_implied(key) if equals else ''}{text_of}")
            deep = not override.is_sweep_override() and _depth(override.value()) > DEEPEST
        except (HydraException, ValueError, RecursionError):
            line.mistakes.append(_unreadable(argument))
            continue
        if deep:
            line.mistakes.append(refused(f"{argument[:40]}... is nested more than {DEEPEST} deep"))
        elif override.is_sweep_override():
            line.mistakes.append(_sweep(argument, override.value()))
        elif _has_sweep(override.value()):
            hint = f"Give whole values instead: '{override.get_key_element()}=[A],[B]', with -m (train fit -m)."
            line.mistakes.append(refused(f"{argument!r} has values to sweep inside of another", hint))
        elif appends:
            added: Any = override.value()
            values = added if isinstance(added, list) else [added]
            line.appends.append(Append(path_of(override), values, argument, value_in_quotes(override)))
        else:
            line.overrides.append(override)
            # What was added to a list before goes with the list.
            line.appends[:] = [append for append in line.appends if not _replaces(override, append.path)]
    ckpt = patterns if not single or len(patterns) > 1 else (patterns[0] if patterns else None)
    return CommandLine(line.overrides, ckpt, given, line.appends, line.mistakes)


def _implied(key: str) -> str:
    """The sign of an override that may leave it out: a choice of the root, and what every `data` may have."""
    if key in ("experiment", "debug"):
        return "+"
    section, _, name = key.partition(".")
    return "++" if section == "data" and name in DATA_KEYS else ""


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


def _patterns(value: str, argument: str) -> tuple[list[str], bool]:
    """What `ckpt=VALUE` names: one pattern, or the parts of `[a,b]`."""
    text = unquoted(value.strip())
    if text == "null":
        return [], False
    if value.strip() == PYTHONS_NULL:
        hint = "Write ckpt=null."
        raise refused(f"ckpt: {PYTHONS_NULL} is a text here, and not null", hint)
    if not text:
        raise refused("ckpt= names nothing", "Give a path, a glob, or ckpt=null.")
    if not (text.startswith("[") and text.endswith("]") and closes_at_end(text)):
        return [text], False
    parts = [unquoted(part.strip()) for part in split_at_commas(text[1:-1])]
    if not all(parts):
        raise refused(f"{argument} has an empty part", "Write ckpt='[a,b]'.")
    return parts, True


def _unreadable(argument: str) -> ConfigError:
    what = f"cannot read the override {argument!r}" if "=" in argument else f"{argument!r} is no override"
    return refused(what, hint_for(argument))


def _sweep(argument: str, sweep: Any) -> ConfigError:
    """The error for several values in one run. A function has no values in it that a list could hold."""
    key, _, value = argument.partition("=")
    what = f"{argument!r} gives several values, but one run takes one"
    text = in_quotes(key, value)
    if isinstance(sweep, IntervalSweep):
        return refused(what, f"An interval has no end of values: list them ({key}=1,2), with -m (train fit -m).")
    if re.match(r"\w+\(", value):
        return refused(what, f"Add -m to run each (train fit -m), or for a text write {text}.")
    number = looks_like_number(value)
    instead = f"For a number write '{key}={instead_of(value, number)}', for" if number is not None else "For"
    instead += f" a list write {shlex.quote(f'{key}=[{value}]')}, for a text {text}, or -m to run each (train fit -m)."
    return refused(what, instead)


def _has_sweep(value: Any) -> bool:
    """Whether values to sweep stand in a list or a mapping, where nothing tries each."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(item, Sweep) or _has_sweep(item) for item in items)
