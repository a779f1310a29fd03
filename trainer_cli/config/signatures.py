"""What a class or function takes, and whether the given arguments fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from trainer_cli.config.kinds import Kind, kind_of
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import Code, ConfigError


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
