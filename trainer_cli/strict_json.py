"""JSON that every parser reads alike: NaN and infinity are strings, and no name occurs twice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def strict_json(value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """JSON that a strict parser reads: NaN and infinity are strings. `default` is as in `json.dumps`."""
    text = json.dumps(_replace_non_finite(value), indent=indent, default=default, ensure_ascii=False, allow_nan=False)
    # Bytes of a path that are no UTF-8 are surrogates, which cannot be encoded; `\\udcff` is an escape of JSON too.
    return text.encode(errors="backslashreplace").decode()


def _replace_non_finite(value: Any) -> Any:
    """A value with the texts `nan`, `inf` and `-inf` in place of such floats, which JSON lacks."""
    if isinstance(value, Mapping):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def read_number(value: Any) -> float | None:
    """A value of parsed JSON as a number; None if it is not one."""
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for `object_pairs_hook`. ValueError if a name occurs twice."""
    # Python keeps the last of two equal names, and other readers may keep the first.
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields
