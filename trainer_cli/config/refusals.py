"""What is wrong with overrides and defaults lists, in our words: before Hydra sees them, and after it refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig

from trainer_cli.config import check, locate
from trainer_cli.config.origins import label
from trainer_cli.config.overrides import COMMAND_LINE, CommandLine, KeyPath, line_of, path_of
from trainer_cli.config.place import Place
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.config.traps import PYTHONS_NULL, instead_of, looks_like_number, why_no_interpolation
from trainer_cli.config.words import as_text
from trainer_cli.errors import ConfigError

SCHEMA = "train_schema"
"""Name under which the schema is listed first in a primary config's defaults."""


NOT_COMPOSED = (ValueError, TypeError, AssertionError, AttributeError, RecursionError)
"""What Hydra raises, beside its own errors, for defaults lists that it did not expect."""
_NO_TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def wrong_overrides(place: Place, line: CommandLine) -> Iterator[tuple[str, ConfigError]]:
    """Overrides, as written, that can be refused by looking at them: unknown keys, groups and options; and why."""
    schema = check.typed()
    for override in line.overrides:
        for mistake in _mistakes_of(place, override, schema):
            yield line_of(override), mistake
    for append in line.appends:
        group = "/".join(append.path)
        if place.is_group_name(group):
            what, cure = f"{append.line}: {group} is a group, and no list", f"Choose one with {group}=NAME."
            yield append.line, ConfigError(what, where=COMMAND_LINE, cure=cure)
        elif unknown := check.unknown_key(append.path, schema):
            yield append.line, _no_key(place, *unknown)
        else:
            for mistake in _odd_values(append.path, append.said, is_open=append.path[0] in check.OPEN):
                yield append.line, mistake


def _mistakes_of(place: Place, override: Override, schema: DictConfig) -> Iterator[ConfigError]:
    key, path = override.key_or_group, path_of(override)
    if key == "experiment" and not place.is_group(override):
        yield ConfigError(
            f"there are no experiments: no folder experiment/ in {place.listed()}",
            where=COMMAND_LINE,
        )
    elif path[:1] == ("hydra",) or key.startswith("hydra/"):
        yield ConfigError(
            f"{line_of(override)} has no effect",
            where=COMMAND_LINE,
            cure="Hydra only composes the config here.",
        )
    elif place.is_group(override):
        yield from _wrong_options(place, override)
    elif not path:
        yield ConfigError(f"{line_of(override)!r} is no override", where=COMMAND_LINE, cure="Write key=value.")
    elif override.package is not None or "/" in key:
        groups = locate.groups(place.dirs)
        cure = f"There are: {', '.join(groups)}.{did_you_mean(key, groups)}"
        parts = tuple(key.split("/"))
        if override.package is None and parts[0] in schema and check.unknown_key(parts, schema) is None:
            cure = f"Parts of a key are joined by dots: '{line_of(override).replace(key, '.'.join(parts), 1)}'."
        yield ConfigError(f"there is no group '{key}'", where=COMMAND_LINE, cure=cure)
    elif unknown := check.unknown_key(path, schema):
        yield _no_key(place, *unknown)
    elif not override.is_delete():
        yield from _odd_values(path, override._value, is_open=path[0] in check.OPEN)


def _no_key(place: Place, wrong: KeyPath, known: list[str]) -> ConfigError:
    groups = locate.groups(place.dirs) if len(wrong) == 1 else []
    return check.no_such_key(wrong, [*known, *(g for g in groups if g not in known)], COMMAND_LINE)


def _odd_values(path: KeyPath, value: Any, *, is_open: bool = True) -> Iterator[ConfigError]:
    """Texts without quotes that look like null or, where no type tells what was meant, a number or true and false."""
    key = ".".join(path)
    if value == PYTHONS_NULL:
        yield _no_null(key)
    if isinstance(value, QuotedString):
        value, is_open = value.text, False
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _odd_values((*path, str(name)), below, is_open=is_open)
    elif isinstance(value, list):
        for item in value:
            yield from _odd_values(path, item, is_open=is_open)
    elif isinstance(value, str) and (why := why_no_interpolation(value)):
        yield ConfigError(f"{key}: {value!r} is no interpolation: {why}", where=COMMAND_LINE, cure="Write ${key}.")
    elif isinstance(value, str) and is_open:
        if instead := _NO_TRUTH.get(value.lower()):
            cure = f"Write {instead}, or {as_text(str(value))} for the text."
            yield ConfigError(f"{key}: {value} is a text here, and not {instead}", where=COMMAND_LINE, cure=cure)
        elif (number := looks_like_number(value)) is not None:
            cure = f"Write {instead_of(value, number)}, or {as_text(str(value))} for the text."
            yield ConfigError(f"{key}: {value} is a text here, and no number", where=COMMAND_LINE, cure=cure)


