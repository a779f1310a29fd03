"""Check plain values against annotations: fields of the schema, and arguments of classes and functions.

An annotation counts as far as a YAML value can be checked by it (`int`, `str | None`, `list[float]`, `Literal["a"]`,
an enumeration); any other name in it means that any value is accepted. The story: a `Kind` is what an annotation
accepts, `kind_of` reads it, a `Parameter` is a name with its kind, and `misfits` checks a whole call.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from enum import EnumMeta
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self

import yaml

from trainer_cli.errors import Code, ConfigError
from trainer_cli.patterns import did_you_mean
from trainer_cli.signatures.argument_names import unknown_argument
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
_TRUTH = dict.fromkeys(("yes", "on", "y", "1"), "true") | dict.fromkeys(("no", "off", "n", "0"), "false")
_LONGEST = 80


class Kind(NamedTuple):
    """The plain values that an annotation admits: `names` of kinds (see WORDS, and `null`) and `choices`."""

    names: frozenset[str]
    choices: tuple[Any, ...] = ()
    item: Kind | None = None
    """What the items of a list may be; None: anything."""
    items: tuple[Kind | None, ...] | None = None
    """What each item of a list of exactly this length may be; None: any length."""
    under: Kind | None = None
    """What the values of a mapping may be; None: anything."""

    def mistakes(self, value: Any, key: str) -> Iterator[ConfigError]:
        """What is wrong with the value of `key`, or with values in it, each with its own key."""
        if not self._accepts(value):
            message = f"{key} is {shown(value)}, but it must be {self}"
            yield ConfigError(message, location=key, code=Code.wrong_type, hint=self._hint(value) or None)
        elif isinstance(value, list | tuple):
            if self.items is not None and len(value) != len(self.items):
                message = f"{key} has {format_count(len(value), 'value')}, but it must have {len(self.items)}"
                yield ConfigError(message, location=key, code=Code.wrong_type)
                return
            if self.items is None and self.item is not None and self.item.has_types(value):
                return
            for index, item in enumerate(value):
                yield from _inner(self.item if self.items is None else self.items[index], item, f"{key}.{index}")
        # The arguments of a node are checked against what its target takes, not against this annotation.
        elif isinstance(value, Mapping) and "_target_" not in value:
            for name, item in value.items():
                yield from _inner(self.under, item, f"{key}.{name}")

    def admits(self, value: Any) -> bool:
        """Whether the value, and every value in it, is one of these. A value that is not plain is admitted."""
        return next(self.mistakes(value, ""), None) is None

    def has_types(self, values: Iterable[Any]) -> bool:
        """Whether the values are all scalars of these kinds. It takes a look at their types alone: there may be
        thousands."""
        return all(_SCALARS.get(scalar) in self.names for scalar in set(map(type, values)))

    def _accepts(self, value: Any) -> bool:
        name = name_of(value)
        if name is None or name in self.names or (name == "int" and "float" in self.names):
            return True
        # Types too: in Python 1 == True == 1.0.
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def _hint(self, value: Any) -> str:
        texts = [choice for choice in self.choices if isinstance(choice, str)]
        if isinstance(value, str) and (suggestion := did_you_mean(value, texts).strip()):
            return suggestion
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


def shown(value: Any) -> str:
    """A value in a message: a string in quotes, all else as YAML writes it, at most 80 characters."""
    try:
        text = repr(value) if isinstance(value, str) else in_yaml(value)
    except yaml.YAMLError:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def in_yaml(value: Any) -> str:
    """A value in YAML's one-line style."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def converted(annotation: Any, value: Any, key: str) -> Any:
    """The value of a field, set by Python code: the names of choices as members, mappings as sections, all else as
    the plain values that a config holds.

    Raises:
        ConfigError: it is not of the annotated type.
    """
    is_section = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
    if (is_section or isinstance(annotation, EnumMeta)) and isinstance(value, annotation):
        return value
    value = _plain(value)
    if is_section:
        return _make_section(annotation, value, key)
    kind = kind_of(annotation)
    if kind is None:
        return value
    if name_of(value) is None:
        raise ConfigError(f"{key} is {shown(value)}, but it must be {kind}", location=key, code=Code.wrong_type)
    for mistake in kind.mistakes(value, key):
        raise mistake
    if isinstance(annotation, EnumMeta):
        return annotation[value]
    # A field of floats holds floats alone, so that equal values are written alike.
    return float(value) if type(value) is int and "float" in kind.names and "int" not in kind.names else value


