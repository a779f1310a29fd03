"""`key+=value`: values put at the end of a list that a config has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_cli.config.overrides import COMMAND_LINE, Append
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError


def add(values: dict[str, Any], append: Append) -> ConfigError | None:
    """Put the values at the end of their list, in place; null begins a new one. Else why that cannot be."""
    key, whole = ".".join(append.path), f"[{','.join(map(str, append.values))}]"
    above: Any = values
    last: Any = values
    place: Any = None
    for depth, part in enumerate(append.path):
        if not isinstance(above, Mapping | list):
            shown = "null" if above is None else "no mapping"
            return ConfigError(f"{append.line}: {'.'.join(append.path[:depth])} is {shown}", where=COMMAND_LINE)
        known = {str(index) for index in range(len(above))} if isinstance(above, list) else set(above)
        if part not in known:
            prefix = ".".join(append.path[:depth])
            hint = did_you_mean(key, [f"{prefix}.{name}" for name in known]).strip()
            cure = f"{hint} To make the list, write '+{key}={whole}'.".strip()
            return ConfigError(f"there is no key '{key}'", where=COMMAND_LINE, cure=cure)
        last, place = above, (int(part) if isinstance(above, list) else part)
        above = last[place]
    if above is not None and not isinstance(above, list):
        shown = "has no value yet" if above == "???" else f"is {above!r}, and no list"
        single = above != "???" and not isinstance(above, Mapping) and len(append.values) == 1
        cure = f"Write {key}={append.values[0] if single else whole}."
        return ConfigError(f"{append.line}: {key} {shown}", where=COMMAND_LINE, cure=cure)
    last[place] = [*(above or []), *append.values]
    return None