def _no_null(key: str) -> ConfigError:
    cure = f"Write null, or {as_text(PYTHONS_NULL)} for the text."
    return ConfigError(f"{key}: {PYTHONS_NULL} is a text here, and not null", where=COMMAND_LINE, cure=cure)


def _wrong_options(place: Place, override: Override) -> Iterator[ConfigError]:
    if override.is_delete():
        return
    value = override.value()
    key = override.key_or_group
    if override.is_force_add():
        cure = f"Write {line_of(override).lstrip('+')}."
        yield ConfigError(
            f"{line_of(override)}: {key} is a group, whose option is chosen", where=COMMAND_LINE, cure=cure
        )
        return
    known = list(locate.options(place.dirs, key))
    if key == "experiment" and value in (None, []):
        cure = f"Leave it out, or choose one: {', '.join(known)}."
        yield ConfigError(f"{line_of(override).lstrip('+')} chooses no experiment", where=COMMAND_LINE, cure=cure)
    schema = check.typed()
    closed = key in schema and check.is_closed(schema._get_node(key))
    for option in value if isinstance(value, list) else [value]:
        if option is None and closed:
            yield ConfigError(f"{key} is a section, and never null", where=COMMAND_LINE)
        elif isinstance(option, dict):
            cure = f"Set its keys one by one, as in {key}.KEY=VALUE, or choose one of: {', '.join(known) or 'none'}."
            yield ConfigError(f"{key} is a group, and takes the name of an option", where=COMMAND_LINE, cure=cure)
        elif option == PYTHONS_NULL and option not in known:
            what = f"there is no {key} called {option!r}"
            cure = "Leave it out." if closed or key == "experiment" else f"For none write {key}=null."
            yield ConfigError(what, where=COMMAND_LINE, cure=cure)
        elif option is not None and str(option).removesuffix(".yaml") not in known:
            yield _not_read(place, key, str(option)) or _no_option(key, str(option), known, COMMAND_LINE)


_NO_FOLDERS = ("conf", "config")
"""What other programs call the folder of configs."""


def _not_read(place: Place, group: str, option: str) -> ConfigError | None:
    """The error for an option whose file is there, but is called `.yml` or stands in a folder of another name."""
    file = next((file for folder in place.dirs if (file := folder / group / f"{option}.yml").is_file()), None)
    if file is not None:
        what, cure = f"{label(file, place.cwd)} is not read", f"Rename it to {option}.yaml."
        return ConfigError(what, where=COMMAND_LINE, cure=cure)
    for name in _NO_FOLDERS:
        if (place.cwd / name / group / f"{option}.yaml").is_file():
            what, cure = f"{name}/{group}/{option}.yaml is not read", f"Rename {name} to configs, or add -cd {name}."
            return ConfigError(what, where=COMMAND_LINE, cure=cure)
    return None


def _no_option(group: str, option: str, known: Sequence[str], where: str) -> ConfigError:
    meant = did_you_mean(option, known) or did_you_mean(option.removesuffix(".yaml").rpartition("/")[2], known)
    cure = f"There are: {', '.join(known) or 'none'}.{meant}"
    return ConfigError(f"there is no {group} called {option!r}", where=where, cure=cure)


def why_refused(override: Override, error: HydraException) -> ConfigError:
    """Hydra's error for one override that does not fit the composed config, in our words."""
    cause = str(error.__cause__ or "").splitlines()
    because = f": {cause[0]}" if cause else ""
    return _reply(str(error)) or ConfigError(f"cannot set {line_of(override)}{because}", where=COMMAND_LINE)


