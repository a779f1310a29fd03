"""What a field of a config section is declared with, and how its value is checked.

A rule for one value is declared with its field by `at_least`, `duration` or `checked`. `needs` declares that a field
has an effect only with another. `check_fields` applies them all. They raise `ConfigError` with the key path.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from trainer_cli.errors import Code, ConfigError
from trainer_cli.steps import Duration, Unit
from trainer_cli.values.kinds import convert, to_yaml_line


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
    """A field that has an effect only if one of the conditions holds; otherwise it may only have its default.

    A condition is a key of the field's section and the value that it must have; True stands for any value but null,
    false and 0.
    """
    # dataclasses makes metadata read-only, so it is replaced as a whole.
    declared.metadata = MappingProxyType({**declared.metadata, "needs": conditions})
    return declared


def check_fields(section: Any, path: str = "") -> None:
    """Convert the values of a section to the types of its fields, and check them by the rules of its fields."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    for name, value in check_values(type(section), values, path).items():
        setattr(section, name, value)
    # This comes after the conversion: a condition is compared with the member of a choice, not with its name.
    for field in dataclasses.fields(section):
        _check_effect(section, field, path)


def check_values(section: type, values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The values of some fields of a section, converted to the types of the fields and checked by their rules.

    Raises:
        ConfigError: a value is of another type, or not allowed.
    """
    checked = {}
    for field in dataclasses.fields(section):
        if field.name not in values:
            continue
        key, rules = f"{path}.{field.name}".lstrip("."), field.metadata
        value = checked[field.name] = convert(field.type, values[field.name], key)
        if "at_least" in rules:
            check_at_least(key, value, rules["at_least"])
        if "units" in rules and value not in rules["words"]:
            duration = check_duration(key, value, units=rules["units"], words=rules["words"])
            if duration is None and not rules["null"]:
                raise ConfigError(f"{key} is null, but it must be a duration", location=key)
        if "check" in rules:
            rules["check"](key, value)
    return checked


def _check_effect(section: Any, field: dataclasses.Field[Any], path: str) -> None:
    """Refuse a value that has no effect, by the conditions of `needs`."""
    conditions = field.metadata.get("needs", ())
    value = getattr(section, field.name)
    # A new default each time: lists and sections are made by their factory.
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if not conditions or value == default:
        return
    settings = {name: getattr(section, name) for name, _ in conditions}
    for key, needed in conditions:
        holds = bool(settings[key]) if needed is True else settings[key] == needed
        if holds:
            return
    name = conditions[0][0]
    cures = []
    for key, needed in conditions:
        is_any = needed is True and not isinstance(settings[key], bool)
        cures.append(f"{path}.{key}" if is_any else f"{path}.{key}={str(needed).lower()}")
    raise ConfigError(
        f"{path}.{field.name} is {_format_value(value)}, but {path}.{name} is {_format_value(settings[name])}",
        location=f"{path}.{field.name}",
        code=Code.no_effect,
        hint=f"Set {' or '.join(cures)}, or leave {field.name} out.",
    )


def _format_value(value: Any) -> str:
    """A value as messages show it: a choice by its name, other values in YAML's one-line style."""
    return str(value) if isinstance(value, StrEnum) else to_yaml_line(value)


def check_duration(
    key: str, value: Any, *, units: tuple[Unit, ...] = tuple(Unit), words: tuple[str, ...] = ()
) -> Duration | None:
    """The duration that a key holds, or None if it is null; raises as `Duration.read`."""
    return None if value is None else Duration.read(key, value, units=units, words=words)


def check_whole(key: str, value: object, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    # A bool is an int.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} is {value!r}, but it must be a whole number of at least {least}", location=key)


def check_choice(key: str, value: object, choices: Iterable[str]) -> None:
    """Refuse what is none of the choices."""
    names = list(map(str, choices))
    if value not in names:
        raise ConfigError(f"{key} is {value!r}, but it must be one of {', '.join(names)}", location=key)


def check_at_least(key: str, value: float | None, least: float) -> None:
    """Refuse a number below `least`, NaN or infinity; null passes."""
    # NaN is not below any number, so it is tested by itself.
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key} is {value}, but it must be a finite number of at least {least:g}", location=key)
