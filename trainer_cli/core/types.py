"""The plain values that an annotation admits, for fields of the schema and for arguments of components.

An annotation counts as far as a YAML value can be checked by it (`int`, `str | None`, `list[float]`, `Literal["a"]`,
an enumeration); any other name in it means that anything goes.

What a class or function takes, and whether the given arguments fit.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from enum import EnumMeta
from functools import cache
from typing import Any, NamedTuple, Self

import yaml

from trainer_cli.core.patterns import did_you_mean
from trainer_cli.errors import Code, ConfigError

MISSING = "???"
"""A value that must still be given."""
IN_QUOTES = "Put it in quotes if a text is meant."
WORDS = {
    "bool": ("true or false", "values that are true or false"),
    "int": ("a whole number", "whole numbers"),
    "float": ("a number", "numbers"),
    "str": ("a text", "texts"),
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
_SERIES = ("Sequence", "MutableSequence", "Iterable", "Collection")
# No YAML value is one of these, so `float | Tensor` still means a number.
_OBJECTS = ("Tensor",)
_TRUTH = dict.fromkeys(("yes", "on", "y", "1"), "true") | dict.fromkeys(("no", "off", "n", "0"), "false")
_LONGEST = 80


class Kind(NamedTuple):
    """The plain values that an annotation admits: `names` of kinds (see WORDS, and `null`) and `choices`."""

    names: frozenset[str]
    choices: tuple[Any, ...] = ()
    item: Kind | None = None
    """What the items of a list may be; None: anything."""
    each: tuple[Kind | None, ...] | None = None
    """What each item of a list of exactly this length may be; None: any length."""
    under: Kind | None = None
    """What the values of a mapping may be; None: anything."""

    def mistakes(self, value: Any, key: str) -> Iterator[ConfigError]:
        """What is wrong with the value of `key`, or with values in it, each with its own key."""
        if not self._is_one(value):
            what = f"{key} is {shown(value)}, but it must be {self}"
            yield ConfigError(what, location=key, code=Code.wrong_type, hint=self._hint(value) or None)
        elif isinstance(value, list | tuple):
            if self.each is not None and len(value) != len(self.each):
                what = f"{key} has {len(value)} value{'s'[: len(value) != 1]}, but it must have {len(self.each)}"
                yield ConfigError(what, location=key, code=Code.wrong_type)
                return
            for index, item in enumerate(value):
                yield from _inner(self.item if self.each is None else self.each[index], item, f"{key}.{index}")
        elif isinstance(value, Mapping) and "_target_" not in value:
            for name, item in value.items():
                yield from _inner(self.under, item, f"{key}.{name}")

    def admits(self, value: Any) -> bool:
        """Whether the value, and all that is in it, is one of these. A value that is not plain is admitted."""
        return next(self.mistakes(value, ""), None) is None

    def _is_one(self, value: Any) -> bool:
        name = name_of(value)
        if name is None or name in self.names or (name == "int" and "float" in self.names):
            return True
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def _hint(self, value: Any) -> str:
        texts = [choice for choice in self.choices if isinstance(choice, str)]
        if isinstance(value, str) and (meant := did_you_mean(value, texts).strip()):
            return meant
        if "bool" in self.names and str(value).lower() in _TRUTH:
            return f"Write {_TRUTH[str(value).lower()]}."
        if "int" in self.names and isinstance(value, float) and value.is_integer():
            return f"Write {int(value)}."
        if "str" in self.names and isinstance(value, bool | float):
            return IN_QUOTES
        return f"Write [{value}]." if "list" in self.names and isinstance(value, str | int) else ""

    def __str__(self) -> str:
        words = [word for name, (word, _) in WORDS.items() if name in self.names]
        if "int" in self.names and "float" in self.names:
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
    names = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", list: "list", tuple: "list"}
    return names.get(type(value))


def shown(value: Any) -> str:
    """A value in a message: a text in quotes, all else as YAML writes it, at most 80 characters."""
    try:
        text = repr(value) if isinstance(value, str) else in_yaml(value)
    except yaml.YAMLError:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def in_yaml(value: Any) -> str:
    """A value in YAML's one-line style."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def converted(annotation: Any, value: Any, key: str) -> Any:
    """The value of a field, given by Python code: the names of choices as members, mappings as sections, all else as
    the plain values that a config holds.

    Raises:
        ConfigError: it is not of the annotated type.
    """
    is_section = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
    if (is_section or isinstance(annotation, EnumMeta)) and isinstance(value, annotation):
        return value
    value = _plain(value)
    if is_section:
        return _section(annotation, value, key)
    kind = kind_of(annotation)
    if kind is None:
        return value
    if name_of(value) is None:
        raise ConfigError(f"{key} is {shown(value)}, but it must be {kind}", location=key, code=Code.wrong_type)
    for mistake in kind.mistakes(value, key):
        raise mistake
    if isinstance(annotation, EnumMeta):
        return annotation[value]
    return float(value) if type(value) is int and "float" in kind.names and "int" not in kind.names else value


