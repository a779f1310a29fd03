"""Refuse overrides that are wrong whatever the files say: unknown keys, groups and options, and misleading texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString

from trainer_cli.config.fields import OPEN, KeyPath, sections, unknown_key
from trainer_cli.config.hydra_compat import value_in_quotes
from trainer_cli.config.override_syntax import HOW_TO_OVERRIDE, as_text
from trainer_cli.config.overrides import (
    COMMAND_LINE,
    CommandLine,
    line_of,
    no_option,
    no_such_key,
    path_of,
    refused,
)
from trainer_cli.config.provenance import label
from trainer_cli.config.search_path import SearchPath, groups, options
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.config.yaml_traps import PYTHONS_NULL, instead_of, looks_like_number, why_no_interpolation
from trainer_cli.errors import Code, ConfigError

COMPONENTS = ("model", "data", "optimizer", "scheduler", "step", "sparsity")
"""Sections that `~GROUP` and `GROUP=null` switch off, whatever files set in them."""
_NO_TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_NO_FOLDERS = ("conf", "config")
"""What other programs call the folder of configs."""


def switches_off(choice: Override) -> bool:
    """Whether a choice of a group switches a component off."""
    chooses_none = choice.is_delete() or choice.value() is None
    return chooses_none and choice.package is None and choice.key_or_group in COMPONENTS


def wrong_overrides(search: SearchPath, line: CommandLine) -> Iterator[tuple[str, ConfigError]]:
    """Each wrong override, as written, and what is wrong with it."""
    off = {one.key_or_group: line_of(one) for one in line.overrides if search.is_choice(one) and switches_off(one)}
    for override in line.overrides:
        for mistake in _mistakes(search, override):
            yield line_of(override), mistake
        if search.is_choice(override) and (switch := off.get((override.package or "").partition(".")[0])):
            what = f"{line_of(override)} has no effect: {switch} switches off what it is merged into"
            above, _, name = (override.package or "").partition(".")
            yield line_of(override), refused(what, f"Write its node out: '{above}={{{name}: {{_target_: …}}}}'.")
    for append in line.appends:
        group = "/".join(append.path)
        if search.is_group(group):
            what = f"{append.line}: {group} is a group, and no list"
            yield append.line, refused(what, f"Choose one with {group}=NAME.")
        elif unknown := unknown_key(append.path):
            yield append.line, _no_key(search, *unknown)
        else:
            for mistake in _misleading(append.path, append.quoted, is_open=append.path[0] in OPEN):
                yield append.line, mistake


def _mistakes(search: SearchPath, override: Override) -> Iterator[ConfigError]:
    key, path, line = override.key_or_group, path_of(override), line_of(override)
    if key == "experiment" and not search.is_group(key):
        yield refused(f"there are no experiments: no folder experiment/ in {search.listed()}", code=Code.unknown_option)
    elif path[:1] == ("hydra",) or key.startswith("hydra/"):
        yield refused(f"{line} has no effect", "Hydra only composes the config here.", Code.no_effect)
    elif search.is_choice(override):
        yield from _wrong_options(search, override)
    elif key == "experiment" or ("/" in key and search.is_group(key)):
        what = f"{key} is a group, and takes the name of an option"
        yield refused(what, f"Choose one of: {', '.join(options(search.dirs, key)) or 'none'}.", Code.wrong_type)
    elif not path:
        yield refused(f"{line!r} is no override", HOW_TO_OVERRIDE)
    elif override.package is not None or "/" in key:
        known = groups(search.dirs)
        hint = f"There are: {', '.join(known)}.{did_you_mean(key, known)}"
        parts = tuple(key.split("/"))
        if override.package is None and (parts[:1] in sections() or parts[0] in OPEN) and unknown_key(parts) is None:
            hint = f"Parts of a key are joined by dots: '{line.replace(key, '.'.join(parts), 1)}'."
        yield refused(f"there is no group '{key}'", hint, Code.unknown_option)
    elif unknown := unknown_key(path):
        yield _no_key(search, *unknown)
    elif not override.is_delete():
        yield from _misleading(path, value_in_quotes(override), is_open=path[0] in OPEN)


def _no_key(search: SearchPath, wrong: KeyPath, known: list[str]) -> ConfigError:
    names = groups(search.dirs) if len(wrong) == 1 else []
    return no_such_key(wrong, [*known, *(name for name in names if name not in known)], COMMAND_LINE)


def _misleading(path: KeyPath, value: Any, *, is_open: bool) -> Iterator[ConfigError]:
    """Texts without quotes that look like null or, in an open section, like a number or true and false."""
    key = ".".join(path)
    if value == PYTHONS_NULL and not isinstance(value, QuotedString):
        yield _text_not(key, PYTHONS_NULL, "not null", "null")
    elif isinstance(value, dict):
        if None in value:
            yield refused(f"{key} has the key null, but keys are texts", code=Code.wrong_type)
        for name, below in value.items():
            yield from _misleading((*path, str(name)), below, is_open=is_open)
    elif isinstance(value, list):
        for item in value:
            yield from _misleading(path, item, is_open=is_open)
    text, in_quotes = (value.text, True) if isinstance(value, QuotedString) else (value, False)
    if not isinstance(text, str):
        return
    if why := why_no_interpolation(text):
        yield refused(f"{key}: {text!r} is no interpolation: {why}", "Write ${key}.")
    elif is_open and not in_quotes:
        if instead := _NO_TRUTH.get(text.lower()):
            yield _text_not(key, text, f"not {instead}", instead)
        elif (number := looks_like_number(text)) is not None:
            yield _text_not(key, text, "no number", instead_of(text, number))


def _text_not(key: str, text: str, meant: str, instead: str) -> ConfigError:
    hint = f"Write {instead}, or {as_text(text)} for the text."
    return refused(f"{key}: {text} is a text here, and {meant}", hint, Code.wrong_type)


def _wrong_options(search: SearchPath, override: Override) -> Iterator[ConfigError]:
    key, line, value = override.key_or_group, line_of(override), override.value()
    if override.is_delete():
        return
    if override.is_force_add():
        plain = line.lstrip("+")
        hint = f"Write '{plain}', or '+{plain}' where none is chosen yet."
        yield refused(f"{line}: {key} is a group, whose option is chosen", hint)
        return
    if key == "experiment" and override.package is not None:
        hint = f"Write 'experiment={line.partition('=')[2]}'."
        yield refused(f"{line}: an experiment is merged into the root, and takes no package", hint)
        return
    known = list(options(search.dirs, key))
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        hint = f"For several write a mapping of names: '{key}={{first: {{_target_: …}}}}'."
        yield refused(f"{key} is a list, but it must be a mapping of keys to values", hint, Code.wrong_type)
        return
    if key == "experiment" and value in (None, []):
        hint = f"Leave it out, or choose one: {', '.join(known)}."
        yield refused(f"{line.lstrip('+')} chooses no experiment", hint)
    closed = (key,) in sections()
    for option in value if isinstance(value, list) else [value]:
        if option is None and closed:
            yield refused(f"{key} is a section, and never null", code=Code.wrong_type)
        elif option == PYTHONS_NULL and option not in known:
            hint = "Leave it out." if closed or key == "experiment" else f"For none write {key}=null."
            yield refused(f"there is no {key} called {option!r}", hint, Code.unknown_option)
        elif option is not None and str(option).removesuffix(".yaml") not in known:
            yield _not_read(search, key, str(option)) or no_option(key, str(option), known, COMMAND_LINE)


def _not_read(search: SearchPath, group: str, option: str) -> ConfigError | None:
    """The error for an option whose file exists, but is called `.yml` or is in a folder of another name."""
    file = next((file for folder in search.dirs if (file := folder / group / f"{option}.yml").is_file()), None)
    if file is not None:
        return refused(f"{label(file, search.cwd)} is not read", f"Rename it to {option}.yaml.", Code.unknown_option)
    for name in _NO_FOLDERS:
        if (search.cwd / name / group / f"{option}.yaml").is_file():
            hint = f"Rename {name} to configs, or add -cd {name}."
            return refused(f"{name}/{group}/{option}.yaml is not read", hint, Code.unknown_option)
    return None
