"""Constructors that take a section of the schema: whole, as `config`, or by the names of its fields."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from trainer_cli.errors import Code, ConfigError
from trainer_cli.signatures.argument_names import unknown_argument
from trainer_cli.signatures.calls import ConstructorSignature
from trainer_cli.values import show_value

S = TypeVar("S")
C = TypeVar("C", bound=type)


def build_section(section: type[S], owner: str, config: S | None, fields: Mapping[str, Any]) -> S:
    """The section that a constructor was given whole, as `config`, or by the names of its fields.

    Choices may be strings, sections mappings, and None stands for the default of a section, mapping or list.

    Args:
        owner: the class whose constructor it is.

    Raises:
        ConfigError: both were given; or no field has such a name; or a value is of another type, or not allowed.
    """
    if config is None:
        declared = {field.name: field for field in dataclasses.fields(cast("Any", section))}
        arguments = {}
        for name, value in fields.items():
            if name not in declared:
                raise unknown_argument(owner, name, declared)
            has_factory = declared[name].default_factory is not dataclasses.MISSING
            if value is not None or not has_factory:
                arguments[name] = value
        return section(**arguments)
    if not isinstance(config, section):
        message = f"{owner}: config is {show_value(config)}, but it must be a {section.__name__}"
        raise ConfigError(message, location="config", code=Code.wrong_type)
    if fields:
        raise ConfigError(
            f"{owner} is given config and also {', '.join(fields)}",
            location=next(iter(fields)),
            code=Code.argument,
            hint=f"Give config alone, as {section.__name__}(...) with these fields.",
        )
    return config


def takes_fields_of(section: type) -> Callable[[C], C]:
    """A decorator for a class whose constructor passes its `**fields` to `build_section`.

    It puts the fields of the section in the place of `**fields` in the signature, which help() and the site show, and
    by which the arguments of a config's node are checked.
    """

    def declare(owner: C) -> C:
        constructor: Any = owner.__init__  # type: ignore[misc]
        signature = inspect.signature(constructor)
        parameters = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        for field in dataclasses.fields(section):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            parameter = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type
            )
            parameters.setdefault(field.name, parameter)
        constructor.__signature__ = signature.replace(parameters=list(parameters.values()))
        # The class gets one too: sphinx fails where the signature of a function differs from its source.
        owner.__signature__ = ConstructorSignature()  # type: ignore[attr-defined]
        return owner

    return declare