def no_value(override: Override, composed: DictConfig, place: Place) -> ConfigError | None:
    """The error for an override of a key that the composed config does not have; None where it has.

    Told before the override is applied, since that may put an empty mapping into the place of null.
    """
    path, line = path_of(override), line_of(override)
    if path[0] not in list(composed):
        return ConfigError(
            f"{place.primary}.yaml does not begin with the schema, so {path[0]!r} is not in it",
            where=COMMAND_LINE,
            cure=f"Put '- {SCHEMA}' first in its defaults list.",
        )
    node: Any = composed
    for depth, part in enumerate(path):
        above = ".".join(path[:depth])
        if isinstance(node, ListConfig):
            return _of_a_list(line, above)
        if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
            is_null = node is None or (isinstance(node, DictConfig) and node._is_none())
            cure = f"Choose one first, as in {above}=NAME." if is_null and depth == 1 else None
            shown = "null" if is_null else "not a mapping"
            return ConfigError(f"{line}: {above} is {shown}", where=COMMAND_LINE, cure=cure)
        if part not in list(node):  # `part in node` does not find what is missing (???)
            known = [".".join((*path[:depth], str(name))) for name in node]
            hint = did_you_mean(".".join(path), known).strip()
            add = f"To add it, write '+{line}'."
            if depth == 1 and part in locate.options(place.dirs, above):
                several = above in ("callbacks", "loggers")
                hint, add = f"Choose it first, as in {above}={f'[default,{part}]' if several else part}.", ""
            return ConfigError(f"there is no key '{'.'.join(path)}'", where=COMMAND_LINE, cure=f"{hint} {add}".strip())
        node = node._get_node(part)
        node = node if isinstance(node, DictConfig | ListConfig) else node._value()
    return None


def _of_a_list(line: str, above: str) -> ConfigError:
    """A single item of a list is not set by its number, for what it means changes with the list."""
    cure = f"Write the whole list, {above}=[...], or add to its end, {above}+=ITEM."
    return ConfigError(f"{line}: {above} is a list, whose items are not set singly", where=COMMAND_LINE, cure=cure)


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
        r"Could not override '([^']+)'\.\s*Did you mean to override (\S+)\?",
        lambda m: (f"{m[1]} is not in the defaults list", f"Did you mean '{m[2]}=NAME'?"),
    ),
    (
        r"Could not delete from config\. '([^']+)' does not exist",
        lambda m: (f"there is no '{m[1]}' to remove", ""),
    ),
    (
        r"Could not delete from config\. The value of '([^']+)' is (.*) and not (.*)\.$",
        lambda m: (f"{m[1]} is {m[2]}, and not {m[3]}, so it is not removed", f"Write ~{m[1]}."),
    ),
    (
        r"Could not delete '([^']+)'\. No match in the defaults list",
        lambda m: (f"{m[1]} is not in the defaults list, so it cannot be removed", ""),
    ),
]


def translated(error: Exception, place: Place, command: CommandLine, files: Mapping[Path, Any]) -> ConfigError:
    """Hydra's error in our words. `files` are those that it has read so far: the last one is to blame, or blames."""
    text = str(error) or str(error.__cause__ or "")
    if isinstance(error, MissingConfigException):
        return _missing_file(text, place, command)
    if found := re.search(r"(\S+) appears more than once in the final|Multiple values for ([^.]+)\.", text):
        return _chosen_twice(found[1] or found[2], place, command, files)
    if found := re.search(r"You must specify '([^'@]+)", text):
        return _not_chosen(found[1], place, files)
    if wrong := _wrong_override(text, place):
        return wrong
    if reply := _reply(text):
        return reply
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    what = " ".join(lines) or f"{type(error).__name__} in a defaults list"
    if isinstance(error, RecursionError):
        what = "a defaults list leads back to its own file"
    last = next(reversed(list(files)), None)
    where = label(last, place.cwd) if last else None
    if found := re.search(r"Error resolving interpolation '([^']+)'", text):
        what = f"a defaults list cannot resolve {found[1]}"
        where = next((at for path in files if (at := _mention(path, re.escape(found[1]), place.cwd))), where)
    return ConfigError(f"cannot compose: {what}", where=where)


def _wrong_override(text: str, place: Place) -> ConfigError | None:
    """An `override` in the defaults list of a file: of what nobody chose before, or not at the list's end."""
    if found := re.search(r"In '([^']+)': Could not override '([^'@]+)[^']*'\. No match in the defaults list", text):
        what = f"nothing chooses a {found[2]} that could be overridden"
        cure = f"Write '- /{found[2]}: OPTION' without override, or choose one in {place.primary}.yaml."
    elif found := re.search(
        r"In '([^']+)': Could not override '([^'@]+)(@[^']*)'\.\s*Did you mean to override (\S+)\?", text
    ):
        what, cure = f"nothing chooses a {found[2]} for {found[3][1:]}", f"Write '- override /{found[4]}: OPTION'."
    elif found := re.search(r"In (\S+): Override '(\S+) : [^']*' is defined before '([^']+)'", text):
        what, cure = f"an override of {found[2]} stands before {found[3]!r}", "Move overrides to the end of the list."
    else:
        return None
    file = locate.find(place.dirs, found[1])
    entry = rf"^\s*-\s*override\s+/?{re.escape(found[2])}(?:@\S*)?\s*:"
    at = _mention(file, entry, place.cwd) if file is not None else None
    return ConfigError(what, where=at or found[1], cure=cure)


