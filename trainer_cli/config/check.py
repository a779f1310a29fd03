"""A composed config against the schema: every mistake at once, each with its key, its place and a cure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import (
    BooleanNode,
    DictConfig,
    EnumNode,
    FloatNode,
    IntegerNode,
    ListConfig,
    OmegaConf,
    StringNode,
)
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config.origins import DEFAULT, Origins
from trainer_cli.config.overrides import KeyPath, raise_all
from trainer_cli.config.schema import TrainConfig
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError

MISSING = "???"


def typed() -> DictConfig:
    """The schema, with its types and defaults."""
    schema = OmegaConf.structured(TrainConfig)
    assert isinstance(schema, DictConfig)
    return schema


def plain() -> dict[str, Any]:
    """The schema's defaults as plain values."""
    values = OmegaConf.to_container(typed(), enum_to_str=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def completed(config: DictConfig | dict[str, Any]) -> DictConfig:
    """A config over the schema's defaults."""
    merged = OmegaConf.merge(plain(), config)
    assert isinstance(merged, DictConfig)
    return merged


def contents(config: DictConfig) -> dict[str, Any]:
    """A config as plain values, unresolved."""
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def is_closed(node: Any) -> bool:
    """Whether a node of the schema is a section whose keys are fixed."""
    return isinstance(node, DictConfig) and OmegaConf.get_type(node) is not dict


def unknown_key(path: KeyPath, schema: DictConfig) -> tuple[KeyPath, list[str]] | None:
    """The part of `path` that no closed section knows, and what it knows instead; None where all is well."""
    node: Any = schema
    for depth, key in enumerate(path):
        if not is_closed(node):
            return None
        if key not in node:
            return path[: depth + 1], [str(name) for name in node]
        node = node[key]
    return None


def no_such_key(path: KeyPath, known: list[str], where: str) -> ConfigError:
    """The error for a key that does not exist, with the nearest that does."""
    above = ".".join(path[:-1])
    names = [f"{above}.{name}" if above else name for name in known]
    cure = did_you_mean(".".join(path), names).strip() or f"Known here: {', '.join(known)}."
    return ConfigError(f"there is no key '{'.'.join(path)}'", where=where, cure=cure)


def to_config(raw: DictConfig, origins: Origins, *, missing_ok: bool = False) -> TrainConfig:
    """The validated config, interpolations resolved.

    Raises:
        ConfigError: naming all unknown keys and wrong types; else all illegal values and missing ones.
    """
    values = contents(raw)
    schema = typed()
    mistakes: list[ConfigError] = []
    _fill(schema, values, (), origins, mistakes)
    raise_all(mistakes)
    missing = [] if missing_ok else [path for path, value in _leaves(values, ()) if value == MISSING]
    mistakes += [
        ConfigError(
            f"{'.'.join(path)} must be given",
            where=origins.of(path),
            cure=f"Add {'.'.join(path)}=VALUE to the command line.",
        )
        for path in missing
    ]
    mistakes += [
        ConfigError(f"{'.'.join(path)} is {number}, but it must be finite", where=origins.of(path))
        for path, number in _leaves(values, ())
        if isinstance(number, float) and not math.isfinite(number) and not is_closed(schema._get_node(path[0]))
    ]
    settled: dict[str, Any] = {}
    for key in map(str, schema):
        if not any(path[0] == key for path in missing):
            with _told(key, origins, mistakes):
                settled[key] = _settled(schema, key)
    config = TrainConfig()
    with _told("", origins, mistakes):
        config = TrainConfig(**settled)
    raise_all(mistakes)
    return config


def _fill(
    schema: DictConfig,
    values: Mapping[Any, Any],
    path: KeyPath,
    origins: Origins,
    mistakes: list[ConfigError],
) -> None:
    """Put plain values into the schema, collecting what does not fit."""
    for name, value in values.items():
        key = str(name)
        here = (*path, key)
        if key not in schema:
            mistakes.append(no_such_key(here, [str(known) for known in schema], origins.of(here)))
        elif is_closed(schema._get_node(key)):
            if isinstance(value, Mapping):
                _fill(schema[key], value, here, origins, mistakes)
            else:
                mistakes.append(_wrong(here, value, "a section, and is never null or a single value", origins))
        else:
            kind = _kind(schema._get_node(key))
            try:
                schema[key] = value
            except OmegaConfBaseException:
                mistakes.append(_wrong(here, value, kind, origins))


def _wrong(path: KeyPath, value: Any, kind: str, origins: Origins) -> ConfigError:
    shown = "null" if value is None else repr(value)
    key = ".".join(path)
    hint = ""
    if kind.startswith("one of ") and isinstance(value, str):
        hint = did_you_mean(value, kind.removeprefix("one of ").split(", ")).strip()
    return ConfigError(f"{key} is {shown}, but it must be {kind}", where=origins.of(path), cure=hint or None)


def _kind(node: Any) -> str:
    words = "a value of another type"
    if isinstance(node, BooleanNode):
        words = "true or false"
    elif isinstance(node, IntegerNode):
        words = "a whole number"
    elif isinstance(node, FloatNode):
        words = "a number"
    elif isinstance(node, EnumNode):
        return "one of " + ", ".join(member.name for member in node.enum_type)
    elif isinstance(node, StringNode):
        words = "a text"
    elif isinstance(node, ListConfig):
        element = node._metadata.element_type
        words = "a list of " + {str: "texts", int: "whole numbers"}.get(element, "values")
    elif isinstance(node, DictConfig):
        words = "a mapping"
    return f"{words} or null" if node is not None and node._is_optional() else words


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, str(index)))
    else:
        yield path, value


def _settled(schema: DictConfig, key: str) -> Any:
    """The value of a key with interpolations resolved: a dataclass, plain containers, or a single value."""
    node = schema._get_node(key)
    if is_closed(node):
        return OmegaConf.to_object(schema[key])
    value = schema[key]
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True, enum_to_str=True)
    return value


@contextmanager
def _told(section: str, origins: Origins, mistakes: list[ConfigError]) -> Iterator[None]:
    """Put the complaints of a section's own checks, and of interpolation, into place."""
    try:
        yield
    except ConfigError as error:
        where = place(error.where or section, error.what, origins)
        mistakes.append(ConfigError(error.what, where=where, cure=error.cure))
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or section)
        what = f"{key}: {str(error.msg or error).splitlines()[0]}"
        mistakes.append(ConfigError(what, where=place(key, what, origins)))


def place(key: str, what: str, origins: Origins) -> str:
    """Where a key's value was said; with the key itself where the message does not name it."""
    said = origins.of(tuple(key.split(".")))
    said = "its default" if said == DEFAULT else said
    return said if key in what else f"{key}, {said}"
