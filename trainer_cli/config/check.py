"""Check overrides before composing, and the composed config against the schema; all mistakes are reported at once.

`find_wrong_overrides` finds unknown keys, groups and options, and misleading strings, without reading a file.
`validate` resolves interpolations and checks each value. A wrong value is replaced by its default, so that the other
values can still be checked.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.auto_values import replace_auto
from trainer_cli.config.hydra_compat import value_in_quotes
from trainer_cli.config.hydra_errors import explain_unresolved
from trainer_cli.config.overrides import (
    HOW_TO_OVERRIDE,
    CommandLine,
    as_list,
    as_text,
    correct_choice,
    hint_on_setting,
    line_of,
    override_error,
    parse_override,
    parse_overrides,
    path_of,
    strip_quotes,
    unknown_key_error,
    unknown_option_error,
)
from trainer_cli.config.search_path import SearchPath
from trainer_cli.config.tree import COMMAND_LINE, ConfigTree, Node, resolve
from trainer_cli.config.yaml import PYTHONS_NULL, TRUTH_WORDS, instead_of, looks_like_number, why_no_interpolation
from trainer_cli.errors import Code, ConfigError
from trainer_cli.keys import OPEN, KeyPath, sections, text_keys, unknown_key
from trainer_cli.parts import explain_missing
from trainer_cli.patterns import did_you_mean, find_nearest
from trainer_cli.schema import RESUME_WORDS, TrainConfig
from trainer_cli.values import (
    IN_QUOTES,
    MISSING,
    SECTION,
    ValueKind,
    check_values,
    kind_of,
    name_of,
    to_yaml_line,
    unfit_value,
)

NODE = "a node with `_target_`, or null"
_BY_NAME = ("param_groups", "callbacks", "loggers")
"""Sections that are mappings of names to nodes."""
_NO_VALUE = object()
"""In place of a value that is wrong or missing; None is a value."""
_INT64 = range(-(2**63), 2**63)
"""torch's whole numbers have 64 bits."""
_BOOLS = dict.fromkeys(("true", "yes", "on", "y", "1"), True) | dict.fromkeys(("false", "no", "off", "n", "0"), False)


def restore_texts(root: Node) -> None:
    """Replace `nan` and `inf`, which YAML reads as numbers, by their text where a key takes only strings."""
    for path in text_keys():
        node = root.at(path)
        if node is not None and isinstance(node.value, float) and not math.isfinite(node.value):
            node.value = node.written(node.value)


def validate(tree: ConfigTree, *, missing_ok: bool = False) -> tuple[TrainConfig, list[ConfigError]]:
    """The config, interpolations resolved, and all mistakes in it. `missing_ok`: values may still be `???`."""
    validation = _Validation(tree, missing_ok)
    config = validation.check_section(TrainConfig, tree.root)
    assert isinstance(config, TrainConfig)
    return config, validation.mistakes


