"""Bounds of what a file of a run may hold: another program may have written anything, and no reader may fail by it.

Nesting is bounded because parsers and readers recurse, in C without a limit; counts and times, because 64-bit integers,
floats and dates are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import yaml

DEEPEST = 40
"""Levels of mappings and lists within each other."""
LARGEST_COUNT = 100_000
"""Most values in one file of YAML, counting each use of an alias: a few lines of nested aliases make billions."""
_MAX_FLAT_LINE = 400
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Beyond it a float, as which JSON in a browser holds every number, skips integers.
_MAX_NUMBER = 2**53
_MAX_TIME = 253_402_300_800
"""Unix seconds of the year 10000, which Python's datetime does not have."""


def is_count(value: object) -> bool:
    """Whether a value is a count that a run may have, such as a step."""
    # isinstance would take True, which is an int.
    return type(value) is int and 0 <= value < _MAX_NUMBER


def is_amount(value: object) -> bool:
    """Whether a value is a finite number that is not negative, such as seconds or epochs."""
    return type(value) in (int, float) and 0 <= value < _MAX_NUMBER  # type: ignore[operator]


def is_time(value: object) -> bool:
    """Whether a value is unix seconds that a date can show."""
    return is_amount(value) and value < _MAX_TIME  # type: ignore[operator]


def is_number(value: object) -> bool:
    """Whether a value is a finite number of JSON, of a size that a float can hold."""
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def is_text(value: object) -> bool:
    """Whether a value is a string."""
    return isinstance(value, str)


def is_list(value: object) -> bool:
    """Whether a value is a list."""
    return isinstance(value, list)


def is_table(value: object) -> bool:
    """Whether a value is a mapping."""
    return isinstance(value, dict)


def keep_sound(values: Mapping[str, Any], kinds: Mapping[str, Callable[[object], bool]]) -> dict[str, Any]:
    """The values that pass the check that `kinds` has for their key; None and keys without a check pass always."""
    checked = {key: value for key, value in values.items() if value is not None and key in kinds}
    unsound = [key for key, value in checked.items() if not kinds[key](value)]
    return {key: value for key, value in values.items() if key not in unsound}


def find_too_deep(text: str) -> int:
    """The first line of YAML nested deeper than the parser's stack in C may allow, or 0. Called before parsing."""
    has_few_brackets = text.count("[") + text.count("{") <= 2 * DEEPEST
    # Each block within another begins in a later column: short lines cannot be nested deeply.
    if has_few_brackets and max(map(len, text.split("\n"))) <= _MAX_FLAT_LINE:
        return 0
    depth = 0
    # Events come one by one, without recursion. Brackets are not counted here: some stand in strings and comments.
    with suppress(yaml.YAMLError, ValueError):
        for event in yaml.parse(text, Loader=YAML_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > 2 * DEEPEST:
                return 1 if event.start_mark is None else event.start_mark.line + 1
    return 0


def read_yaml(text: str) -> Any:
    """The values of YAML that a program wrote; None if it is damaged, or beyond the bounds."""
    if find_too_deep(text):
        return None
    try:
        # The safe loader: a config in a shared folder may come from anybody.
        values = yaml.load(text, Loader=YAML_LOADER)
    # PyYAML passes on what int(), datetime() and others raise for odd tags and values.
    except Exception:
        return None
    return values if is_bounded(values) else None


def is_bounded(value: Any) -> bool:
    """Whether mappings and lists are nested at most `DEEPEST` deep, and hold at most `LARGEST_COUNT` values.

    Values that aliases of YAML share are walked once and counted for each use.
    """
    sizes: dict[int, tuple[int, int]] = {}
    # Ids of the values that contain the present one: a value that contains itself has no end.
    containers: set[int] = set()

    def measure(value: Any, depth: int) -> tuple[int, int]:
        """The number of values in a value, and of levels in it; ValueError beyond the bounds."""
        if not isinstance(value, Mapping | list | tuple | set):
            return 1, 0
        if id(value) in containers or depth > DEEPEST:
            raise ValueError
        if id(value) not in sizes:
            containers.add(id(value))
            items = value.values() if isinstance(value, Mapping) else value
            item_sizes = [measure(item, depth + 1) for item in items]
            containers.discard(id(value))
            count = 1 + sum(item_count for item_count, _ in item_sizes)
            sizes[id(value)] = count, 1 + max((item_levels for _, item_levels in item_sizes), default=0)
        count, levels = sizes[id(value)]
        if depth + levels > DEEPEST + 1 or count > LARGEST_COUNT:
            raise ValueError
        return count, levels

    try:
        measure(value, 1)
    except ValueError:
        return False
    return True