def _make_section(section: type, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        message = f"{key} is {shown(value)}, but it must be {SECTION}"
        raise ConfigError(message, location=key, code=Code.wrong_type)
    keys = [field.name for field in dataclasses.fields(section)]
    for name in value:
        if name not in keys:
            hint = did_you_mean(str(name), keys).strip() or f"Known here: {', '.join(keys)}."
            message = f"there is no key '{key}.{name}'"
            raise ConfigError(message, location=f"{key}.{name}", code=Code.unknown_key, hint=hint)
    return section(**value)


def _plain(value: Any) -> Any:
    """A value without the types of other libraries: numbers and arrays of numpy, ranges, subclasses of `int`."""
    # numpy's and torch's way to plain numbers, without an import of them.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if type(value) in (bool, int, float, str):
        return value
    for plain_type in (int, float, str):
        if isinstance(value, plain_type):
            return plain_type(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, Sequence | Set) else value


def kind_of(annotation: Any) -> Kind | None:
    """The plain values that an annotation (an object, or its text) admits; None if it admits any value."""
    if annotation is None or annotation is inspect.Parameter.empty:
        return None
    if isinstance(annotation, EnumMeta):
        return Kind(frozenset(), tuple(annotation.__members__))
    try:
        # Read as text, not evaluated: the names in an annotation may be importable only for a type checker.
        return _parse_kind(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))
    except (SyntaxError, ValueError):
        return None


# Cached: each composed config asks for the same annotations.
@cache
def _parse_kind(text: str) -> Kind | None:
    return _kind_or_any(ast.parse(text.strip(), mode="eval").body)


def _inner(kind: Kind | None, value: Any, key: str) -> Iterator[ConfigError]:
    """`Kind.mistakes` of a value inside a list or mapping; none for a value that must still be given."""
    return iter(()) if kind is None or value == MISSING else kind.mistakes(value, key)


def _kind_or_any(node: ast.expr) -> Kind | None:
    """What an annotation admits; None (any value) also for one that admits objects alone."""
    kind = _admitted(node)
    return kind if kind is not None and (kind.names or kind.choices) else None


def _admitted(node: ast.expr) -> Kind | None:
    """What an annotation admits; an empty kind for objects alone, None for any value."""
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
    # `torch.Tensor` and `Tensor` mean the same: the last name decides.
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
        values = [choice.value for choice in inner if isinstance(choice, ast.Constant)]
        names = frozenset({"null"} if None in values else ())
        return Kind(names, tuple(value for value in values if value is not None)) if len(values) == len(inner) else None
    if name in _SERIES:
        return _series(name, _kind_or_any(inner[0]))
    if _NAMES.get(name) == "mapping":
        return Kind(frozenset({"mapping"}), under=_kind_or_any(inner[1]) if len(inner) == 2 else None)
    if _NAMES.get(name) != "list":
        return None
    if name in ("tuple", "Tuple") and not (isinstance(last := inner[-1], ast.Constant) and last.value is Ellipsis):
        return Kind(frozenset({"list"}), items=tuple(map(_kind_or_any, inner)))
    return Kind(frozenset({"list"}), item=_kind_or_any(inner[0]))


def _series(name: str, item: Kind | None) -> Kind:
    """A string is a sequence of strings, and a mapping can be iterated over."""
    texts = ["str"] if item is None or "str" in item.names else []
    mappings = [] if name.endswith("Sequence") else ["mapping"]
    return Kind(frozenset({"list", *texts, *mappings}), item=item)


def _union(members: Iterable[Kind | None]) -> Kind | None:
    """What a union admits. If two members are lists, or mappings, any value may be in them."""
    kinds: list[Kind] = []
    for member in members:
        if member is None:
            return None
        kinds.append(member)
    lists = [kind for kind in kinds if "list" in kind.names]
    mappings = [kind for kind in kinds if "mapping" in kind.names]
    return Kind(
        frozenset().union(*(kind.names for kind in kinds)),
        tuple(choice for kind in kinds for choice in kind.choices),
        item=lists[0].item if len(lists) == 1 else None,
        items=lists[0].items if len(lists) == 1 else None,
        under=mappings[0].under if len(mappings) == 1 else None,
    )


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


