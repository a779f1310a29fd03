"""Apply overrides to a tree of values: `key=value`, `+key=value`, `++key=value`, `~key` and `key+=value`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config.hydra_compat import SCHEMA
from trainer_cli.config.overrides import (
    Append,
    did_you_mean_override,
    find_sibling,
    hint_on_list,
    hint_on_setting,
    line_of,
    override_error,
    path_of,
)
from trainer_cli.config.search_path import SearchPath
from trainer_cli.config.tree import COMMAND_LINE, ConfigTree, MergeError, Node, ValueOrigin, merge, name_kind, resolve
from trainer_cli.elsewhere import OWN_METRIC
from trainer_cli.errors import Code, ConfigError
from trainer_cli.keys import DATA_KEYS, SEVERAL, KeyPath
from trainer_cli.patterns import did_you_mean
from trainer_cli.values import MISSING, to_yaml_line

_MAX_LISTED = 12
"""Keys of a section that a message lists."""
_CALLBACK = re.compile(
    r"(?:- override /)?callbacks(?:=|: )(?P<option>\w+)(?:,? callbacks\.\w+\.metric(?:=|: )\S+)?,? ?"
)
"""The choice of a callback and the metric that belongs to it, on the command line or in a file."""


def apply(
    tree: ConfigTree, overrides: Sequence[Override], search: SearchPath, switches: Mapping[str, str] | None = None
) -> list[ConfigError]:
    """Apply overrides to the tree, each as Hydra does. Returns a mistake for each refused one.

    `switches`: section -> the choice of this command line that switches it off, such as `~scheduler`.
    """
    mistakes: list[ConfigError] = []
    for override in overrides:
        if _names_components(override):
            override = replace(override, type=OverrideType.ADD)
        path, line = path_of(override), line_of(override)
        # Hydra would accept some of these with a surprising result, and explain others badly.
        if (mistake := _why_refused(tree.root, override, search, switches or {})) is not None:
            mistakes.append(mistake)
        elif override.is_delete():
            section = tree.root.at(path[:-1])
            assert section is not None
            del section.value[path[-1]]
            tree.removed[path] = ValueOrigin(COMMAND_LINE, line)
        else:
            node = Node.of(override.value(), ValueOrigin(COMMAND_LINE, line), line.partition("=")[2])
            current = tree.root.at(path)
            if current is None or not (current.is_mapping and node.is_mapping):
                tree.root.put(path, node)
                continue
            try:
                merge(tree.root, node, path)
                current.origin, current.text = node.origin, node.text
            except MergeError as error:
                mistakes.append(_kind_error(error.path, error.old.value, error.new.value, override))
    return mistakes


def _names_components(override: Override) -> bool:
    """Whether an override gives whole callbacks or loggers, which may be new: `callbacks={NAME: {_target_: …}}`."""
    if override.type is not OverrideType.CHANGE or path_of(override) not in [(group,) for group in SEVERAL]:
        return False
    value = override.value()
    return isinstance(value, dict) and all(isinstance(node, dict) and "_target_" in node for node in value.values())


def _why_refused(root: Node, override: Override, search: SearchPath, switches: Mapping[str, str]) -> ConfigError | None:
    """The mistake if an override does not fit the values so far, or None."""
    path, line, value = path_of(override), line_of(override), override.value()
    key, adds = ".".join(path), override.is_add() or override.is_force_add()
    parent: Node | None = root
    for depth, name in enumerate(path[:-1], start=1):
        parent = None if parent is None else parent.get(name)
        if parent is not None and isinstance(parent.value, list):
            # By its index, it would be another item after the list changes.
            list_key = ".".join(path[:depth])
            return override_error(
                f"{line}: {list_key} is a list, whose items are not set singly", hint_on_list(list_key)
            )
        if parent is not None and parent.is_interpolation:
            return _interpolation_error(line, ".".join(path[:depth]), parent.value)
    if override.is_delete():
        return _why_not_removed(root, parent, path, value, has_value="=" in line)
    section = root.get(path[0])
    is_switched_off = path[0] in switches and (section is None or section.value is None)
    if not adds and is_switched_off and len(path) > 1:
        message = f"{line} has no effect: {switches[path[0]]} on this command line removes the {path[0]}"
        return override_error(message, f"Leave out '{switches[path[0]]}', or '{line}'.", Code.no_effect)
    if not adds and (problem := _why_no_key(root, path, line, search)) is not None:
        return problem
    current = parent.value.get(path[-1]) if parent is not None and parent.is_mapping else None
    if current is None:
        return None
    if isinstance(value, dict) and current.is_interpolation:
        return _interpolation_error(line, key, current.value)
    if override.is_add() and current.value not in (None, MISSING) and not isinstance(value, dict | list):
        return override_error(f"{key} exists already", "Leave out the '+'.")
    return _why_not_merged(current, value, path, override)


def _why_not_merged(current: Node, value: Any, path: KeyPath, override: Override) -> ConfigError | None:
    """The mistake if a mapping or list does not merge into the current value: its kind differs, or a key is new."""
    key, line = ".".join(path), line_of(override)
    if {type(current.value), type(value)} == {dict, list}:
        return _kind_error(path, current.value, value, override)
    # A mapping without keys takes any, as null does.
    if not current.is_mapping or not isinstance(value, dict) or not current.value:
        return None
    for name, item in value.items():
        mistake = None
        if name in current.value:
            mistake = _why_not_merged(current.value[name], item, (*path, str(name)), override)
        elif not (override.is_add() or override.is_force_add()):
            hint = hint_on_setting(f"{key}.{name}", str(item)) if isinstance(item, str) else ""
            near = did_you_mean(f"{key}.{name}", [f"{key}.{other_kind}" for other_kind in current.value]).strip()
            hint = f"{hint or near} To add it, write '+{line}'.".strip()
            if "_target_" in value and path == path_of(override):
                hint += f" To replace the whole {key}, put {key}=null before it."
            mistake = override_error(f"there is no key '{key}.{name}'", hint, Code.unknown_key)
        if mistake is not None:
            return mistake
    return None


def _kind_error(path: KeyPath, current: Any, value: Any, override: Override) -> ConfigError:
    """Refuse a list in the place of a mapping, and the reverse."""
    key, line = ".".join(path), line_of(override)
    message = f"{line}: {key} is {name_kind(current)}, and {name_kind(value)} does not merge into it"
    again = f" '+{line.lstrip('+')}'" if path == path_of(override) else ""
    return override_error(message, f"Remove it first: '~{key}'{again}.", Code.wrong_type)


def append(root: Node, append: Append) -> ConfigError | None:
    """Add values to the end of a list; null counts as an empty list. The mistake if that fails, or None."""
    key, list_text = ".".join(append.path), f"[{','.join(map(str, append.values))}]"
    node = root
    for depth, name in enumerate(append.path):
        if not isinstance(node.value, dict | list):
            shown = "null" if node.value is None else "no mapping"
            return override_error(f"{append.line}: {'.'.join(append.path[:depth])} is {shown}")
        child = node.get(name)
        if child is None:
            names = node.value if node.is_mapping else range(len(node.value))
            prefix = ".".join(append.path[:depth])
            suggestion = did_you_mean(key, [f"{prefix}.{name}" for name in names]).strip()
            hint = f"{suggestion} To make the list, write '+{key}={list_text}'.".strip()
            return override_error(f"there is no key '{key}'", hint, Code.unknown_key)
        node = child
    if node.value is not None and not isinstance(node.value, list):
        shown = "has no value yet" if node.value == MISSING else f"is {node.plain()!r}, and no list"
        is_one_value = node.value != MISSING and not node.is_mapping and len(append.values) == 1
        return override_error(
            f"{append.line}: {key} {shown}", f"Write {key}={append.values[0] if is_one_value else list_text}."
        )
    text, line = append.line.partition("=")[2], append.line
    added = [Node.of(value, ValueOrigin(COMMAND_LINE, line), text) for value in append.values]
    words = line if node.origin == ValueOrigin() else f"{line}, after {node.origin}"
    node.value, node.origin, node.text = [*(node.value or ()), *added], ValueOrigin(COMMAND_LINE, words), text
    return None


def _why_no_key(root: Node, path: KeyPath, line: str, search: SearchPath) -> ConfigError | None:
    """The error for `key=value` where the values have no such key."""
    if path[0] not in root.value:
        message = f"{search.primary}.yaml does not begin with the schema, so {path[0]!r} is not in it"
        return override_error(message, f"Put '- {SCHEMA}' first in its defaults list.")
    node = root
    for depth, name in enumerate(path):
        prefix = ".".join(path[:depth])
        if not node.is_mapping:
            is_null = node.value is None
            setting = hint_on_setting(".".join(path), line.partition("=")[2]) or f"Write {prefix}=VALUE."
            hint = f"Choose one first, as in {prefix}=NAME." if is_null and depth == 1 else setting
            return override_error(f"{line}: {prefix} is {'null' if is_null else 'not a mapping'}", hint)
        if name not in node.value:
            hint = _hint_on_missing(node, path, depth, line, search)
            return override_error(f"there is no key '{'.'.join(path)}'", hint, Code.unknown_key)
        node = node.value[name]
    return None


def _hint_on_missing(node: Node, path: KeyPath, depth: int, line: str, search: SearchPath) -> str:
    """What to write instead of `line`, whose name at `depth` of the path is not a key of `node`."""
    prefix, name, value = ".".join(path[:depth]), path[depth], line.partition("=")[2]
    if depth == 1 and name in search.options(prefix):
        option = _list_options(node, prefix, name) if prefix in SEVERAL else name
        return f"Choose it first, as in {prefix}={option}."
    if depth == 1 and prefix in SEVERAL and len(path) > 2:
        key = ".".join(path[2:])
        node_text = f"_target_: {value}" if key == "_target_" else f"_target_: TARGET, {key}: {value}"
        return f"Say what to make: '+{prefix}.{name}={{{node_text}}}'."
    suggestion = _suggest_key(path, depth, node, value)
    # A setting of another section, or in the notation of its value; a similar key of this section counts more.
    setting = hint_on_setting(".".join(path), value)
    is_same_key = setting.partition("=")[0] == suggestion.partition("=")[0].removesuffix("'?")
    if not suggestion.startswith("Did") or is_same_key:
        suggestion = setting or suggestion
    # What is to be left out would do nothing, whatever class takes it.
    if "leave it out." in suggestion or not _may_add(node, path[:depth], suggestion):
        return suggestion
    hint = f"{suggestion} To add it, write '+{line}'.".strip()
    target = node.value.get("_target_")
    if suggestion.startswith(f"{prefix} has") and target is not None:
        hint = f"{hint.removesuffix('.')}, if {target.value} takes it."
    return hint


def _list_options(node: Node, group: str, option: str) -> str:
    """An option, or the list that adds it to those of which the node of its group was made."""
    sources = "\n".join(leaf.origin.source for _, leaf in node.walk())
    # After the last folder of this name: a project may lie below another.
    options = list(dict.fromkeys([*re.findall(f".*{group}/(.+?).yaml:", sources), option]))
    return f"[{','.join(options)}]" if options[1:] else option


def keep_callbacks(hint: str, tree: ConfigTree) -> str:
    """A hint that chooses a callback, for a config that has it already, or has others, which the choice would drop."""
    match, callbacks = _CALLBACK.search(hint), tree.root.get("callbacks")
    if match is None or callbacks is None or not callbacks.is_mapping:
        return hint
    (start, end), option = match.span(), match["option"]
    if option in callbacks.value and hint.startswith("callbacks.", end):
        return hint[:start] + hint[end:].replace(OWN_METRIC, "")
    return hint.replace(option, _list_options(callbacks, "callbacks", option), 1)


def _may_add(node: Node, path: KeyPath, suggestion: str) -> bool:
    """Whether the key that the node at `path` lacks may be a further argument of its class.

    The configs name the usual arguments of torch's and our own classes, so for these a `suggestion` is likelier.
    """
    target = node.get("_target_")
    is_users_class = target is None or not str(target.value).startswith(("torch.", "trainer_cli."))
    return is_users_class or not suggestion or suggestion.startswith(f"{'.'.join(path)} has ")


def _suggest_key(path: KeyPath, depth: int, node: Node, value: str) -> str:
    """A suggestion for the unknown key at a depth of the path: the nearest of its section, else all of them.

    Empty if an override has replaced the class of the section: its other keys are arguments of the former class.
    """
    target = node.value.get("_target_")
    if target is not None and target.origin.source == COMMAND_LINE:
        return ""
    names = [str(name) for name in node.value]
    names += [name for name in DATA_KEYS if path[:depth] == ("data",) and name not in names]
    prefix = ".".join(path[:depth])
    if (near := find_sibling(".".join(path[: depth + 1]), names)) is not None:
        return did_you_mean_override(".".join((near, *path[depth + 1 :])), value)
    listed = [name for name in names if name != "_target_"]
    return f"{prefix} has {', '.join(listed)}." if prefix and 0 < len(listed) <= _MAX_LISTED else ""


def _why_not_removed(
    root: Node, parent: Node | None, path: KeyPath, value: Any, *, has_value: bool
) -> ConfigError | None:
    """The mistake if `~key` or `~key=value` does not match `parent`, which lacks the key or has another value."""
    key = ".".join(path)
    node = parent.value.get(path[-1]) if parent is not None and parent.is_mapping else None
    if node is None:
        siblings = parent.value if parent is not None and parent.is_mapping else ()
        names = [".".join((*path[:-1], str(name))) for name in siblings]
        return override_error(f"there is no '{key}' to remove", did_you_mean(key, names).strip() or "Leave it out.")
    try:
        current = resolve(OmegaConf.create(root.plain()), path) if node.is_interpolation else node.plain()
    except (OmegaConfBaseException, RecursionError) as error:
        return override_error(f"{key} is {node.value}, and is not removed: {str(error).splitlines()[0]}")
    if current in (None, MISSING):
        return override_error(f"there is no '{key}' to remove: it is {to_yaml_line(current)}", "Leave it out.")
    if has_value and value != current:
        return override_error(
            f"{key} is {to_yaml_line(current)}, and not {to_yaml_line(value)}, so it is not removed", f"Write ~{key}."
        )
    return None


def _interpolation_error(line: str, key: str, text: str) -> ConfigError:
    """Refuse a key below an interpolation: it would be set in the node that the interpolation refers to."""
    return override_error(f"{line}: {key} is {text}, and what it names has that key", "Set the key there.")