def _section(section: type, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        what = f"{key} is {shown(value)}, but it must be {SECTION}"
        raise ConfigError(what, location=key, code=Code.wrong_type)
    known = [field.name for field in dataclasses.fields(section)]
    for name in value:
        if name not in known:
            hint = did_you_mean(str(name), known).strip() or f"Known here: {', '.join(known)}."
            what = f"there is no key '{key}.{name}'"
            raise ConfigError(what, location=f"{key}.{name}", code=Code.unknown_key, hint=hint)
    return section(**value)


def _plain(value: Any) -> Any:
    """A value without the types of other libraries: numbers and arrays of numpy, ranges, subclasses of `int`."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if type(value) in (bool, int, float, str):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, Sequence | Set) else value


def kind_of(annotation: Any) -> Kind | None:
    """The plain values that an annotation (live, or as written) admits; None if anything goes."""
    if annotation is None or annotation is inspect.Parameter.empty:
        return None
    if isinstance(annotation, EnumMeta):
        return Kind(frozenset(), tuple(annotation.__members__))
    try:
        return _kind_written(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))
    except (SyntaxError, ValueError):
        return None


@cache
def _kind_written(text: str) -> Kind | None:
    return _some(ast.parse(text.strip(), mode="eval").body)


def _inner(kind: Kind | None, value: Any, key: str) -> Iterator[ConfigError]:
    """As `Kind.mistakes`, for a value in another; one that is still to be given is left out."""
    return iter(()) if kind is None or value == MISSING else kind.mistakes(value, key)


def _some(node: ast.expr) -> Kind | None:
    """What is admitted; None if anything is."""
    found = _admitted(node)
    return found if found is not None and (found.names or found.choices) else None


def _admitted(node: ast.expr) -> Kind | None:
    """As `_some`, but with nothing admitted for an object that no plain value is."""
    if isinstance(node, ast.Constant):
        if node.value is None:
            return Kind(frozenset({"null"}))
        return kind_of(node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(map(_admitted, (node.left, node.right)))
    if isinstance(node, ast.Subscript):
        inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _parametrised(_last_name(node.value), inner)
    name = _last_name(node)
    if name in _OBJECTS:
        return Kind(frozenset())
    if name in _SERIES:
        return _series(name, None)
    return Kind(frozenset({_NAMES[name]})) if name in _NAMES else None


def _parametrised(name: str, inner: Sequence[ast.expr]) -> Kind | None:
    if name in ("Optional", "Union"):
        null = [Kind(frozenset({"null"}))] if name == "Optional" else []
        return _union([*map(_admitted, inner), *null])
    if name in ("Annotated", "Final", "InitVar", "Required", "NotRequired"):
        return _admitted(inner[0])
    if name == "Literal":
        values = [one.value for one in inner if isinstance(one, ast.Constant)]
        null_too = frozenset({"null"} if None in values else ())
        return Kind(null_too, tuple(one for one in values if one is not None)) if len(values) == len(inner) else None
    if name in _SERIES:
        return _series(name, _some(inner[0]))
    if _NAMES.get(name) == "mapping":
        return Kind(frozenset({"mapping"}), under=_some(inner[1]) if len(inner) == 2 else None)
    if _NAMES.get(name) != "list":
        return None
    if name in ("tuple", "Tuple") and not (isinstance(last := inner[-1], ast.Constant) and last.value is Ellipsis):
        return Kind(frozenset({"list"}), each=tuple(map(_some, inner)))
    return Kind(frozenset({"list"}), item=_some(inner[0]))


def _series(name: str, item: Kind | None) -> Kind:
    """A text is a sequence of texts, and a mapping can be iterated over."""
    texts = ["str"] if item is None or "str" in item.names else []
    mappings = [] if name.endswith("Sequence") else ["mapping"]
    return Kind(frozenset({"list", *texts, *mappings}), item=item)


def _union(parts: Iterable[Kind | None]) -> Kind | None:
    """What one of several admits. If two of them are lists, or mappings, anything may be in them."""
    several = list(parts)
    if any(part is None for part in several):
        return None
    known = [part for part in several if part is not None]
    lists = [part for part in known if "list" in part.names]
    mappings = [part for part in known if "mapping" in part.names]
    return Kind(
        frozenset().union(*(part.names for part in known)),
        tuple(choice for part in known for choice in part.choices),
        item=lists[0].item if len(lists) == 1 else None,
        each=lists[0].each if len(lists) == 1 else None,
        under=mappings[0].under if len(mappings) == 1 else None,
    )


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


class Parameter(NamedTuple):
    """One parameter; any value fits where `kind` is None."""

    name: str
    how: Any
    required: bool = False
    kind: Kind | None = None

    @property
    def by_name(self) -> bool:
        """Whether it can be given as `name: value`."""
        return self.how in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

    @property
    def by_position(self) -> bool:
        """Whether it can be given in `_args_`."""
        return self.how in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def mistakes(self, value: Any, key: str) -> Iterator[ConfigError]:
        """What is wrong with a value for it. 0 and 1 are accepted as false and true, as Python does."""
        if self.kind is not None and not ("bool" in self.kind.names and type(value) is int and value in (0, 1)):
            yield from self.kind.mistakes(value, key)


def call_parameters(target: Callable[..., Any]) -> tuple[Parameter, ...] | None:
    """What a class or function takes; None if it has no signature.

    A decorator that takes any names may itself use those which the function behind it lacks, as the configs of
    transformers do: such a call takes any names.
    """
    called = target.__init__ if inspect.isclass(target) else target
    try:
        takes = [*inspect.signature(target).parameters.values()]
        outer = (
            inspect.signature(called, follow_wrapped=False).parameters.values()
            if hasattr(called, "__wrapped__")
            else ()
        )
    except (ValueError, TypeError):
        return None
    any_names = [one for one in outer if one.kind is inspect.Parameter.VAR_KEYWORD]
    if any_names and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes):
        takes += any_names
    return tuple(map(_parameter, takes))


def _parameter(one: inspect.Parameter) -> Parameter:
    if one.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return Parameter(one.name, one.kind)
    kind, has_default = kind_of(one.annotation), one.default is not inspect.Parameter.empty
    if kind is not None and has_default and not kind.admits(one.default):
        # `size: int = None` is an old way to write `int | None`; any other contradiction makes the annotation useless.
        kind = kind._replace(names=kind.names | {"null"}) if one.default is None else None
    return Parameter(one.name, one.kind, not has_default, kind)


class CheckedArguments:
    """A base class whose constructors of this package check their arguments by their annotations, as a config does."""

    _in_schema = False
    """Whether a section of the schema has the arguments; its rules then say more."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.__init__ is object.__init__:
            if args or kwargs:
                raise TypeError(f"{cls.__name__}() takes no arguments")  # As Python, where there is no __new__.
        elif not cls._in_schema and cls.__init__.__module__.startswith("trainer_cli."):
            _check_arguments(cls, args, kwargs)
        return super().__new__(cls)


def _check_arguments(cls: type, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise the first mistake in arguments that have a parameter; the call itself refuses the others."""
    takes = call_parameters(cls) or ()
    places = [parameter for parameter in takes if parameter.by_position]
    by_name = {parameter.name: parameter for parameter in takes if parameter.by_name}
    values = [*zip(places, positional, strict=False)]
    values += [(by_name[name], value) for name, value in named.items() if name in by_name]
    for parameter, value in values:
        for mistake in parameter.mistakes(value, parameter.name):
            what = f"{cls.__name__}: {mistake.message}"
            raise ConfigError(what, location=mistake.location, code=mistake.code, hint=mistake.hint)


def misfits(
    where: str,
    name: str,
    takes: Sequence[Parameter],
    positional: Sequence[Any],
    named: Mapping[str, Any],
    *,
    first: int = 0,
    partial: bool = False,
) -> Iterator[ConfigError]:
    """What is wrong with a call's arguments, each mistake with the key path of its value.

    `where` is the key of the node and `name` what it calls; the `first` positional arguments come from train, and
    with `partial` required arguments may be given later.
    """
    places = [one for one in takes if one.by_position]
    by_name = {one.name: one for one in takes if one.by_name}
    supplied = {one.name for one in places[:first]}
    filled = {one.name for one in places[: len(positional)]}
    settable = [one for one in by_name if one not in supplied]

    def wrong(what: str, key: str, hint: str | None = None) -> ConfigError:
        return ConfigError(what, location=key, code=Code.argument, hint=hint)

    if len(positional) > len(places) and not any(one.how is inspect.Parameter.VAR_POSITIONAL for one in takes):
        most = len(places) - first
        few = f"at most {most}" if most > 0 else "no"
        what = f"{name} takes {few} positional arguments, but _args_ has {len(positional) - first}"
        yield wrong(what, f"{where}._args_")
    open_ended = any(one.how is inspect.Parameter.VAR_KEYWORD for one in takes)
    for key, value in named.items():
        here = f"{where}.{key}"
        if key in supplied:
            yield wrong(f"{name} gets its '{key}' from train", here, f"Leave {here} out.")
        elif key in filled and key in by_name:
            yield wrong(f"{here} is given in _args_ too", here, "Give it once.")
        elif key in by_name:
            yield from by_name[key].mistakes(value, here)
        elif not open_ended:
            listed = f"It takes: {', '.join(settable)}." if settable else "It takes no arguments."
            meant = did_you_mean(key, [*settable, *({"_target_"} - {key})]).strip()
            yield wrong(f"{name} takes no argument '{key}'", here, meant or listed)
    for index, (one, value) in enumerate(zip(places, positional, strict=False)):
        if index >= first:
            yield from one.mistakes(value, f"{where}._args_.{index - first}")
    lacking = [repr(one.name) for one in takes if one.required and one.name not in filled and one.name not in named]
    if lacking and not partial:
        several = "required arguments: " if len(lacking) > 1 else "a required argument: "
        # What is lacking is written nowhere; the line to mend is that of the target.
        yield wrong(f"{name}: missing {several}{', '.join(lacking)}", f"{where}._target_")
