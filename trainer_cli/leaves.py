"""Walks through trees of values, such as batches and states: their leaves by name, and with other leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, assert_never

from trainer_cli.containers import Container, container_of, rebuild, values_of


def named_values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The values in a container, in order, each with its name: that of the container with `.key`, `.field` or `[0]`."""
    names: Iterator[str]
    match container_of(value):
        case None:
            return iter(())
        case Container.mapping:
            names = (f".{key}" for key in value)
        case Container.named_tuple:
            names = (f".{field}" for field in value._fields)
        case Container.sequence:
            names = (f"[{index}]" for index in range(len(value)))
        case Container.dataclass:
            names = (f".{field.name}" for field in dataclasses.fields(value))
        case other:
            assert_never(other)
    return ((f"{name}{end}", entry) for end, entry in zip(names, values_of(value), strict=True))


def walk(value: Any, name: str = "", is_leaf: Callable[[Any], bool] = lambda value: False) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their names, in order.

    Args:
        is_leaf: which containers are not entered.
    """
    if container_of(value) is None or is_leaf(value):
        yield name.lstrip("."), value
    else:
        for inner, entry in named_values(value, name):
            yield from walk(entry, inner, is_leaf)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The tree with what a function makes of each leaf; containers keep their types."""
    if container_of(value) is None:
        return function(value)
    return rebuild(value, [map_leaves(function, entry) for entry in values_of(value)])
