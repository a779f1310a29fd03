"""The containers of a tree of values, such as a batch or a state: what is in them, and how one is made again.

Every walk through such a tree asks here, so that all know the same containers. mypy refuses a function below that
leaves a kind of `Container` out.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, assert_never


class Container(Enum):
    """The kinds of containers."""

    mapping = "mapping"
    named_tuple = "named tuple"
    sequence = "sequence"
    """A list or a tuple."""
    dataclass = "dataclass"


def container_of(value: Any) -> Container | None:
    """The kind of a container; None for a leaf."""
    if isinstance(value, Mapping):
        return Container.mapping
    if isinstance(value, list | tuple):
        return Container.named_tuple if hasattr(value, "_fields") else Container.sequence
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return Container.dataclass if is_instance else None


def values_of(value: Any) -> Iterable[Any]:
    """The values in a container, in order; none for a leaf."""
    match container_of(value):
        case Container.mapping:
            return value.values()  # type: ignore[no-any-return]
        case Container.sequence | Container.named_tuple:
            return value  # type: ignore[no-any-return]
        case None:
            return ()
        case Container.dataclass:
            return [getattr(value, field.name) for field in dataclasses.fields(value)]
        case other:
            assert_never(other)


def rebuild(value: Any, values: Iterable[Any]) -> Any:
    """A container of the same type with other values, in the order of `values_of`; a leaf itself."""
    match container_of(value):
        case None:
            return value
        case Container.mapping:
            return _rebuild_mapping(value, dict(zip(value, values, strict=True)))
        case Container.named_tuple:
            return type(value)(*values)
        case Container.sequence:
            return type(value)(values)
        case Container.dataclass:
            other = copy.copy(value)
            for field, entry in zip(dataclasses.fields(value), values, strict=True):
                # setattr would fail for a frozen dataclass.
                object.__setattr__(other, field.name, entry)
            return other
        case other_kind:
            assert_never(other_kind)


def _rebuild_mapping(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping with other values, and with the type and the attributes of `value`."""
    if type(value) is dict:
        return entries
    if not hasattr(value, "__setitem__"):
        return type(value)(entries)  # type: ignore[call-arg]
    other: Any = copy.copy(value)
    for key, entry in entries.items():
        other[key] = entry
    return other
