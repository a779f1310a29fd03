"""Check plain values against annotations: fields of the schema, and arguments of classes and functions.

An annotation counts as far as a YAML value can be checked by it (`int`, `str | None`, `list[float]`, `Literal["a"]`,
an enumeration); any other name in it means that any value is accepted.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import EnumMeta
from functools import cache
from typing import Any, NamedTuple

import yaml

from trainer_cli.errors import Code, ConfigError
from trainer_cli.patterns import did_you_mean
from trainer_cli.terminal import format_count

MISSING = "???"
"""A value that must still be given."""
IN_QUOTES = "Put it in quotes if a string is meant."
WORDS = {
    "bool": ("true or false", "values that are true or false"),
    "int": ("a whole number", "whole numbers"),
    "float": ("a number", "numbers"),
    "str": ("a string", "strings"),
    "list": ("a list", "lists"),
    "mapping": ("a mapping", "mappings"),
}
"""Name of a kind -> its words for one value and for several."""
SECTION = "a section: a mapping of keys to values, never null"
_NAMES = {
    "bool": "bool", "int": "int", "float": "float", "str": "str", "None": "null", "NoneType": "null",
    "list": "list", "List": "list", "tuple": "list", "Tuple": "list", "set": "list", "Set": "list",
    "frozenset": "list", "FrozenSet": "list",
    "dict": "mapping", "Dict": "mapping", "Mapping": "mapping", "MutableMapping": "mapping",
}  # fmt: skip
_SCALARS = {bool: "bool", int: "int", float: "float", str: "str"}
_NAMES_OF_TYPES = {**_SCALARS, type(None): "null", list: "list", tuple: "list"}
_SERIES = ("Sequence", "MutableSequence", "Iterable", "Collection")
# No YAML value is a tensor, so `float | Tensor` still means a number.
_OBJECTS = ("Tensor",)
_TRUTH_WORDS = dict.fromkeys(("yes", "on", "y", "1"), "true") | dict.fromkeys(("no", "off", "n", "0"), "false")
_MAX_CHARACTERS = 80


class ValueKind(NamedTuple):
    """The plain values that an annotation admits: `names` of kinds (see WORDS, and `null`) and `choices`."""

    names: frozenset[str]
    choices: tuple[Any, ...] = ()
    item: ValueKind | None = None
    """What the items of a list may be; None: anything."""
    items: tuple[ValueKind | None, ...] | None = None
    """What each item of a list of exactly this length may be; None: any length."""
    under: ValueKind | None = None
    """What the values of a mapping may be; None: anything."""

    def mistakes(self, value: Any, key: str) -> Iterator[ConfigError]:
        """What is wrong with the value of `key`, or with values in it, each with its own key."""
        if not self._accepts(value):
            yield unfit_value(key, value, str(self), self._hint(value))
        elif isinstance(value, list | tuple):
            if self.items is not None and len(value) != len(self.items):
                message = f"{key} has {format_count(len(value), 'value')}, but it must have {len(self.items)}"
                yield ConfigError(message, location=key, code=Code.wrong_type)
                return
            if self.items is None and self.item is not None and self.item.has_types(value):
                return
            for index, item in enumerate(value):
                kind = self.item if self.items is None else self.items[index]
                yield from _item_mistakes(kind, item, f"{key}.{index}")
        # The arguments of a node are checked against what its target takes, not against this annotation.
        elif isinstance(value, Mapping) and "_target_" not in value:
            for name, item in value.items():
                yield from _item_mistakes(self.under, item, f"{key}.{name}")

    def admits(self, value: Any) -> bool:
        """Whether the value, and every value in it, is one of these. A value that is not plain is admitted."""
        return next(self.mistakes(value, ""), None) is None

    def has_types(self, values: Iterable[Any]) -> bool:
        """Whether the values are all scalars of these kinds."""
        # The set of their types is checked: there may be thousands of values.
        return all(_SCALARS.get(scalar) in self.names for scalar in set(map(type, values)))

    def _accepts(self, value: Any) -> bool:
        """Whether the value is of one of these kinds, or one of the choices; values in it are not checked."""
        name = name_of(value)
        is_whole_float = name == "int" and "float" in self.names
        if name is None or name in self.names or is_whole_float:
            return True
        # Types too: in Python 1 == True == 1.0.
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def _hint(self, value: Any) -> str:
        """How to correct a value that is refused; empty if that is not known."""
        texts = [choice for choice in self.choices if isinstance(choice, str)]
        if isinstance(value, str) and (suggestion := did_you_mean(value, texts).strip()):
            return suggestion
        if "bool" in self.names and str(value).lower() in _TRUTH_WORDS:
            return f"Write {_TRUTH_WORDS[str(value).lower()]}."
        if "int" in self.names and isinstance(value, float) and value.is_integer():
            return f"Write {int(value)}."
        if {"int", "str"} <= self.names and isinstance(value, float):
            return f"Write a whole number, or a string, such as the duration {value}ep."
        if "str" in self.names and isinstance(value, bool | float):
            return IN_QUOTES
        return f"Write [{value}]." if "list" in self.names and isinstance(value, str | int) else ""

    def __str__(self) -> str:
        words = [word for name, (word, _) in WORDS.items() if name in self.names]
        if "int" in self.names and "float" in self.names:
            # "a number" includes whole ones.
            words.remove(WORDS["int"][0])
        if "list" in self.names and self.item is not None and len(self.item.names) == 1:
            (name,) = self.item.names
            words[words.index("a list")] = f"a list of {WORDS[name][1]}" if name in WORDS else "a list"
        if self.choices:
            words.insert(0, "one of " + ", ".join(map(str, self.choices)))
        return " or ".join([*words, *(["null"] if "null" in self.names else [])])


def name_of(value: Any) -> str | None:
    """The name of a plain value's kind, or None for an object and for a node that makes one."""
    if isinstance(value, Mapping):
        return None if "_target_" in value else "mapping"
    return _NAMES_OF_TYPES.get(type(value))