class _Validation:
    """One pass over a config. `_wrong` holds the paths of the mistakes, each of which is reported once."""

    def __init__(self, tree: ConfigTree, missing_ok: bool) -> None:
        self.mistakes: list[ConfigError] = []
        self._tree = tree
        self._missing_ok = missing_ok
        self._wrong: set[KeyPath] = set()
        # What refers to a value that is `auto` is computed with a number here, and again once the value is found.
        self._resolving = OmegaConf.create(replace_auto(tree.root.plain()))

    def check_section(self, section: type, node: Node, path: KeyPath = ()) -> Any:
        """Check the section at `path` and build its dataclass `section`, with defaults in place of wrong values."""
        mistakes_before = len(self.mistakes)
        known_fields = {config_field.name: config_field for config_field in dataclasses.fields(section)}
        for name, child in node.value.items():
            if str(name) not in known_fields:
                self._add_unknown_key((*path, str(name)), child, [*known_fields])
        # Only what is right: the dataclass fills in its default for the rest, and the checks continue.
        converted: dict[str, Any] = {}
        for name, config_field in known_fields.items():
            if (child := node.value.get(name)) is None:
                continue
            key_path = (*path, name)
            kind = config_field.type
            if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
                if (value := self._check_value(section, config_field, child, key_path)) is not _NO_VALUE:
                    converted[name] = value
            elif child.is_mapping:
                converted[name] = self.check_section(kind, child, key_path)
            else:
                first = f"{'.'.join(key_path)}.{dataclasses.fields(kind)[0].name}"
                is_switch = isinstance(child.value, bool) and first.endswith(".enabled")
                hint = f"Write {first}={str(child.value).lower()}." if is_switch else f"Set its keys, such as {first}."
                self._refuse(key_path, child.plain(), SECTION, hint)
        if path and len(self.mistakes) > mistakes_before:
            return section()  # Contradictions between values are checked only if each value is right.
        try:
            return section(**converted)
        except ConfigError as error:
            key_path = tuple((error.location or "").split("."))
            node_at_key = self._tree.root.at(key_path)
            self._add(key_path, error, None if node_at_key is None else node_at_key.plain())
            return section()

    def _add_unknown_key(self, path: KeyPath, node: Node, known_fields: list[str]) -> None:
        """Report a key that its section does not have, with what is meant by the values below it."""
        leaves = [item for item in node.walk() if not item[1].is_mapping and not any(map(str.isdecimal, item[0]))]
        source = self._tree.source(path)
        mistake, *others = (
            unknown_key_error(path, known_fields, source, to_yaml_line(leaf.plain()), subpath)
            for subpath, leaf in leaves or [((), node)]
        )
        hints = dict.fromkeys(each.hint for each in (mistake, *others) if each.hint)
        mistake.cure = " ".join(hints).replace("? Did you mean ", ", ")
        self.mistakes.append(self._explain_misplaced(path, mistake))

    def _explain_misplaced(self, path: KeyPath, mistake: ConfigError) -> ConfigError:
        """The error for an unknown key: if it is the package of a chosen option, the error points to the choice."""
        choice = self._tree.choices.get(path)
        if choice is None:
            return mistake
        words, source = choice.origin.words, choice.origin.source
        key, _, option = words.partition("=")
        group, at_sign, _ = key.partition("@")
        if group == "experiment":  # Its own header says where it goes.
            return mistake.at(f"{choice.label}:1")
        hint = mistake.hint
        if not at_sign and path == tuple(group.split("/")):
            correction = f"+{group}@KEY={option}" if source == COMMAND_LINE else f"- /{group}@KEY: {option}"
            hint = f"Say where it belongs: write '{correction}'."
        return ConfigError(mistake.message, location=mistake.location, source=source, code=mistake.code, hint=hint)

    def _check_value(self, section: type, config_field: dataclasses.Field[Any], node: Node, path: KeyPath) -> Any:
        """The resolved value of one key, of its type; _NO_VALUE where it is wrong or still to be given."""
        if node.value == MISSING:
            self._require(path)
            return _NO_VALUE
        # The schema declares these as Any or as mappings, so that their shape is checked here.
        if path[0] in (*OPEN, "ckpt"):
            self._check_shape(path[0], node)
        resolved, kind = self._resolve(node, path), kind_of(config_field.type)
        if kind is not None and path not in self._wrong:
            resolved = self._convert(kind, node.plain(), resolved, path)
        wrong_references = [f"${{{'.'.join(wrong)}}}" for wrong in self._wrong]
        # The default `runs/${name}` is not to blame for a wrong name.
        is_wrong = node.is_interpolation and any(reference in node.value for reference in wrong_references)
        if is_wrong or path in self._wrong:
            return _NO_VALUE
        try:
            return check_values(section, {path[-1]: resolved}, ".".join(path[:-1]))[path[-1]]
        except ConfigError as error:
            self._add(path, error, resolved)
            return _NO_VALUE

    def _resolve(self, node: Node, path: KeyPath) -> Any:
        """A value with interpolations resolved. Wrong items of a mapping or list are left out."""
        if isinstance(node.value, dict):
            items = {key: self._resolve(child, (*path, str(key))) for key, child in node.value.items()}
            return {key: item for key, item in items.items() if (*path, str(key)) not in self._wrong}
        if isinstance(node.value, list):
            children = [((*path, str(index)), child) for index, child in enumerate(node.value)]
            pairs = [(child_path, self._resolve(child, child_path)) for child_path, child in children]
            return [item for child_path, item in pairs if child_path not in self._wrong]
        # OmegaConf keeps the value of an earlier file where a later one asks for it by `???`.
        if node.text == MISSING or node.value == MISSING:
            self._require(path)
        value = node.value
        if node.is_interpolation:
            try:
                value = resolve(self._resolving, path)
            except (OmegaConfBaseException, RecursionError) as error:
                known_keys = [".".join(path) for path, leaf in self._tree.root.walk() if not leaf.is_mapping]
                message, hint = explain_unresolved(error, value, known_keys)
                self._report(path, f"{'.'.join(path)}: {message}", hint, code=Code.unresolved)
                # Other interpolations that refer to it resolve without further mistakes.
                OmegaConf.update(self._resolving, ".".join(path), None)
                return None
        for leaf_path, leaf in Node.of(value).walk(path):
            self._check_number(leaf_path, leaf.value)
        return value

    def _convert(self, kind: ValueKind, value: Any, resolved: Any, path: KeyPath) -> Any:
        """Convert whole numbers to strings or floats, and strings from interpolations to the type of the key.

        `value` is the value before interpolations were resolved.
        """
        if name_of(resolved) is None and path[0] not in OPEN:
            self._refuse(path[:-1] if path[-1].isdecimal() else path, resolved, str(kind))
            return resolved
        if isinstance(resolved, list):
            written = value if isinstance(value, list) and len(value) == len(resolved) else resolved
            item = kind.item
            if item is None or item.has_types(resolved):
                return resolved
            return [
                self._convert(item, written_item, resolved_item, (*path, str(index)))
                for index, (written_item, resolved_item) in enumerate(zip(written, resolved, strict=True))
            ]
        if type(resolved) is int and "int" not in kind.names:
            if "float" in kind.names:
                return float(resolved)
            if "str" in kind.names:
                self._check_written(path, resolved)
                return str(resolved)
        if isinstance(resolved, str) and resolved is not value and "str" not in kind.names:
            for name, convert in (("int", int), ("float", float), ("bool", lambda text: _BOOLS[text.lower()])):
                if name in kind.names:
                    with suppress(ValueError, KeyError):
                        return convert(resolved)
            if not kind.admits(resolved):
                self._report(path, f"{'.'.join(path)}: {value} resolves to {resolved!r}, but it must be {kind}")
        return resolved

    def _check_written(self, path: KeyPath, number: int) -> None:
        """Refuse a number for a string key if it was not written in its plain form, such as `1_0`."""
        text, key, source = self._tree.written(path, number), ".".join(path), self._tree.source(path)
        if text == str(number):
            return
        if source == COMMAND_LINE:
            assign = "" if path[-1].isdecimal() else f"{key}="
            message = f"{key}: {text} is read as the number {number}"
            hint = f"Write {assign}{number}, or {assign}{as_text(text)} for the string."
        else:
            message = f"{key}: {text} is read by YAML as the number {number}"
            hint = f"Write {number}, or '{text}' in quotes."
        self._report(path[:-1] if path[-1].isdecimal() else path, message, hint, source=source)

    def _check_shape(self, key: str, node: Node) -> None:
        """Refuse values that cannot be a component or a mapping of components."""
        value = node.plain()
        if isinstance(value, str) and "${" in value:
            return
        if key == "ckpt":
            texts = as_list(value)
            if value is not None and not all(isinstance(text, str) for text in texts):
                self._refuse((key,), value, "a path, a glob or a list of them")
            return
        if not value and key in ("model", "data") and not self._missing_ok:
            message = f"{key} is {'null' if value is None else 'empty'}, but nothing runs without"
            hint = f"Choose one with {key}=NAME; `train list {key}` shows them."
            self._report((key,), message, hint, source=self._tree.exact((key,)).source, code=Code.not_given)
        if key not in _BY_NAME and value is not None and not isinstance(value, Mapping):
            expected = NODE
            hint = f"Choose one with {key}=NAME, in a file by '- override /{key}: NAME' in its defaults list."
            if key == "vars":
                expected, hint = "a mapping", "To add a value, write '+vars.NAME=VALUE'."
            self._refuse((key,), value, expected, hint)
        # A mapping that is an argument may have whole numbers as keys.
        odd_keys = (
            (path, name)
            for path, below in node.walk((key,))
            if below.is_mapping
            for name in below.value
            if isinstance(name, bool) or not isinstance(name, str | int)
        )
        for path, name in odd_keys:
            odd = "null" if name is None else str(name).lower()
            message = f"{'.'.join(path)} has the key {odd}, but keys are strings"
            typed = self._tree.source(path) == COMMAND_LINE
            cure = f"Say it in a YAML file: '{odd}'." if typed else f"Put it in quotes: '{odd}'."
            self._report(path, message, cure, code=Code.wrong_type)
        if key in (*_BY_NAME, "scheduler") and isinstance(value, Mapping) and "_target_" not in value:
            for name, child in value.items():
                fits = isinstance(child, Mapping) or (child is None and key != "param_groups")
                if not fits and not (isinstance(child, str) and "${" in child):
                    self._refuse((key, str(name)), child, "a mapping of settings" if key == "param_groups" else NODE)

    def _check_number(self, path: KeyPath, value: Any) -> None:
        """Report a number that is not finite or exceeds 64 bits."""
        key = ".".join(path)
        if isinstance(value, float) and not math.isfinite(value):
            self._report(path, f"{key} is {value}, but it must be finite")
        elif isinstance(value, int) and value not in _INT64:
            number = str(value) if abs(value) < 10**24 else "a number of too many digits"
            self._report(path, f"{key} is {number}, but it must fit into 64 bits")

    def _require(self, path: KeyPath) -> None:
        """Report a key whose value must be given, unless values may be missing."""
        if not self._missing_ok:
            key = ".".join(path)
            self._report(path, f"{key} must be given", f"Add {key}=VALUE to the command line.", code=Code.not_given)

    def _refuse(self, path: KeyPath, value: Any, kind: str, hint: str = "") -> None:
        """Report a value that is not of the described `kind`."""
        error = unfit_value(".".join(path), value, kind)
        self._report(path, error.message, hint, code=error.code)

    def _add(self, path: KeyPath, error: ConfigError, value: Any = None) -> None:
        """Report an error that a check of a value raised, with a hint that can be typed where the value was written."""
        hint, key, source = error.hint or "", ".".join(path), self._tree.source(path)
        # In a list or mapping the hint is about one of several values.
        is_typed = source == COMMAND_LINE and not isinstance(value, list | Mapping)
        if error.code is Code.wrong_type:
            if not hint.startswith("Did you mean"):
                hint = hint_on_setting(key, to_yaml_line(value), source=source, below=False) or hint
            if path == ("resume",):
                self._refuse(path, value, f"{', '.join(RESUME_WORDS)} or a path", hint)
            if hint == IN_QUOTES and is_typed:
                hint = f"Write {key}={as_text(self._tree.written(path, value))} if a string is meant."
        elif is_typed and re.fullmatch(r"Did you mean '[^'=]*'\?", hint):
            hint = hint.replace("'", f"'{key}=", 1)
        self._report(path, error.message, hint, code=error.code)

    def _report(
        self, path: KeyPath, message: str, hint: str = "", *, source: str = "", code: Code = Code.wrong_value
    ) -> None:
        """Report a mistake, once for each key."""
        if path not in self._wrong:
            # The first mistake of a key is the cause; others would only follow from it.
            self._wrong.add(path)
            source = source or self._tree.source(path)
            self.mistakes.append(
                ConfigError(message, location=".".join(path), source=source, code=code, hint=hint or None)
            )


