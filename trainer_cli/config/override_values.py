"""Apply overrides to plain values: `key=value`, `+key=value`, `++key=value`, `~key` and `key+=value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType

from trainer_cli.config.fields import KeyPath
from trainer_cli.config.hydra_compat import SCHEMA
from trainer_cli.config.merging import MergedConfig
from trainer_cli.config.overrides import Append, line_of, override_error, path_of
from trainer_cli.config.search_path import SearchPath, options
from trainer_cli.core.elsewhere import hint_on
from trainer_cli.core.patterns import did_you_mean, nearest
from trainer_cli.core.types import MISSING, in_yaml
from trainer_cli.errors import Code, ConfigError

_MAX_LISTED = 12
"""Keys of a section that a message lists."""


def apply(
    values: Mapping[str, Any], overrides: Sequence[Override], search: SearchPath
) -> tuple[dict[str, Any], list[ConfigError]]:
    """Apply overrides to plain values, each as Hydra does. Returns the values, and a mistake for each refused one."""
    config = MergedConfig(values)
    mistakes: list[ConfigError] = []
    for override in overrides:
        if _names_components(override):
            override = replace(override, type=OverrideType.ADD)
        # Hydra would accept some of these with a surprising result, and explain others badly.
        mistake = _why_refused(config.values, override, search, values)
        if mistake is None and (reason := config.apply(override)) is not None:
            mistake = override_error(f"{line_of(override)}: {reason}")
        if mistake is not None:
            mistakes.append(mistake)
    return config.values, mistakes


def _names_components(override: Override) -> bool:
    """Whether an override is `callbacks={NAME: {_target_: …}}` or the same of loggers, which may be new ones."""
    if override.type is not OverrideType.CHANGE or path_of(override) not in (("callbacks",), ("loggers",)):
        return False
    value = override.value()
    return isinstance(value, dict) and all(isinstance(node, dict) and "_target_" in node for node in value.values())


def _why_refused(
    values: Mapping[str, Any], override: Override, search: SearchPath, composed: Mapping[str, Any]
) -> ConfigError | None:
    """The mistake if an override does not fit the values so far, or None. `composed`: those before all overrides."""
    path, line, value = path_of(override), line_of(override), override.value()
    adds = override.is_add() or override.is_force_add()
    parent: Any = values
    for depth, name in enumerate(path[:-1], start=1):
        parent = parent.get(name) if isinstance(parent, Mapping) else None
        if isinstance(parent, list):
            return _of_a_list(line, ".".join(path[:depth]))
        if isinstance(parent, str) and "${" in parent:
            return _of_an_interpolation(line, ".".join(path[:depth]), parent)
    if override.is_delete():
        return _no_removal(parent, path, value, has_value="=" in line)
    if not adds and (problem := _no_value(values, path, line, search, composed)) is not None:
        return problem
    current = parent.get(path[-1]) if isinstance(parent, Mapping) else None
    if isinstance(value, Mapping) and isinstance(current, str) and "${" in current:
        return _of_an_interpolation(line, ".".join(path), current)
    if override.is_add() and current not in (None, MISSING) and not isinstance(value, dict | list):
        return override_error(f"{'.'.join(path)} exists already", "Leave out the '+'.")
    return _no_merge(current, value, path, override)


def _no_merge(current: Any, value: Any, path: KeyPath, override: Override) -> ConfigError | None:
    """The mistake if a mapping or list does not merge into the current value: its kind differs, or a key is new."""
    key, line = ".".join(path), line_of(override)
    for kind, other_kind in ((Mapping, list), (list, Mapping)):
        if isinstance(current, kind) and isinstance(value, other_kind):
            names = {Mapping: "a mapping", list: "a list"}
            message = f"{line}: {key} is {names[kind]}, and {names[other_kind]} does not merge into it"
            again = f" '+{line.lstrip('+')}'" if path == path_of(override) else ""
            return override_error(message, f"Remove it first: '~{key}'{again}.", Code.wrong_type)
    # A mapping without keys takes any, as null does.
    if not isinstance(current, Mapping) or not isinstance(value, dict) or not current:
        return None
    for name, item in value.items():
        if name in current:
            mistake = _no_merge(current[name], item, (*path, str(name)), override)
        elif override.is_add() or override.is_force_add():
            mistake = None
        else:
            hint = did_you_mean(f"{key}.{name}", [f"{key}.{other_kind}" for other_kind in current]).strip()
            hint = f"{hint} To add it, write '+{line}'.".strip()
            if "_target_" in value and path == path_of(override):
                hint += f" To replace the whole {key}, put {key}=null before it."
            mistake = override_error(f"there is no key '{key}.{name}'", hint, Code.unknown_key)
        if mistake is not None:
            return mistake
    return None


def append(values: dict[str, Any], addition: Append) -> ConfigError | None:
    """Add values to the end of a list, in place; null counts as an empty list. The mistake if that fails, or None."""
    key, list_text = ".".join(addition.path), f"[{','.join(map(str, addition.values))}]"
    current: Any = values
    parent: Any = values
    index: Any = None
    for depth, name in enumerate(addition.path):
        if not isinstance(current, Mapping | list):
            shown = "null" if current is None else "no mapping"
            return override_error(f"{addition.line}: {'.'.join(addition.path[:depth])} is {shown}")
        names = {str(index) for index in range(len(current))} if isinstance(current, list) else set(current)
        if name not in names:
            prefix = ".".join(addition.path[:depth])
            suggestion = did_you_mean(key, [f"{prefix}.{name}" for name in names]).strip()
            hint = f"{suggestion} To make the list, write '+{key}={list_text}'.".strip()
            return override_error(f"there is no key '{key}'", hint, Code.unknown_key)
        parent, index = current, (int(name) if isinstance(current, list) else name)
        current = parent[index]
    if current is not None and not isinstance(current, list):
        shown = "has no value yet" if current == MISSING else f"is {current!r}, and no list"
        single = current != MISSING and not isinstance(current, Mapping) and len(addition.values) == 1
        return override_error(
            f"{addition.line}: {key} {shown}", f"Write {key}={addition.values[0] if single else list_text}."
        )
    parent[index] = [*(current or []), *addition.values]
    return None


def _no_value(
    values: Mapping[str, Any], path: KeyPath, line: str, search: SearchPath, composed: Mapping[str, Any]
) -> ConfigError | None:
    """The error for `key=value` where the values have no such key. `composed`: the values before all overrides."""
    if path[0] not in values:
        message = f"{search.primary}.yaml does not begin with the schema, so {path[0]!r} is not in it"
        return override_error(message, f"Put '- {SCHEMA}' first in its defaults list.")
    node: Any = values
    for depth, name in enumerate(path):
        prefix = ".".join(path[:depth])
        if isinstance(node, list):
            return _of_a_list(line, prefix)
        if not isinstance(node, Mapping):
            hint = (
                f"Choose one first, as in {prefix}=NAME." if node is None and depth == 1 else f"Write {prefix}=VALUE."
            )
            return override_error(f"{line}: {prefix} is {'null' if node is None else 'not a mapping'}", hint)
        if name not in node:
            meant = _suggest_key(path, depth, node, composed)
            # A setting of another section, or in the notation of its value; a name that is near here counts more.
            setting = hint_on(".".join(path), line.partition("=")[2])
            if not meant.startswith("Did") or setting.startswith(f"{meant[:-2]}="):
                meant = setting or meant
            hint = f"{meant} To add it, write '+{line}'.".strip()
            if depth == 1 and prefix in ("callbacks", "loggers") and len(path) > 2:
                key, value = ".".join(path[2:]), line.partition("=")[2]
                node_text = f"_target_: {value}" if key == "_target_" else f"_target_: TARGET, {key}: {value}"
                hint = f"Say what to make: '+{prefix}.{name}={{{node_text}}}'."
            if depth == 1 and name in options(search.dirs, prefix):
                is_mapping_of_components = prefix in ("callbacks", "loggers")
                hint = f"Choose it first, as in {prefix}={f'[default,{name}]' if is_mapping_of_components else name}."
            return override_error(f"there is no key '{'.'.join(path)}'", hint, Code.unknown_key)
        node = node[name]
    return None


def _suggest_key(path: KeyPath, depth: int, node: Mapping[Any, Any], composed: Any) -> str:
    """A suggestion for the unknown key at a depth of the path: the nearest of its section, else all of them.

    Empty if an override has replaced the class of the section: its other keys are arguments of the former class.
    """
    for name in path[:depth]:
        composed = composed.get(name) if isinstance(composed, Mapping) else None
    if isinstance(composed, Mapping) and composed.get("_target_") != node.get("_target_"):
        return ""
    names = [str(name) for name in node]
    prefix = ".".join(path[:depth])
    # Of the last name alone: a common beginning makes any two keys of a section alike.
    if (near := nearest(path[depth], names)) is not None:
        return f"Did you mean '{'.'.join((*path[:depth], near))}'?"
    listed = [name for name in names if name != "_target_"]
    return f"{prefix} has {', '.join(listed)}." if prefix and 0 < len(listed) <= _MAX_LISTED else ""


def _no_removal(parent: Any, path: KeyPath, value: Any, *, has_value: bool) -> ConfigError | None:
    """The mistake if `~key` names no key of `parent`, or `~key=value` another value, or None."""
    key = ".".join(path)
    if not isinstance(parent, Mapping) or path[-1] not in parent:
        names = [".".join((*path[:-1], str(name))) for name in parent] if isinstance(parent, Mapping) else []
        return override_error(f"there is no '{key}' to remove", did_you_mean(key, names).strip() or "Leave it out.")
    current = parent[path[-1]]
    if has_value and value != current:
        return override_error(
            f"{key} is {in_yaml(current)}, and not {in_yaml(value)}, so it is not removed", f"Write ~{key}."
        )
    return None


def _of_an_interpolation(line: str, key: str, text: str) -> ConfigError:
    """Refuse a key below an interpolation: it would be set in the node that the interpolation refers to."""
    return override_error(f"{line}: {key} is {text}, and what it names has that key", "Set the key there.")


def _of_a_list(line: str, above: str) -> ConfigError:
    """Refuse an item of a list by its index, which would name another item after the list changes."""
    hint = f"Write the whole list, {above}=[...], or add to its end, {above}+=ITEM."
    return override_error(f"{line}: {above} is a list, whose items are not set singly", hint)