def show_value(value: Any) -> str:
    """A value in a message: a string in quotes, all else as YAML writes it, at most 80 characters."""
    try:
        text = repr(value) if isinstance(value, str) else to_yaml_line(value)
    except yaml.YAMLError:
        text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def unfit_value(key: str, value: Any, expected: str, hint: str = "", code: Code = Code.wrong_type) -> ConfigError:
    """The error for a value of a key that is not what it must be."""
    message = f"{key} is {show_value(value)}, but it must be {expected}"
    return ConfigError(message, location=key, code=code, hint=hint or None)


def to_yaml_line(value: Any) -> str:
    """A value in YAML's one-line style."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def convert(annotation: Any, value: Any, key: str) -> Any:
    """Convert a value that Python code sets to the type of its field.

    Names of choices become members, mappings become sections, and other values the plain values that a config holds.

    Raises:
        ConfigError: it is not of the annotated type.
    """
    is_section = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
    if (is_section or isinstance(annotation, EnumMeta)) and isinstance(value, annotation):
        return value
    value = _to_plain(value)
    if is_section:
        return _make_section(annotation, value, key)
    kind = kind_of(annotation)
    if kind is None:
        return value
    if name_of(value) is None:
        raise unfit_value(key, value, str(kind))
    for mistake in kind.mistakes(value, key):
        raise mistake
    if isinstance(annotation, EnumMeta):
        return annotation[value]
    # A field of floats holds floats alone, so that equal values are written alike.
    return float(value) if type(value) is int and "float" in kind.names and "int" not in kind.names else value


def _make_section(section: type, value: Any, key: str) -> Any:
    """Make a section from a mapping.

    Raises:
        ConfigError: the value is not a mapping, or has a key that the section does not have.
    """
    if not isinstance(value, Mapping):
        raise unfit_value(key, value, SECTION)
    keys = [field.name for field in dataclasses.fields(section)]
    for name in value:
        if name not in keys:
            hint = did_you_mean(str(name), keys).strip() or f"Known here: {', '.join(keys)}."
            message = f"there is no key '{key}.{name}'"
            raise ConfigError(message, location=f"{key}.{name}", code=Code.unknown_key, hint=hint)
    return section(**value)


def _to_plain(value: Any) -> Any:
    """A value without the types of other libraries: numbers and arrays of numpy, ranges, subclasses of `int`."""
    # Arrays and scalars of numpy and torch have this method, so neither has to be imported.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if type(value) in (bool, int, float, str):
        return value
    for plain_type in (int, float, str):
        if isinstance(value, plain_type):
            return plain_type(value)
    if isinstance(value, Mapping):
        return {name: _to_plain(item) for name, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, Sequence | Set) else value


def kind_of(annotation: Any) -> ValueKind | None:
    """The plain values that an annotation (an object, or its text) admits; None if it admits any value."""
    if annotation is None or annotation is inspect.Parameter.empty:
        return None
    if isinstance(annotation, EnumMeta):
        return ValueKind(frozenset(), tuple(annotation.__members__))
    try:
        # Read as text, not evaluated: the names in an annotation may be importable only for a type checker.
        return _parse_annotation(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))
    except (SyntaxError, ValueError):
        return None


# It is cached: each composed config asks for the same annotations.
@cache
def _parse_annotation(text: str) -> ValueKind | None:
    """`kind_of` for the text of an annotation; SyntaxError if it is not an expression."""
    return _checkable_kind(ast.parse(text.strip(), mode="eval").body)


def _item_mistakes(kind: ValueKind | None, value: Any, key: str) -> Iterator[ConfigError]:
    """`ValueKind.mistakes` of a value inside a list or mapping; none for a value that must still be given."""
    return iter(()) if kind is None or value == MISSING else kind.mistakes(value, key)


def _checkable_kind(node: ast.expr) -> ValueKind | None:
    """What an annotation admits; None (any value) also for one that admits objects alone."""
    kind = _read_kind(node)
    return kind if kind is not None and (kind.names or kind.choices) else None


def _read_kind(node: ast.expr) -> ValueKind | None:
    """What an annotation admits; an empty kind for objects alone, None for any value."""
    if isinstance(node, ast.Constant):
        if node.value is None:
            return ValueKind(frozenset({"null"}))
        return kind_of(node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union_kind(map(_read_kind, (node.left, node.right)))
    if isinstance(node, ast.Subscript):
        inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _read_parametrised_kind(_last_name(node.value), inner)
    name = _last_name(node)
    # `torch.Tensor` and `Tensor` mean the same: the last name decides.
    if name in _OBJECTS:
        return ValueKind(frozenset())
    if name in _SERIES:
        return _series_kind(name, None)
    return ValueKind(frozenset({_NAMES[name]})) if name in _NAMES else None


def _read_parametrised_kind(name: str, inner: Sequence[ast.expr]) -> ValueKind | None:
    """What the annotation `name[inner, …]` admits; see `_read_kind`."""
    if name in ("Optional", "Union"):
        null = [ValueKind(frozenset({"null"}))] if name == "Optional" else []
        return _union_kind([*map(_read_kind, inner), *null])
    if name in ("Annotated", "Final", "InitVar", "Required", "NotRequired"):
        return _read_kind(inner[0])
    if name == "Literal":
        values = [choice.value for choice in inner if isinstance(choice, ast.Constant)]
        if len(values) != len(inner):
            return None
        names = frozenset({"null"} if None in values else ())
        return ValueKind(names, tuple(value for value in values if value is not None))
    if name in _SERIES:
        return _series_kind(name, _checkable_kind(inner[0]))
    if _NAMES.get(name) == "mapping":
        value_kind = _checkable_kind(inner[1]) if len(inner) == 2 else None
        return ValueKind(frozenset({"mapping"}), under=value_kind)
    if _NAMES.get(name) != "list":
        return None
    last = inner[-1]
    has_any_length = isinstance(last, ast.Constant) and last.value is Ellipsis
    if name in ("tuple", "Tuple") and not has_any_length:
        return ValueKind(frozenset({"list"}), items=tuple(map(_checkable_kind, inner)))
    return ValueKind(frozenset({"list"}), item=_checkable_kind(inner[0]))


def _series_kind(name: str, item: ValueKind | None) -> ValueKind:
    """What `Sequence`, `Iterable` and the like of these items admit: a list, and what else Python accepts as one."""
    names = {"list"}
    # A string is a sequence of strings, and a mapping can be iterated over.
    if item is None or "str" in item.names:
        names.add("str")
    if not name.endswith("Sequence"):
        names.add("mapping")
    return ValueKind(frozenset(names), item=item)


def _union_kind(members: Iterable[ValueKind | None]) -> ValueKind | None:
    """What a union admits. If two members are lists, or mappings, any value may be in them."""
    kinds: list[ValueKind] = []
    for member in members:
        if member is None:
            return None
        kinds.append(member)
    lists = [kind for kind in kinds if "list" in kind.names]
    mappings = [kind for kind in kinds if "mapping" in kind.names]
    return ValueKind(
        frozenset().union(*(kind.names for kind in kinds)),
        tuple(choice for kind in kinds for choice in kind.choices),
        item=lists[0].item if len(lists) == 1 else None,
        items=lists[0].items if len(lists) == 1 else None,
        under=mappings[0].under if len(mappings) == 1 else None,
    )


def _last_name(node: ast.expr) -> str:
    """The name at the end of a dotted name; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