COMPONENTS = ("model", "data", "optimizer", "scheduler", "step", "sparsity")
"""Sections that `~GROUP` and `GROUP=null` switch off, even if files set values in them."""
_NO_FOLDERS = ("conf", "config")
"""Names of the folder of configs in other programs."""


def switches_off(choice: Override) -> bool:
    """Whether a choice of a group switches a component off."""
    chooses_none = choice.is_delete() or choice.value() is None
    return chooses_none and choice.package is None and choice.key_or_group in COMPONENTS


def find_mistakes(arguments: Sequence[str], search: SearchPath) -> list[ConfigError]:
    """The mistakes that overrides show without a config."""
    line = parse_overrides(arguments)
    return [*line.mistakes, *(mistake for _, mistake in find_wrong_overrides(search, line))]


def find_wrong_overrides(search: SearchPath, line: CommandLine) -> Iterator[tuple[str, ConfigError]]:
    """Each wrong override as written, with its mistake."""
    switches = {
        override.key_or_group: line_of(override)
        for override in line.overrides
        if search.is_choice(override) and switches_off(override)
    }
    for override in line.overrides:
        for mistake in _mistakes(search, override):
            yield line_of(override), mistake
        if search.is_choice(override) and (switch := switches.get((override.package or "").partition(".")[0])):
            message = f"{line_of(override)} has no effect: {switch} switches off what it is merged into"
            section, _, name = (override.package or "").partition(".")
            yield (
                line_of(override),
                override_error(message, f"Write its node out: '{section}={{{name}: {{_target_: …}}}}'."),
            )
    for append in line.appends:
        group = "/".join(append.path)
        if search.is_group(group):
            message = f"{append.line}: {group} is a group, and no list"
            yield append.line, override_error(message, f"Choose one with {group}=NAME.")
        elif unknown := unknown_key(append.path):
            yield append.line, _unknown_key_error(search, append.path, append.line, *unknown)
        else:
            for mistake in _misleading(append.path, append.quoted, is_open=append.path[0] in OPEN):
                yield append.line, mistake


