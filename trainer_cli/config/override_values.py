"""Apply overrides to plain values: `key=value`, `+key=value`, `++key=value`, `~key` and `key+=value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from trainer_cli.config.check import contents
from trainer_cli.config.fields import KeyPath
from trainer_cli.config.hydra_compat import SCHEMA, apply_override
from trainer_cli.config.overrides import Append, line_of, path_of, refused
from trainer_cli.config.search_path import SearchPath, options
from trainer_cli.core.patterns import did_you_mean
from trainer_cli.core.types import MISSING, in_yaml
from trainer_cli.errors import Code, ConfigError


def apply(
    values: Mapping[str, Any], overrides: Sequence[Override], search: SearchPath
) -> tuple[dict[str, Any], list[ConfigError]]:
    """Plain values after the overrides, each applied as Hydra does; and why some cannot be."""
    config = OmegaConf.create(dict(values))
    OmegaConf.set_struct(config, True)
    mistakes: list[ConfigError] = []
    for override in overrides:
        mistake = _why_refused(contents(config), override, search)
        if mistake is None and (reason := apply_override(config, override)) is not None:
            mistake = refused(f"{line_of(override)}: {reason}")
        if mistake is not None:
            mistakes.append(mistake)
    return contents(config), mistakes


def _why_refused(values: Mapping[str, Any], override: Override, search: SearchPath) -> ConfigError | None:
    """Why an override does not fit the composed values, or None."""
    path, line, value = path_of(override), line_of(override), override.value()
    adds = override.is_add() or override.is_force_add()
    above: Any = values
    for depth, part in enumerate(path[:-1], start=1):
        above = above.get(part) if isinstance(above, Mapping) else None
        if isinstance(above, list):
            return _of_a_list(line, ".".join(path[:depth]))
        if isinstance(above, str) and "${" in above:
            return _of_an_interpolation(line, ".".join(path[:depth]), above)
    if override.is_delete():
        return _no_removal(above, path, value, is_given="=" in line)
    if not adds and (problem := _no_value(values, path, line, search)) is not None:
        return problem
    last = above.get(path[-1]) if isinstance(above, Mapping) else None
    if isinstance(value, Mapping) and isinstance(last, str) and "${" in last:
        return _of_an_interpolation(line, ".".join(path), last)
    if override.is_add() and last not in (None, MISSING) and not isinstance(value, dict | list):
        return refused(f"{'.'.join(path)} exists already", "Leave out the '+'.")
    return _no_merge(last, value, path, override)


def _no_merge(known: Any, value: Any, path: KeyPath, override: Override) -> ConfigError | None:
    """Why a mapping or list does not merge into the value that stands: another kind, or a new key without `+`."""
    key, line = ".".join(path), line_of(override)
    for kind, other in ((Mapping, list), (list, Mapping)):
        if isinstance(known, kind) and isinstance(value, other):
            names = {Mapping: "a mapping", list: "a list"}
            what = f"{line}: {key} is {names[kind]}, and {names[other]} does not merge into it"
            again = f" '+{line.lstrip('+')}'" if path == path_of(override) else ""
            return refused(what, f"Remove it first: '~{key}'{again}.", Code.wrong_type)
    # A mapping without keys takes any, as null does.
    if not isinstance(known, Mapping) or not isinstance(value, dict) or not known:
        return None
    for name, item in value.items():
        if name in known:
            mistake = _no_merge(known[name], item, (*path, str(name)), override)
        elif override.is_add() or override.is_force_add():
            mistake = None
        else:
            hint = did_you_mean(f"{key}.{name}", [f"{key}.{other}" for other in known]).strip()
            hint = f"{hint} To add it, write '+{line}'.".strip()
            if "_target_" in value and path == path_of(override):
                hint += f" To replace the whole {key}, put {key}=null before it."
            mistake = refused(f"there is no key '{key}.{name}'", hint, Code.unknown_key)
        if mistake is not None:
            return mistake
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
            hint = f"Choose one first, as in {above}=NAME." if node is None and depth == 1 else f"Write {above}=VALUE."
            return refused(f"{line}: {above} is {'null' if node is None else 'not a mapping'}", hint)
        if part not in node:
            known = [".".join((*path[:depth], str(name))) for name in node]
            hint = f"{did_you_mean('.'.join(path), known).strip()} To add it, write '+{line}'.".strip()
            if depth == 1 and above in ("callbacks", "loggers") and len(path) > 2:
                value = line.partition("=")[2]
                hint = f"Say what to make: '+{above}.{part}={{_target_: TARGET, {'.'.join(path[2:])}: {value}}}'."
            if depth == 1 and part in options(search.dirs, above):
                several = above in ("callbacks", "loggers")
                hint = f"Choose it first, as in {above}={f'[default,{part}]' if several else part}."
            return refused(f"there is no key '{'.'.join(path)}'", hint, Code.unknown_key)
        node = node[part]
    return None


def _no_removal(above: Any, path: KeyPath, value: Any, *, is_given: bool) -> ConfigError | None:
    """Why `~key` or `~key=value` does not fit what stands above the key, or None."""
    key = ".".join(path)
    if not isinstance(above, Mapping) or path[-1] not in above:
        names = [".".join((*path[:-1], str(name))) for name in above] if isinstance(above, Mapping) else []
        return refused(f"there is no '{key}' to remove", did_you_mean(key, names).strip() or "Leave it out.")
    known = above[path[-1]]
    if is_given and value != known:
        return refused(f"{key} is {in_yaml(known)}, and not {in_yaml(value)}, so it is not removed", f"Write ~{key}.")
    return None


def _of_an_interpolation(line: str, key: str, text: str) -> ConfigError:
    """A key below an interpolation would be set in the node that it names, for all that refer to it."""
    return refused(f"{line}: {key} is {text}, and what it names has that key", "Set the key there.")


def _of_a_list(line: str, above: str) -> ConfigError:
    """A single item of a list cannot be set by its number, which would name another item when the list changes."""
    hint = f"Write the whole list, {above}=[...], or add to its end, {above}+=ITEM."
    return refused(f"{line}: {above} is a list, whose items are not set singly", hint)
