"""What a field of a config section is declared with, and how its value is checked.

A rule for one value is declared with its field by `at_least`, `duration` or `checked`. `needs` declares that a field
has an effect only with another. `check_fields` applies them all. They raise `ConfigError` with the key path.
`build_section` is how constructors take a section, whole or by its fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeVar, cast

from trainer_cli.errors import Code, ConfigError
from trainer_cli.patterns import why_no_pattern
from trainer_cli.signatures.argument_names import unknown_argument
from trainer_cli.signatures.types import ConstructorSignature, converted, in_yaml, shown
from trainer_cli.steps.intervals import Duration, Unit, suggest_duration
from trainer_cli.terminal import format_count

S = TypeVar("S")
C = TypeVar("C", bound=type)
_LONGEST_NAME = 255
"""Bytes of a file name on the usual file systems."""


def at_least(least: float, default: Any = None) -> Any:
    """A field whose number is finite and not below `least`; null passes."""
    return dataclasses.field(default=default, metadata={"at_least": least})


def duration(
    default: Any = None, *, units: tuple[Unit, ...] = tuple(Unit), null: bool = True, words: tuple[str, ...] = ()
) -> Any:
    """A field that holds a duration in one of `units`, one of `words`, or null if that is allowed."""
    return dataclasses.field(default=default, metadata={"units": units, "null": null, "words": words})


def checked(check: Callable[[str, Any], None], default: Any = None) -> Any:
    """A field whose value is checked by `check(key, value)`, which raises ConfigError."""
    if isinstance(default, list | dict):
        # Each section gets a copy: it may change its list or mapping.
        return dataclasses.field(default_factory=default.copy, metadata={"check": check})
    return dataclasses.field(default=default, metadata={"check": check})


def needs(declared: Any, *conditions: tuple[str, Any]) -> Any:
    """A field that has an effect only if one of the conditions holds: a key of its section has this value; for true,
    any value but null, false and 0. Where none holds, the field may only have its default."""
    # dataclasses makes metadata read-only, so it is replaced as a whole.
    declared.metadata = MappingProxyType({**declared.metadata, "needs": conditions})
    return declared


def build_section(section: type[S], owner: str, config: S | None, fields: Mapping[str, Any]) -> S:
    """The section that a constructor was given whole, as `config`, or by the names of its fields.

    Choices may be strings, sections mappings, and None stands for the default of a section, mapping or list.

    Args:
        owner: the class whose constructor it is.

    Raises:
        ConfigError: both were given; or a name is of no field; or a value is of another type, or not allowed.
    """
    if config is None:
        declared = {field.name: field for field in dataclasses.fields(cast("Any", section))}
        for name in fields:
            if name not in declared:
                raise unknown_argument(owner, name, declared)
        return section(
            **{
                name: value
                for name, value in fields.items()
                if value is not None or declared[name].default_factory is dataclasses.MISSING
            }
        )
    if not isinstance(config, section):
        message = f"{owner}: config is {shown(config)}, but it must be a {section.__name__}"
        raise ConfigError(message, location="config", code=Code.wrong_type)
    if fields:
        raise ConfigError(
            f"{owner} is given config and also {', '.join(fields)}",
            location=next(iter(fields)),
            code=Code.argument,
            hint=f"Give config alone, as {section.__name__}(...) with these fields.",
        )
    return config


def takes_fields_of(section: type) -> Callable[[C], C]:
    """A decorator for a class whose constructor passes its `**fields` to `build_section`: the signature, which help()
    and the site show and the arguments of a config's node are checked against, has the fields in their place."""

    def declare(owner: C) -> C:
        constructor: Any = owner.__init__  # type: ignore[misc]
        signature = inspect.signature(constructor)
        parameters = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        for field in dataclasses.fields(section):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            parameter = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type
            )
            parameters.setdefault(field.name, parameter)
        constructor.__signature__ = signature.replace(parameters=list(parameters.values()))
        # Of the class too: sphinx compares the signature of a function with its source, and fails where they differ.
        owner.__signature__ = ConstructorSignature()  # type: ignore[attr-defined]
        return owner

    return declare


def check_fields(section: Any, path: str = "") -> None:
    """Convert the values of a section to the types of its fields, and check them by the rules of these."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    for name, value in checked_values(type(section), values, path).items():
        setattr(section, name, value)
    # After the conversion: a condition is compared with the member of a choice, not with its name.
    for field in dataclasses.fields(section):
        _check_effect(section, field, path)


def checked_values(section: type, values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Values for fields of a section, converted to the types of these and checked by their rules.

    Raises:
        ConfigError: a value is of another type, or not allowed.
    """
    checked = {}
    for field in dataclasses.fields(section):
        if field.name in values:
            key = f"{path}.{field.name}".lstrip(".")
            checked[field.name] = converted(field.type, values[field.name], key)
            check_rules(field.metadata, key, checked[field.name])
    return checked


