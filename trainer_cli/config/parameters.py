"""What a class or function takes, and whether given arguments fit.

An annotation counts as far as a YAML value can be told by it (`int`, `str | None`, `list[float]`, `Literal["a"]`);
any other name in it means that anything goes.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer_cli.config.kinds import MISSING
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError

Kind = inspect.Parameter
NO_DEFAULT = inspect.Parameter.empty

WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "list": "a list",
    "mapping": "a mapping",
    "null": "null",
}
_PLAIN = {
    "bool": "bool", "int": "int", "float": "float", "str": "str", "None": "null", "NoneType": "null",
    "list": "list", "List": "list", "tuple": "list", "Tuple": "list", "set": "list", "Set": "list",
    "frozenset": "list", "FrozenSet": "list",
    "dict": "mapping", "Dict": "mapping", "Mapping": "mapping", "MutableMapping": "mapping",
}  # fmt: skip
_SERIES = ("Sequence", "MutableSequence", "Iterable", "Collection")
# No value of a YAML is one of these, so `float | Tensor` still means a number.
_OBJECTS = ("Tensor",)


class Plain(NamedTuple):
    """The plain values that an annotation admits: kinds of them (keys of WORDS), and single ones."""

    kinds: frozenset[str]
    choices: tuple[Any, ...] = ()
    item: Plain | None = None
    """What the items of a list may be; null: anything."""
    each: tuple[Plain | None, ...] | None = None
    """What each item of a list of just this length may be; null: any length."""
    under: Plain | None = None
    """What the values of a mapping may be; null: anything."""

    def admits(self, value: Any) -> bool:
        """Whether the value, and all that is in it, is one of these. What is no plain value is not judged."""
        return next(self.against(value, ""), None) is None

    def against(self, value: Any, where: str) -> Iterator[ConfigError]:
        """What is wrong with a value whose key is `where`, or with values in it, each with its own key."""
        if not self._is_one(value):
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
            texts = [choice for choice in self.choices if isinstance(choice, str)]
            cure = did_you_mean(value, texts).strip() if isinstance(value, str) else ""
            yield ConfigError(f"{where} is {shown}, but it must be {self}", where=where, cure=cure or None)
        elif isinstance(value, list | tuple):
            if self.each is not None and len(value) != len(self.each):
                what = f"{where} has {len(value)} value{'s'[: len(value) != 1]}, but it must have {len(self.each)}"
                yield ConfigError(what, where=where)
                return
            for index, item in enumerate(value):
                plain = self.item if self.each is None else self.each[index]
                yield from _inner(plain, item, f"{where}.{index}")
        elif isinstance(value, Mapping) and "_target_" not in value:
            for key, item in value.items():
                yield from _inner(self.under, item, f"{where}.{key}")

    def _is_one(self, value: Any) -> bool:
        kind = kind_of(value)
        if kind is None or kind in self.kinds:
            return True
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return True
        return kind == "int" and ("float" in self.kinds or ("bool" in self.kinds and value in (0, 1)))

    def __str__(self) -> str:
        words = [word for kind, word in WORDS.items() if kind in self.kinds and kind != "null"]
        if "int" in self.kinds and "float" in self.kinds:
            words.remove(WORDS["int"])
        if self.choices:
            words.insert(0, "one of " + ", ".join(map(str, self.choices)))
        return " or ".join([*words, *(["null"] if "null" in self.kinds else [])])


class Parameter(NamedTuple):
    """One parameter. `plain` null: any value goes."""

    name: str
    kind: Any
    required: bool = False
    plain: Plain | None = None

    @property
    def by_name(self) -> bool:
        """Whether it can be given as `name: value`."""
        return self.kind in (Kind.POSITIONAL_OR_KEYWORD, Kind.KEYWORD_ONLY)

    @property
    def by_position(self) -> bool:
        """Whether it can be given in `_args_`."""
        return self.kind in (Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD)


def parameter(
    name: str, kind: Any, annotation: ast.expr | str | None, default: Any = NO_DEFAULT, *, has_default: bool = False
) -> Parameter:
    """The record of one parameter. `has_default` says that it has one whose value cannot be told."""
    several = kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)
    required = default is NO_DEFAULT and not has_default and not several
    plain = None if several else plain_of(annotation)
    if plain is not None and default is not NO_DEFAULT and not plain.admits(default):
        # `size: int = None` is an old way to say that null is fine; any other contradiction says nothing.
        plain = plain._replace(kinds=plain.kinds | {"null"}) if default is None else None
    return Parameter(name, kind, required, plain)


def live_parameters(target: Callable[..., Any]) -> tuple[Parameter, ...] | None:
    """What a live class or function takes; None where it does not tell."""
    try:
        signature = inspect.signature(target)
    except (ValueError, TypeError):
        return None
    return tuple(
        parameter(one.name, one.kind, _written(one.annotation), one.default) for one in signature.parameters.values()
    )


def kind_of(value: Any) -> str | None:
    """The kind of a plain value, or None for an object and for a node that makes one."""
    if isinstance(value, Mapping):
        return None if "_target_" in value else "mapping"
    kinds = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", list: "list", tuple: "list"}
    return kinds.get(type(value))


def plain_of(annotation: ast.expr | str | None) -> Plain | None:
    """The plain values that an annotation admits; None where anything goes."""
    if isinstance(annotation, str):
        try:
            annotation = ast.parse(annotation.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            return None
    found = None if annotation is None else _admitted(annotation)
    return found if found is not None and (found.kinds or found.choices) else None


def misfits(
    where: str,
    name: str,
    takes: Sequence[Parameter],
    positional: Sequence[Any],
    named: Mapping[str, Any],
    *,
    first: int = 0,
    late: bool = False,
) -> Iterator[ConfigError]:
    """What is wrong with a call's arguments, each mistake with the key path of its value.

    `where` is the key of the node and `name` what it calls; the `first` positional ones are not the config's, and
    `late` says that what lacks comes later.
    """
    places = [one for one in takes if one.by_position]
    known = [one.name for one in takes if one.by_name]
    supplied = {one.name for one in places[:first]}
    settable = [one for one in known if one not in supplied]
    filled = {one.name for one in places[: len(positional)]}
    by_name = {one.name: one for one in takes if one.by_name}
    if len(positional) > len(places) and not any(one.kind is Kind.VAR_POSITIONAL for one in takes):
        most = len(places) - first
        yield ConfigError(
            f"{name} takes {f'at most {most}' if most > 0 else 'no'} positional arguments, but _args_ has "
            f"{len(positional) - first}",
            where=f"{where}._args_",
        )
    open_ended = any(one.kind is Kind.VAR_KEYWORD for one in takes)
    for key, value in named.items():
        here = f"{where}.{key}"
        if key in supplied:
            yield ConfigError(f"{name} gets its '{key}' from train", where=here, cure=f"Leave {here} out.")
        elif key in filled and key in by_name:
            yield ConfigError(f"{here} is given in _args_ too", where=here, cure="Give it once.")
        elif key in by_name:
            yield from _against(by_name[key], value, here)
        elif not open_ended:
            listed = f"It takes: {', '.join(settable)}." if settable else "It takes no arguments."
            yield ConfigError(
                f"{name} takes no argument '{key}'",
                where=here,
                cure=did_you_mean(key, [*settable, *({"_target_"} - {key})]).strip() or listed,
            )
    for index, (one, value) in enumerate(zip(places, positional, strict=False)):
        if index >= first:
            yield from _against(one, value, f"{where}._args_.{index - first}")
    lacking = [repr(one.name) for one in takes if one.required and one.name not in filled and one.name not in named]
    if lacking and not late:
        several = "required arguments: " if len(lacking) > 1 else "a required argument: "
        # What is lacking stands nowhere; whoever named the target did not give it.
        yield ConfigError(f"{name}: missing {several}{', '.join(lacking)}", where=f"{where}._target_")


def _against(one: Parameter, value: Any, where: str) -> Iterator[ConfigError]:
    return iter(()) if one.plain is None else one.plain.against(value, where)


def _inner(plain: Plain | None, value: Any, where: str) -> Iterator[ConfigError]:
    """As `against`, for a value in another; one that is still to be given (???) is not judged."""
    return iter(()) if plain is None or value == MISSING else plain.against(value, where)


def _written(annotation: Any) -> str | None:
    """A live annotation as it would be written."""
    if annotation is NO_DEFAULT:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _admitted(node: ast.expr) -> Plain | None:
    """As `plain_of`, but with nothing admitted for an object that no plain value is."""
    if isinstance(node, ast.Constant):
        if node.value is None:
            return Plain(frozenset({"null"}))
        return plain_of(node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(map(_admitted, (node.left, node.right)))
    if isinstance(node, ast.Subscript):
        return _parametrised(_last_name(node.value), _elements(node.slice))
    name = _last_name(node)
    if name in _OBJECTS:
        return Plain(frozenset())
    if name in _SERIES:
        return _series(name, [])
    return Plain(frozenset({_PLAIN[name]})) if name in _PLAIN else None


def _parametrised(name: str, inner: Sequence[ast.expr]) -> Plain | None:
    if name in ("Optional", "Union"):
        none = [Plain(frozenset({"null"}))] if name == "Optional" else []
        return _union([*map(_admitted, inner), *none])
    if name in ("Annotated", "Final", "InitVar", "Required", "NotRequired"):
        return _admitted(inner[0])
    if name == "Literal":
        values = [one.value for one in inner if isinstance(one, ast.Constant)]
        if len(values) != len(inner):
            return None
        null = frozenset({"null"} if None in values else ())
        return Plain(null, tuple(value for value in values if value is not None))
    if name in _SERIES:
        return _series(name, inner)
    if _PLAIN.get(name) == "mapping":
        return Plain(frozenset({"mapping"}), under=_some(inner[1]) if len(inner) == 2 else None)
    if name in ("tuple", "Tuple"):
        if inner and isinstance(last := inner[-1], ast.Constant) and last.value is Ellipsis:
            return Plain(frozenset({"list"}), item=_some(inner[0]))
        return Plain(frozenset({"list"}), each=tuple(map(_some, inner)))
    if _PLAIN.get(name) == "list":
        return Plain(frozenset({"list"}), item=_some(inner[0]) if len(inner) == 1 else None)
    return None


def _some(node: ast.expr) -> Plain | None:
    """What is admitted in the place of an item; null where anything is."""
    found = _admitted(node)
    return found if found is not None and (found.kinds or found.choices) else None


def _series(name: str, inner: Sequence[ast.expr]) -> Plain:
    """A text is a sequence of texts, and a mapping can be iterated over."""
    item = _some(inner[0]) if inner else None
    texts = ["str"] if item is None or "str" in item.kinds else []
    mappings = [] if name.endswith("Sequence") else ["mapping"]
    return Plain(frozenset({"list", *texts, *mappings}), item=item)


def _union(parts: Iterable[Plain | None]) -> Plain | None:
    """What one of several admits. Of lists, and of mappings, only one says what is in them; else anything is."""
    several: list[Plain] = []
    for part in parts:
        if part is None:
            return None
        several.append(part)
    lists = [part for part in several if "list" in part.kinds]
    mappings = [part for part in several if "mapping" in part.kinds]
    return Plain(
        frozenset().union(*(part.kinds for part in several)),
        tuple(choice for part in several for choice in part.choices),
        item=lists[0].item if len(lists) == 1 else None,
        each=lists[0].each if len(lists) == 1 else None,
        under=mappings[0].under if len(mappings) == 1 else None,
    )


def _elements(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