def _mistakes(search: SearchPath, override: Override) -> Iterator[ConfigError]:
    """The mistake in an override: what it names does not exist or cannot be set so."""
    key, path, line = override.key_or_group, path_of(override), line_of(override)
    if key == "experiment" and not search.is_group(key):
        yield override_error(
            f"there are no experiments: no folder experiment/ in {search.listed()}", code=Code.unknown_option
        )
    elif path[:1] == ("hydra",) or key.startswith("hydra/"):
        hint = hint_on_setting(key, line.partition("=")[2], below=False) or "Hydra only composes the config here."
        yield override_error(f"{line} has no effect", hint, Code.no_effect)
    elif search.is_choice(override):
        yield from find_wrong_choice(search, override)
    elif "." not in key and (missing := explain_missing(line, "configs", f"{key}/{override.value()}")) is not None:
        # All options of the group are an add-on's.
        yield override_error(missing.what, missing.cure, Code.unknown_option)
    elif key == "experiment" or ("/" in key and search.is_group(key)):
        message = f"{key} is a group, and takes the name of an option"
        yield override_error(message, f"Choose one of: {', '.join(search.options(key)) or 'none'}.", Code.wrong_type)
    elif not path:
        yield override_error(f"{line!r} is not an override", HOW_TO_OVERRIDE)
    elif override.package is not None or "/" in key:
        known_groups = search.groups()
        hint = f"Available: {', '.join(known_groups)}.{did_you_mean(key, known_groups)}"
        parts = tuple(key.split("/"))
        if override.package is None and (parts[:1] in sections() or parts[0] in OPEN) and unknown_key(parts) is None:
            hint = f"Parts of a key are joined by dots: '{line.replace(key, '.'.join(parts), 1)}'."
        yield override_error(f"there is no group '{key}'", hint, Code.unknown_option)
    elif unknown := unknown_key(path):
        yield _unknown_key_error(search, path, line, *unknown)
    elif path[0] in OPEN and line == f"{key}=":
        hint = f"Write {key}=VALUE, {key}=null for none, or {key}={as_text('')} for the empty string."
        yield override_error(f"{line} has no value", hint)
    elif not override.is_delete():
        yield from _misleading(path, value_in_quotes(override), is_open=path[0] in OPEN)