def _not_chosen(group: str, place: Place, files: Mapping[Path, Any]) -> ConfigError:
    """A defaults list leaves the choice of a group to the command line (`- group: ???`)."""
    entry = rf"^\s*-\s*(?:override\s+)?/?{re.escape(group)}(?:@\S*)?\s*:\s*['\"]?\?\?\?"
    where = next((at for path in files if (at := _mention(path, entry, place.cwd))), None)
    cure = f"Add {group}=NAME to the command line: {', '.join(locate.options(place.dirs, group)) or 'none'}."
    return ConfigError(f"{group} must be chosen", where=where, cure=cure)


def _chosen_twice(group: str, place: Place, command: CommandLine, files: Mapping[Path, Any]) -> ConfigError:
    """Two defaults lists choose an option of one group, or one and a `+group=` do."""
    added = [line_of(one) for one in command.overrides if one.key_or_group == group and one.is_add()]
    if added and group != "experiment":
        cure = "Leave out the '+'."
        return ConfigError(f"{added[0]}: {group} is chosen already", where=COMMAND_LINE, cure=cure)
    entry = rf"^\s*-\s*(?:optional\s+)?/?{re.escape(group)}(?:@\S*)?\s*:"
    primary = locate.find(place.dirs, place.primary)
    for path in [path for path in files if path != primary]:
        if where := _mention(path, entry, place.cwd):
            what = f"{group} is chosen already, in {label(primary or path, place.cwd)}"
            return ConfigError(what, where=where, cure=f"Write '- override /{group}: OPTION'.")
    choice = rf"{entry}(?!\s*(?:null|~|$))"
    if group == "experiment" and primary is not None and (where := _mention(primary, choice, place.cwd)):
        cure = "Remove the line, and choose it on the command line alone."
        return ConfigError("experiment is chosen already", where=where, cure=cure)
    return ConfigError(f"{group} is chosen twice", where=COMMAND_LINE, cure="Name it once.")


def _reply(text: str) -> ConfigError | None:
    for pattern, reply in _REPLIES:
        if match := re.search(pattern, text):
            what, cure = reply(match)
            return ConfigError(what, where=COMMAND_LINE, cure=cure or None)
    return None


def _missing_file(text: str, place: Place, command: CommandLine) -> ConfigError:
    """A defaults list names a file that is not there: one that the command line chose, or the one Hydra blames."""
    parent = re.search(r"In '([^']+)'", text)
    wanted = re.search(r"(?:Could not find|Could not load) '([^']+)'", text)
    if wanted is None:
        return ConfigError(" ".join(text.split("Config search path")[0].split()))
    group, _, option = wanted[1].removesuffix(".yaml").rpartition("/")
    chosen = [f"{o.key_or_group}/{o.value()}" for o in command.overrides if place.is_group(o)]
    names = [*chosen, parent[1] if parent else "", place.primary]
    files = [file for name in names if (file := locate.find(place.dirs, name))]
    choices = [rf"{re.escape(group)}\S*\s*[:/].*\b{re.escape(option)}\b"] if group else []
    choices.append(rf"^\s*-\s*/?{re.escape(option)}\b")
    places = (found for choice in choices for file in files if (found := _mention(file, choice, place.cwd)))
    where = next(places, "defaults list")
    if not group:
        known = [*locate.primaries(place.dirs), SCHEMA]
        cure = did_you_mean(option, known).strip() or None
        return ConfigError(f"the defaults list names {option}.yaml, which is not there", where=where, cure=cure)
    return _no_option(group, option, list(locate.options(place.dirs, group)), where)


def _mention(file: Path, pattern: str, cwd: Path) -> str | None:
    """`file:line` of the first line that the pattern fits, comments left out."""
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        if re.search(pattern, line.partition("#")[0]):
            return f"{label(file, cwd)}:{number}"
    return None
