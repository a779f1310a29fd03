"""What a single value must be by its type in the schema, where the single values are, and the words for a wrong one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import BooleanNode, DictConfig, EnumNode, FloatNode, IntegerNode, ListConfig, StringNode

from trainer_cli.config.overrides import KeyPath
from trainer_cli.config.suggest import did_you_mean, nearest

MISSING = "???"
IN_QUOTES = "Put it in quotes if a text is meant."
_TRUTH = dict.fromkeys(("yes", "on", "y", "1"), "true") | dict.fromkeys(("no", "off", "n", "0"), "false")


def fits(node: Any, value: Any) -> bool:
    """Whether a value is of a node's type: nothing is converted but a whole number into a text or a fraction."""
    if value is None:
        return bool(node._is_optional())
    if isinstance(value, str) and ("${" in value or value == MISSING):
        return True
    if isinstance(node, ListConfig):
        kinds: dict[Any, type] = {int: int, str: str}
        kind = kinds.get(node._metadata.element_type, object)
        return isinstance(value, list) and all(_is_a(kind, item) for item in value)
    if isinstance(node, DictConfig):
        return isinstance(value, Mapping)
    for one, kind in ((BooleanNode, bool), (IntegerNode, int), (FloatNode, float), (StringNode, str)):
        if isinstance(node, one):
            return _is_a(kind, value)
    return not isinstance(node, EnumNode) or (isinstance(value, str) and value in node.enum_type.__members__)


def _is_a(kind: type, value: Any) -> bool:
    if kind in (float, str) and isinstance(value, int) and not isinstance(value, bool):
        return True
    if kind is str and isinstance(value, str):
        return value != MISSING
    return isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))


def numbers_for_texts(node: Any, value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    """Whole numbers that stand where a node wants texts, which `fits` lets through."""
    if isinstance(node, ListConfig) and node._metadata.element_type is str and isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, int):
                yield (*path, str(index)), item
    elif isinstance(node, StringNode) and isinstance(value, int):
        yield path, value


def hint(value: Any, kind: str) -> str:
    if kind.startswith("one of ") and isinstance(value, str):
        return did_you_mean(value, kind.removeprefix("one of ").split(", ")).strip()
    if kind.startswith("a whole number") and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}."
    if kind.startswith("true or false") and str(value).lower() in _TRUTH:
        return f"Write {_TRUTH[str(value).lower()]}."
    if kind.startswith("a text") and isinstance(value, bool | float):
        return IN_QUOTES
    if kind.startswith("a list") and isinstance(value, str | int):
        return f"Write [{value}]."
    return ""


def kind_of(node: Any) -> str:
    words = "a value of another type"
    if isinstance(node, BooleanNode):
        words = "true or false"
    elif isinstance(node, IntegerNode):
        words = "a whole number"
    elif isinstance(node, FloatNode):
        words = "a number"
    elif isinstance(node, EnumNode):
        return "one of " + ", ".join(member.name for member in node.enum_type)
    elif isinstance(node, StringNode):
        words = "a text"
    elif isinstance(node, ListConfig):
        element = node._metadata.element_type
        words = "a list of " + {str: "texts", int: "whole numbers"}.get(element, "values")
    elif isinstance(node, DictConfig):
        words = "a mapping"
    return f"{words} or null" if node is not None and node._is_optional() else words


def leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, str(index)))
    else:
        yield path, value


def odd_keys(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Keys that no text can name. A whole number may be one, for a mapping that is an argument."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, bool) or not isinstance(key, str | int):
                yield path, key
            yield from odd_keys(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from odd_keys(item, (*path, str(index)))


def places(config: DictConfig | ListConfig, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Every single value of a config, unresolved: its path, and the container and key to find it by."""
    keys = range(len(config)) if isinstance(config, ListConfig) else list(config)
    for key in keys:
        node, here = config._get_node(key), (*path, str(key))
        if isinstance(node, DictConfig | ListConfig) and not (
            node._is_none() or node._is_missing() or node._is_interpolation()
        ):
            yield from places(node, here)
        else:
            yield here, config, key


def why_unresolved(error: Exception, text: Any, known: Sequence[str] = ()) -> tuple[str, str]:
    """OmegaConf's complaint of an interpolation, and the cure; `known` are the keys that it could have named."""
    words = str(getattr(error, "msg", None) or error).splitlines()[0] if str(error) else type(error).__name__
    if found := re.search(r"Interpolation key '([^']+)' not found", words):
        return f"{text} names a key that is not there: {found[1]}", _meant(found[1], known)
    if found := re.search(r"Environment variable '([^']+)' not found", words):
        return f"the environment variable {found[1]} is not set", f"Set it, or write ${{oc.env:{found[1]},DEFAULT}}."
    if "Recursive interpolation" in words or "RecursionError" in words or "parent node" in words:
        return f"{text} leads back to itself", ""
    if found := re.search(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", words):
        kind = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}.get(found[2], found[2])
        return f"{text} comes to {found[1]!r}, but it must be {kind}", ""
    if found := re.search(r"Unsupported interpolation type (\S+)", words):
        return f"{text} asks for {found[1]!r}, which is no resolver", "Known: ${key}, ${oc.env:NAME,DEFAULT}."
    if "HydraConfig was not set" in words:
        return f"{text} asks for Hydra's own settings, and there are none", "Hydra only composes the config here."
    if found := re.search(r"Missing mandatory value: (\S+)", words):
        return f"{text} names {found[1]}, which must be given", f"Add {found[1]}=VALUE to the command line."
    return words.replace("while resolving interpolation", f"in {text}") if text else words, ""


def _meant(key: str, known: Sequence[str]) -> str:
    """The key that a misspelt one stands for: one beside it where its section is right, else any."""
    above, dot, name = key.rpartition(".")
    beside = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == above]
    meant = nearest(name, beside)
    if not beside:
        return did_you_mean(key, known).strip()
    return f"Did you mean '{above}{dot}{meant}'?" if meant is not None else ""


def names_one_of(keys: Iterable[str], text: str) -> bool:
    """Whether a text names a key, and not only a longer word or key with it inside."""
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", text) for key in keys)
