"""JSON with NaN and infinity, which it lacks, as the strings "nan", "inf" and "-inf"."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON that a strict parser reads: NaN and infinity are strings."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)
    # Bytes of a path that are no UTF-8 are surrogates, which cannot be encoded; `\\udcff` is an escape of JSON too.
    return text.encode(errors="backslashreplace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def read_number(value: Any) -> float | None:
    """A value of parsed JSON as a number; None if it is not one."""
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return None
