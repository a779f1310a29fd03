"""Apply overrides to plain values: `key=value`, `+key=value`, `++key=value`, `~key` and `key+=value`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.types import Override

from trainer_cli.config.experiments import COMPONENTS, is_whole
from trainer_cli.config.fields import KeyPath
from trainer_cli.config.hydra_compat import SCHEMA
from trainer_cli.config.kinds import MISSING, in_yaml
from trainer_cli.config.overrides import Append, line_of, path_of, refused
from trainer_cli.config.search_path import SearchPath, options
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.config.validation import merged
from trainer_cli.errors import Code, ConfigError


def apply(values: dict[str, Any], override: Override, search: SearchPath) -> ConfigError | None:
    """Apply an override in place; why it cannot be applied, or None."""
    path, line, value = path_of(override), line_of(override), override.value()
    if override.is_delete():
        return _delete(values, path, value)
    adds = override.is_add() or override.is_force_add()
    if not adds and (problem := _no_value(values, path, line, search)) is not None:
        return problem
    above: Any = values
    for depth, part in enumerate(path[:-1], start=1):
        if isinstance(above.get(part), list):
            return _of_a_list(line, ".".join(path[:depth]))
        if not isinstance(above.get(part), dict):
            above[part] = {}
        above = above[part]
    last = above.get(path[-1])
    if override.is_add() and last not in (None, MISSING) and not isinstance(value, dict | list):
        return refused(f"{'.'.join(path)} exists already", "Leave out the '+'.")
    # A whole node replaces a component: the arguments of another one would not fit it.
    replaces = len(path) == 1 and path[0] in COMPONENTS and isinstance(value, dict) and is_whole(path[0], value)
    if isinstance(last, Mapping) and isinstance(value, dict) and not replaces:
        value = merged(last, value)
    above[path[-1]] = value
    return None


def append(values: dict[str, Any], one: Append) -> ConfigError | None:
    """Add values to the end of their list, in place; null begins a new one. Why they cannot be added, or None."""
    key, whole = ".".join(one.path), f"[{','.join(map(str, one.values))}]"
    above: Any = values
    last: Any = values
    index: Any = None
    for depth, part in enumerate(one.path):
        if not isinstance(above, Mapping | list):
            shown = "null" if above is None else "no mapping"
            return refused(f"{one.line}: {'.'.join(one.path[:depth])} is {shown}")
        known = {str(index) for index in range(len(above))} if isinstance(above, list) else set(above)
        if part not in known:
            prefix = ".".join(one.path[:depth])
            meant = did_you_mean(key, [f"{prefix}.{name}" for name in known]).strip()
            hint = f"{meant} To make the list, write '+{key}={whole}'.".strip()
            return refused(f"there is no key '{key}'", hint, Code.unknown_key)
        last, index = above, (int(part) if isinstance(above, list) else part)
        above = last[index]
    if above is not None and not isinstance(above, list):
        shown = "has no value yet" if above == MISSING else f"is {above!r}, and no list"
        single = above != MISSING and not isinstance(above, Mapping) and len(one.values) == 1
        return refused(f"{one.line}: {key} {shown}", f"Write {key}={one.values[0] if single else whole}.")
    last[index] = [*(above or []), *one.values]
    return None


def _no_value(values: Mapping[str, Any], path: KeyPath, line: str, search: SearchPath) -> ConfigError | None:
    """The error for `key=value` where the composed values have no such key."""
    if path[0] not in values:
        what = f"{search.primary}.yaml does not begin with the schema, so {path[0]!r} is not in it"
        return refused(what, f"Put '- {SCHEMA}' first in its defaults list.")
    node: Any = values
    for depth, part in enumerate(path):
        above = ".".join(path[:depth])
        if isinstance(node, list):
            return _of_a_list(line, above)
        if not isinstance(node, Mapping):
            hint = f"Choose one first, as in {above}=NAME." if node is None and depth == 1 else None
            return refused(f"{line}: {above} is {'null' if node is None else 'not a mapping'}", hint)
        if part not in node:
            known = [".".join((*path[:depth], str(name))) for name in node]
            hint = f"{did_you_mean('.'.join(path), known).strip()} To add it, write '+{line}'.".strip()
            if depth == 1 and part in options(search.dirs, above):
                several = above in ("callbacks", "loggers")
                hint = f"Choose it first, as in {above}={f'[default,{part}]' if several else part}."
            return refused(f"there is no key '{'.'.join(path)}'", hint, Code.unknown_key)
        node = node[part]
    return None


def _delete(values: dict[str, Any], path: KeyPath, value: Any) -> ConfigError | None:
    key = ".".join(path)
    above: Any = values
    for part in path[:-1]:
        above = above.get(part) if isinstance(above, dict) else None
    found = above.get(path[-1]) if isinstance(above, dict) else None
    if found is None or found == MISSING:
        return refused(f"there is no '{key}' to remove")
    if value is not None and value != found:
        return refused(f"{key} is {in_yaml(found)}, and not {in_yaml(value)}, so it is not removed", f"Write ~{key}.")
    del above[path[-1]]
    return None


def _of_a_list(line: str, above: str) -> ConfigError:
    """A single item of a list cannot be set by its number, which would name another item when the list changes."""
    hint = f"Write the whole list, {above}=[...], or add to its end, {above}+=ITEM."
    return refused(f"{line}: {above} is a list, whose items are not set singly", hint)