def _unknown_key_error(
    search: SearchPath, path: KeyPath, line: str, unknown: KeyPath, known_keys: list[str]
) -> ConfigError:
    """The error for an override of a key that does not exist; at the top level it may name a group instead."""
    groups = search.groups() if len(unknown) == 1 else []
    choices = [*known_keys, *(group for group in groups if group not in known_keys)]
    _, equals, value = line.partition("=")
    text = strip_quotes(value) if equals else None
    error = unknown_key_error(unknown, choices, COMMAND_LINE, text, path[len(unknown) :])
    group = find_nearest(unknown[-1], groups)
    if error.hint == f"Did you mean '{group}'?" and (choice := parse_override(f"{group}={value}")) is not None:
        # Of a misspelt key the option may be misspelt, too.
        cures = [str(mistake.cure) for mistake in find_wrong_choice(search, choice)]
        cure = [*cures, f"Did you mean '{group}={value}'?"][0]
        error.cure = cure if cure.startswith("Did") else f"{error.cure} {cure}"
    return error


def _misleading(path: KeyPath, value: Any, *, is_open: bool) -> Iterator[ConfigError]:
    """Refuse strings without quotes that look like null or, in an open section, like a number, true or false."""
    key = ".".join(path)
    if value == PYTHONS_NULL and not isinstance(value, QuotedString):
        yield _string_error(key, PYTHONS_NULL, "not null", "null")
    elif isinstance(value, dict):
        if None in value:
            yield override_error(f"{key} has the key null, but keys are strings", code=Code.wrong_type)
        for name, child in value.items():
            yield from _misleading((*path, str(name)), child, is_open=is_open)
    elif isinstance(value, list):
        for item in value:
            yield from _misleading(path, item, is_open=is_open)
    text, in_quotes = (value.text, True) if isinstance(value, QuotedString) else (value, False)
    if not isinstance(text, str):
        return
    if why := why_no_interpolation(text):
        yield override_error(f"{key}: {text!r} is not an interpolation: {why}", "Write ${key}.")
    elif is_open and not in_quotes:
        if plain := TRUTH_WORDS.get(text.lower()):
            yield _string_error(key, text, f"not {plain}", plain)
        elif (number := looks_like_number(text)) is not None:
            yield _string_error(key, text, "no number", instead_of(text, number))


