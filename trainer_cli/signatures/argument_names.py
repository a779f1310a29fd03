"""Refuse an argument that a constructor or method does not take, and name the one that is meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from trainer_cli.errors import Code, ConfigError
from trainer_cli.patterns import did_you_mean, find_name, find_nearest
from trainer_cli.terminal import format_count

T = TypeVar("T", bound=Callable[..., Any])

_NO_NAMES: Mapping[str, str] = MappingProxyType({})


def unknown_argument(
    owner: str, name: str, names: Iterable[str], elsewhere: Mapping[str, str] = _NO_NAMES, *, node: str | None = None
) -> ConfigError:
    """The error for an argument that `owner` does not take, with the nearest name, or all if none is near.

    Args:
        names: what it takes.
        elsewhere: name of an argument of something else -> how it is given, for people. It is suggested for itself and
            for its names in other trainers, and not for a similar name.
        node: the key of the node of a config that has the argument; None: a program gives it.
    """
    names = list(names)
    # In a node it may be `_target_` that is misspelt.
    similar = names if node is None else [*names, "_target_"]
    if find_name(name, names) is None and (match := find_name(name, elsewhere)) is not None:
        question = "" if match == name else did_you_mean(name, [match])
        hint = f"{question} {elsewhere[match]}".strip()
    elif (match := find_nearest(name, similar)) is not None:
        hint = did_you_mean(name, [match]).strip()
    else:
        hint = f"It takes: {', '.join(names)}." if names else "It takes no arguments."
    location = name if node is None else f"{node}.{name}"
    return ConfigError(f"{owner} takes no argument '{name}'", location=location, code=Code.argument, hint=hint)


def checks_argument_names(label: str, elsewhere: Callable[[], Mapping[str, str]] = dict) -> Callable[[T], T]:
    """A decorator for a function, or for a class and its constructor, that raises `unknown_argument`.

    Args:
        label: its name, for messages.
        elsewhere: makes the `elsewhere` of `unknown_argument`.
    """

    def decorate(target: T) -> T:
        if isinstance(target, type):
            target.__init__ = decorate(target.__init__)  # type: ignore[misc]
            return target
        signature = inspect.signature(target)
        parameters = signature.parameters.values()
        names = [parameter.name for parameter in parameters if parameter.name != "self"]
        by_position = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)

        @functools.wraps(target)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in names:
                    raise unknown_argument(label, name, names, elsewhere())
            if len(args) > by_position:
                count = by_position - ("self" in signature.parameters)
                at_most = f"at most {format_count(count, 'argument')}" if count else "no argument"
                shown = ", ".join(f"{name}=…" for name in names[:2])
                message = f"{label} takes {at_most} without a name"
                raise ConfigError(message, code=Code.argument, hint=f"Write {label}({shown}).")
            return target(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate
