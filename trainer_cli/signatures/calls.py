"""The parameters of classes and functions, and what is wrong with the arguments of a call.

A `Parameter` is a name with the kind of its values, `find_misfits` checks a whole call, and `CheckedArguments` does so
where a constructor of this package is called from Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from trainer_cli.errors import Code, ConfigError
from trainer_cli.signatures.argument_names import unknown_argument
from trainer_cli.values import ValueKind, kind_of


class Parameter(NamedTuple):
    """One parameter of a call; any value fits where `kind` is None."""

    name: str
    how: Any
    required: bool = False
    kind: ValueKind | None = None

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
        is_bool_as_int = type(value) is int and value in (0, 1)
        if self.kind is not None and not (is_bool_as_int and "bool" in self.kind.names):
            yield from self.kind.mistakes(value, key)


def read_parameters(target: Callable[..., Any]) -> tuple[Parameter, ...] | None:
    """The parameters of a class or function; None if it has no signature.

    A decorator with `**kwargs` may itself use names that the function it wraps lacks, as the configs of transformers
    do: such a call takes any names.
    """
    function = target.__init__ if inspect.isclass(target) else target
    try:
        parameters = [*inspect.signature(target).parameters.values()]
        decorator = inspect.signature(function, follow_wrapped=False) if hasattr(function, "__wrapped__") else None
    except (ValueError, TypeError):
        return None
    outer = decorator.parameters.values() if decorator is not None else ()
    outer_kwargs = [parameter for parameter in outer if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    if outer_kwargs and not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        parameters += outer_kwargs
    return tuple(map(_read_parameter, parameters))


def _read_parameter(parameter: inspect.Parameter) -> Parameter:
    """A parameter with the kind of value that its annotation and default admit."""
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
    parameters = read_parameters(cls) or ()
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
"""Name of the argument of a schedule that takes its optimizer, if that is not the first one."""


def names_optimizer(parameters: Sequence[Parameter] | None) -> bool:
    """Whether a schedule takes its optimizer by name, because another argument is the first."""
    first = next((parameter.name for parameter in parameters or () if parameter.by_position), None)
    return first != OPTIMIZER and any(parameter.name == OPTIMIZER for parameter in parameters or ())


def find_misfits(
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
    given_by_position = {parameter.name for parameter in by_position[: len(positional)]}
    settable = [argument for argument in by_name if argument not in supplied]

    def mistake(message: str, key: str, hint: str | None = None) -> ConfigError:
        return ConfigError(message, location=key, code=Code.argument, hint=hint)

    if len(positional) > len(by_position) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        limit_count = len(by_position) - first
        limit = f"at most {limit_count}" if limit_count > 0 else "no"
        message = f"{name} takes {limit} positional arguments, but _args_ has {len(positional) - first}"
        yield mistake(message, f"{where}._args_")
    for argument, value in named.items():
        key = f"{where}.{argument}"
        if argument in supplied:
            yield mistake(f"{name} gets its '{argument}' from train", key, f"Leave {key} out.")
        elif argument in given_by_position and argument in by_name:
            yield mistake(f"{key} is given in _args_ too", key, "Give it once.")
        elif argument in by_name:
            yield from by_name[argument].mistakes(value, key)
        elif inspect.Parameter.VAR_KEYWORD not in kinds:
            yield unknown_argument(name, argument, settable, node=where)
    for index, (parameter, value) in enumerate(zip(by_position, positional, strict=False)):
        if index >= first:
            yield from parameter.mistakes(value, f"{where}._args_.{index - first}")
    required = [parameter.name for parameter in parameters if parameter.required]
    missing = [repr(argument) for argument in required if argument not in given_by_position and argument not in named]
    if missing and not partial:
        label = "required arguments: " if len(missing) > 1 else "a required argument: "
        # A missing argument has no line of its own, so the error points at that of the target.
        yield mistake(f"{name}: missing {label}{', '.join(missing)}", f"{where}._target_")