def _string_error(key: str, text: str, difference: str, plain: str) -> ConfigError:
    """The error for a value that is a string, although it looks like null, a number or a truth value."""
    hint = f"Write {plain}, or {as_text(text)} for the string."
    return override_error(f"{key}: {text} is a string here, and {difference}", hint, Code.wrong_type)


def find_wrong_choice(search: SearchPath, override: Override) -> Iterator[ConfigError]:
    """The mistakes in the choice of a group's options."""
    key, line, value = override.key_or_group, line_of(override), override.value()
    if override.is_delete():
        return
    if override.is_force_add():
        plain = line.lstrip("+")
        hint = f"Write '{plain}', or '+{plain}' where none is chosen yet."
        yield override_error(f"{line}: {key} is a group, whose option is chosen", hint)
        return
    if key == "experiment" and override.package is not None:
        hint = f"Write 'experiment={line.partition('=')[2]}'."
        yield override_error(f"{line}: an experiment is merged into the root, and takes no package", hint)
        return
    known_options = list(search.options(key))
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        hint = f"For several write a mapping of names: '{key}={{first: {{_target_: …}}}}'."
        yield override_error(f"{key} is a list, but it must be a mapping of keys to values", hint, Code.wrong_type)
        return
    if key == "experiment" and value in (None, []):
        hint = f"Leave it out, or choose one: {', '.join(known_options)}."
        yield override_error(f"{line.lstrip('+')} chooses no experiment", hint)
    closed = (key,) in sections()
    for option in as_list(value):
        if option is None and closed:
            yield override_error(f"{key} is a section, and never null", code=Code.wrong_type)
        elif option == PYTHONS_NULL and option not in known_options:
            hint = "Leave it out." if closed or key == "experiment" else f"For none write {key}=null."
            yield override_error(f"there is no {key} called {option!r}", hint, Code.unknown_option)
        elif option is not None and str(option).removesuffix(".yaml") not in known_options:
            yield _unread_option_error(search, key, str(option)) or unknown_option_error(
                key,
                str(option),
                known_options,
                COMMAND_LINE,
                line_of(correct_choice(override, known_options) or override),
            )


def _unread_option_error(search: SearchPath, group: str, option: str) -> ConfigError | None:
    """The error for an option whose file exists, but is called `.yml` or is in a folder of another name."""
    file = next((file for folder in search.dirs if (file := folder / group / f"{option}.yml").is_file()), None)
    if file is not None:
        return override_error(f"{search.label(file)} is not read", f"Rename it to {option}.yaml.", Code.unknown_option)
    for name in _NO_FOLDERS:
        if (search.cwd / name / group / f"{option}.yaml").is_file():
            hint = f"Rename {name} to configs, or add -cd {name}."
            return override_error(f"{name}/{group}/{option}.yaml is not read", hint, Code.unknown_option)
    return None