def check_rules(rules: Mapping[str, Any], key: str, value: Any) -> None:
    """Raise the ConfigError of the rule that a field was declared with: `rules` is its metadata."""
    if "at_least" in rules:
        check_at_least(key, value, rules["at_least"])
    if "units" in rules and value not in rules["words"]:
        duration = check_duration(key, value, units=rules["units"], words=rules["words"])
        if duration is None and not rules["null"]:
            raise ConfigError(f"{key} is null, but it must be a duration", location=key)
    if "check" in rules:
        rules["check"](key, value)


def _check_effect(section: Any, field: dataclasses.Field[Any], path: str) -> None:
    """Refuse a value that has no effect, by the conditions of `needs`."""
    conditions = field.metadata.get("needs", ())
    value = getattr(section, field.name)
    # A new default each time: lists and sections are made by their factory.
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if not conditions or value == default:
        return
    settings = {name: getattr(section, name) for name, _ in conditions}
    if any(bool(settings[name]) if needed is True else settings[name] == needed for name, needed in conditions):
        return
    name = conditions[0][0]
    cures = []
    for key, needed in conditions:
        is_any = needed is True and not isinstance(settings[key], bool)
        cures.append(f"{path}.{key}" if is_any else f"{path}.{key}={str(needed).lower()}")
    raise ConfigError(
        f"{path}.{field.name} is {_shown(value)}, but {path}.{name} is {_shown(settings[name])}",
        location=f"{path}.{field.name}",
        code=Code.no_effect,
        hint=f"Set {' or '.join(cures)}, or leave {field.name} out.",
    )


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, StrEnum) else in_yaml(value)


def check_duration(
    key: str, value: Any, *, units: tuple[Unit, ...] = tuple(Unit), words: tuple[str, ...] = ()
) -> Duration | None:
    """The duration that a key holds, or None if it is null.

    Raises:
        ConfigError: it is not a duration, or not in one of `units`.
    """
    if value is None:
        return None
    duration = parse_duration(key, value, words)
    if duration.unit not in units:
        names = ", ".join(unit.name.lower() + "s" for unit in units)
        hint = f"Write {key}={value}s." if isinstance(value, int) and units == (Unit.SECOND,) else None
        raise ConfigError(f"{key} is {value!r}, but it must be counted in {names}", location=key, hint=hint)
    return duration


def parse_duration(key: str, value: Any, words: tuple[str, ...] = ()) -> Duration:
    """The duration that a key holds, which may not be null.

    Raises:
        ConfigError: it is not a duration.
    """
    try:
        return Duration.parse(value)
    except ValueError as error:
        near = suggest_duration(value)
        hint = None if near is None else f"Did you mean '{near}'?"
        raise ConfigError(f"{key}: {', or '.join((str(error), *words))}", location=key, hint=hint) from None


def check_at_least(key: str, value: float | None, least: float) -> None:
    """Refuse a number below `least`, NaN or infinity; null passes."""
    # NaN is not below any number, so it is tested by itself.
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key} is {value}, but it must be a finite number of at least {least:g}", location=key)


def check_folder(key: str, value: str | None, *, instead: str, urls: bool = False) -> None:
    """Refuse an empty folder (it would be the current one), one that only a shell expands, and a URL unless `urls`;
    null passes."""
    if value is None:
        return
    if not value.strip():
        raise ConfigError(f"{key} is empty", location=key, hint=instead)
    if value.startswith("~"):
        hint = "Write the whole path, or ${oc.env:HOME}."
        raise ConfigError(f"{key} is {value!r}, but only a shell expands ~", location=key, hint=hint)
    if "://" in value and not urls:
        raise ConfigError(f"{key} is {value!r}, but it must be a local folder", location=key)
    check_length(key, value)


def check_length(key: str, folder: str) -> None:
    """Refuse a path with a name that no file system takes: the folders above it would be made first. A URL passes."""
    longest = max(len(name.encode(errors="surrogateescape")) for name in folder.split("/"))
    if longest > _LONGEST_NAME and "://" not in folder:
        fault = (
            f"{key} contains a name of {format_count(longest, 'byte')}, but a file system takes at most {_LONGEST_NAME}"
        )
        raise ConfigError(fault, location=key, hint="Choose a shorter name.")


def check_patterns(key: str, patterns: list[str]) -> None:
    """Refuse a regular expression that does not compile."""
    for pattern in patterns:
        if (fault := why_no_pattern(pattern)) is not None:
            raise ConfigError(f"{key}: {fault}", location=key)
