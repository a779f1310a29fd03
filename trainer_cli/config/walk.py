"""A walk over the values of a config, whatever made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_cli.config.overrides import KeyPath


def whole_values(values: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of a tree that is no mapping, with its path; a list is one, while `kinds.leaves` goes into it."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from (((str(key), *path), leaf) for path, leaf in whole_values(value))
        else:
            yield (str(key),), value