class Parameter(NamedTuple):
    """One parameter of a call; any value fits where `kind` is None."""

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
        parameters = [*inspect.signature(target).parameters.values()]
        outer = (
            inspect.signature(called, follow_wrapped=False).parameters.values()
            if hasattr(called, "__wrapped__")
            else ()
        )
    except (ValueError, TypeError):
        return None
    any_names = [parameter for parameter in outer if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    if any_names and not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        parameters += any_names
    return tuple(map(_read_parameter, parameters))


def _read_parameter(parameter: inspect.Parameter) -> Parameter:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return Parameter(parameter.name, parameter.kind)
    kind, has_default = kind_of(parameter.annotation), parameter.default is not inspect.Parameter.empty
    if kind is not None and has_default and not kind.admits(parameter.default):
        # `size: int = None` is an old way to write `int | None`; any other contradiction makes the annotation useless.
        kind = kind._replace(names=kind.names | {"null"}) if parameter.default is None else None
    return Parameter(parameter.name, parameter.kind, not has_default, kind)


class ConstructorSignature:
    """Compute the attribute `__signature__` of a class from its constructor; `__new__` is ignored.

    It is computed for each class, because a subclass inherits it and may have another constructor.
    """

    def __get__(self, instance: object | None, owner: type) -> inspect.Signature:
        # An instance that can be called takes other arguments. A class without a constructor may have a `__new__`.
        if instance is not None or owner.__init__ is object.__init__:  # type: ignore[misc]
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class CheckedArguments:
    """A base class whose constructors of this package check their arguments by their annotations, as a config does."""

    # Without it sphinx shows what `__new__` takes, which is anything.
    __signature__ = ConstructorSignature()

    writes: ClassVar[tuple[str, ...]] = ()
    """Arguments that name a file or folder to write, relative to the run directory, kept under the same names. A config
    that was found on disk may not set them to a path outside of that."""
    _in_schema = False
    """Whether a section of the schema has the arguments; its rules then say more."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.__init__ is object.__init__:
            if args or kwargs:
                raise TypeError(f"{cls.__name__}() takes no arguments")  # As Python, where there is no __new__.
        # Constructors of users' subclasses are not checked: their annotations may be wrong.
        elif not cls._in_schema and cls.__init__.__module__.startswith("trainer_cli."):
            _check_arguments(cls, args, kwargs)
        return super().__new__(cls)


def _check_arguments(cls: type, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise the first mistake in arguments; the call itself refuses too few or too many."""
    parameters = call_parameters(cls) or ()
    by_position = [parameter for parameter in parameters if parameter.by_position]
    by_name = {parameter.name: parameter for parameter in parameters if parameter.by_name}
    values = [*zip(by_position, positional, strict=False)]
    takes_any_name = any(parameter.how is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    for name in named:
        if name not in by_name and not takes_any_name:
            raise unknown_argument(cls.__name__, name, by_name)
    values += [(by_name[name], value) for name, value in named.items() if name in by_name]
    for parameter, value in values:
        for mistake in parameter.mistakes(value, parameter.name):
            message = f"{cls.__name__}: {mistake.message}"
            raise ConfigError(message, location=mistake.location, code=mistake.code, hint=mistake.hint)


OPTIMIZER = "optimizer"
"""Name of the argument of a schedule that is its optimizer, if it is not the first."""


def names_optimizer(parameters: Sequence[Parameter] | None) -> bool:
    """Whether a schedule takes its optimizer by name, because another argument is the first."""
    first = next((parameter.name for parameter in parameters or () if parameter.by_position), None)
    return first != OPTIMIZER and any(parameter.name == OPTIMIZER for parameter in parameters or ())


def misfits(
    where: str,
    name: str,
    parameters: Sequence[Parameter],
    positional: Sequence[Any],
    named: Mapping[str, Any],
    *,
    first: int = 0,
    partial: bool = False,
) -> Iterator[ConfigError]:
    """What is wrong with a call's arguments, each mistake with the key path of its value.

    Args:
        where: the key of the node.
        name: the class or function that it calls.
        first: number of leading positional arguments that the program itself passes.
        partial: required arguments may be passed later.
    """
    kinds = {parameter.how for parameter in parameters}
    by_position = [parameter for parameter in parameters if parameter.by_position]
    by_name = {parameter.name: parameter for parameter in parameters if parameter.by_name}
    supplied = {parameter.name for parameter in by_position[:first]}
    filled = {parameter.name for parameter in by_position[: len(positional)]}
    settable = [argument for argument in by_name if argument not in supplied]

    def mistake(message: str, key: str, hint: str | None = None) -> ConfigError:
        return ConfigError(message, location=key, code=Code.argument, hint=hint)

    if len(positional) > len(by_position) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        most = len(by_position) - first
        limit = f"at most {most}" if most > 0 else "no"
        message = f"{name} takes {limit} positional arguments, but _args_ has {len(positional) - first}"
        yield mistake(message, f"{where}._args_")
    for argument, value in named.items():
        key = f"{where}.{argument}"
        if argument in supplied:
            yield mistake(f"{name} gets its '{argument}' from train", key, f"Leave {key} out.")
        elif argument in filled and argument in by_name:
            yield mistake(f"{key} is given in _args_ too", key, "Give it once.")
        elif argument in by_name:
            yield from by_name[argument].mistakes(value, key)
        elif inspect.Parameter.VAR_KEYWORD not in kinds:
            all_arguments = f"It takes: {', '.join(settable)}." if settable else "It takes no arguments."
            suggestion = did_you_mean(argument, [*settable, *({"_target_"} - {argument})]).strip()
            yield mistake(f"{name} takes no argument '{argument}'", key, suggestion or all_arguments)
    for index, (parameter, value) in enumerate(zip(by_position, positional, strict=False)):
        if index >= first:
            yield from parameter.mistakes(value, f"{where}._args_.{index - first}")
    required = [parameter.name for parameter in parameters if parameter.required]
    missing = [repr(argument) for argument in required if argument not in filled and argument not in named]
    if missing and not partial:
        label = "required arguments: " if len(missing) > 1 else "a required argument: "
        # A missing argument has no line of its own, so the error points at that of the target.
        yield mistake(f"{name}: missing {label}{', '.join(missing)}", f"{where}._target_")
