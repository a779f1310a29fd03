"""Check every node with `_target_`: first what needs no import, then the target's signature.

Composing checks keys, values of our own and the path of each target, so that torch stays unloaded. Before anything is
built, they are checked again with `imports`: the targets are imported, and their arguments checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from itertools import chain
from typing import Any

from trainer_cli.auto_values import AUTO
from trainer_cli.components.auto_checks import check_auto
from trainer_cli.components.nodes import (
    FROM_DATA,
    SAVER,
    SCHEDULER_KEYS,
    SECTIONS,
    SPECIAL,
    check_keys,
    check_kinds,
    is_node,
    list_optimizers,
    list_schedules,
)
from trainer_cli.components.targets import Trust, check_name, check_path, import_target, to_public_name
from trainer_cli.errors import Code, ConfigError
from trainer_cli.keys import DATA_KEYS, SEVERAL, check_data_counts
from trainer_cli.patterns import find_nearest
from trainer_cli.schema import CheckpointConfig, SchedulerInterval, TrainConfig
from trainer_cli.signatures import OPTIMIZER, Parameter, find_misfits, names_optimizer, read_parameters
from trainer_cli.steps import Duration
from trainer_cli.values import MISSING

_NAMED = ("optimizer", "scheduler")
"""Sections that hold one node, or several by name."""
_TEXTS = str | list[str]
_OPTIMIZER_KINDS = {"params": (_TEXTS, "It takes a glob of parameter names, or a list of them.")}
_SCHEDULER_KINDS = {
    "interval": (SchedulerInterval, ""),
    "metric": (str, "It takes the name of a metric, such as val/loss."),
    "groups": (_TEXTS, "It takes the tag of parameter groups, or a list of tags."),
}
_SAVER_KEYS = (*(field.name for field in fields(CheckpointConfig)), "folder", "identity")
"""Arguments that a CheckpointerCallback gets besides those of its node."""

_SOMETHING = object()
"""Stands for an argument that is known only when the object is built."""


def check_components(
    config: TrainConfig, trust: Trust, sections: Collection[str] = SECTIONS, *, imports: bool = False
) -> Iterator[ConfigError]:
    """Check the components of a config, interpolations resolved; each mistake has the key where it is.

    With `imports` the targets are imported, each must be a class or function, and must accept its arguments. The
    project's root must be on `sys.path` then.
    """
    checker = _Checker(trust, imports=imports)
    errors_of_sections = [checker.section(name, getattr(config, name)) for name in sections]
    if "optimizer" in sections:
        errors_of_sections += [checker.groups(config.optimizer, config.param_groups), check_auto(config)]
    yield from chain.from_iterable(errors_of_sections)


def _no_target_error(node: Mapping[Any, Any], where: str) -> ConfigError:
    """The error for a component whose node has no target."""
    name = where.rpartition(".")[2]
    if is_node(node.get(name)):
        hint = f"Leave out '{name}:' and indent the rest less: a group's file is merged into {where} already."
    elif (misspelled := find_nearest("_target_", map(str, node))) is not None:
        hint = f"Write '_target_' for '{misspelled}'."
    else:
        group = where.partition(".")[0]
        choice = f"[{name}]" if group in SEVERAL else "NAME"
        hint = (
            f"Choose one with {group}=NAME, in a file by '- override /{group}: {choice}' in its defaults list, or say "
            "what to make: _target_: package.module.Class."
        )
    first_key = next(iter(node), None)  # The node has no line of its own; its first key does.
    location = where if first_key is None else f"{where}.{first_key}"
    return ConfigError(f"{where} has no _target_", location=location, code=Code.target, hint=hint)


def _in_steps(value: Any) -> bool:
    """Whether a schedule's argument is a duration such as `1ep`, which is turned into steps."""
    if not isinstance(value, str):
        return False
    try:
        Duration.parse(value)
    except ValueError:
        return False
    return True


class _Checker:
    """Check a config's components; the errors have a location and no source yet.

    Without `imports`, which take seconds for torch, only the path of a target is checked.
    """

    def __init__(self, trust: Trust, *, imports: bool) -> None:
        self.trust = trust
        self.imports = imports

    def section(self, name: str, value: Any) -> Iterator[ConfigError]:
        """Check one section."""
        match name:
            case "model":
                yield from self._component(name, value, elsewhere=(MISSING, FROM_DATA))
            case "data":
                yield from self._data(value)
            case "optimizer":
                for where, node in list_optimizers(value).items():
                    yield from self._optimizer(where, node)
            case "step" | "sparsity":
                yield from self._component(name, value)
            case "scheduler":
                for where, node in list_schedules(value):
                    yield from self._schedule(where, node)
            case "callbacks" | "loggers":
                for key, node in value.items():
                    named = _SAVER_KEYS if (name, key) == ("callbacks", SAVER) else ()
                    yield from self._component(f"{name}.{key}", node, named_elsewhere=named)

    def groups(self, optimizer: Any, groups: Mapping[str, Any]) -> Iterator[ConfigError]:
        """Check the settings of parameter groups: torch's optimizers ignore unknown ones without a warning."""
        nodes = list(list_optimizers(optimizer).values())
        # With several optimizers it is not known here which one a group belongs to.
        single_node = nodes[0] if len(nodes) == 1 and is_node(nodes[0]) else None
        target = self._target(single_node["_target_"], "optimizer")[0] if single_node else None
        parameters = None if target is None else read_parameters(target)
        if target is None or parameters is None or not target.__module__.startswith("torch.optim"):
            return  # Other optimizers may accept settings that their constructor does not; checked when they are built.
        for pattern, settings in groups.items():
            if isinstance(settings, Mapping):
                arguments = {str(key): value for key, value in settings.items() if key not in ("tag", "lr_scale")}
                where = f"param_groups.{pattern}"
                yield from find_misfits(
                    where, _name(target), parameters, [_SOMETHING], arguments, first=1, partial=True
                )

    def _optimizer(self, where: str, node: Any) -> Iterator[ConfigError]:
        if where == "optimizer" or not isinstance(node, Mapping):
            if is_node(node) and node.get("lr") == AUTO:
                node = {**node, "lr": _SOMETHING}
            yield from self._component(where, node, positional_count=1)
            return
        name = where.partition(".")[2]
        if not name.isidentifier():
            yield ConfigError(
                f"optimizer has the name {name!r}, but a name has only letters, digits and _", location=where
            )
        yield from check_kinds(node, where, _OPTIMIZER_KINDS)
        yield from self._component(
            where, {key: value for key, value in node.items() if key != "params"}, positional_count=1
        )

    def _schedule(self, where: str, node: Any) -> Iterator[ConfigError]:
        if not isinstance(node, Mapping):
            yield from self._component(where, node, positional_count=1, schedule=True)
            return
        yield from check_kinds(node, where, _SCHEDULER_KINDS)
        arguments = {key: value for key, value in node.items() if key not in SCHEDULER_KEYS}
        yield from self._component(where, arguments, positional_count=1, schedule=True)

    def _data(self, node: Any) -> Iterator[ConfigError]:
        if not is_node(node):
            yield from self._component("data", node)
            return
        target, _ = self._target(node["_target_"], "data._target_")
        takes = (target is not None and read_parameters(target)) or ()
        of_loader = [parameter.name for parameter in takes if parameter.required and parameter.name in DATA_KEYS]
        for key in of_loader:
            assert target is not None
            yield ConfigError(
                f"{_name(target)} requires '{key}', but data.{key} is for the loader and is not passed to it",
                location="data._target_",
                code=Code.argument,
                hint=f"Remove the argument and give datasets, not loaders; or rename it, such as my_{key}.",
            )
        arguments = {key: value for key, value in node.items() if key not in DATA_KEYS}
        yield from self._component("data", arguments, named_elsewhere=of_loader)
        yield from check_data_counts(node)
        yield from check_kinds(node, "data", {"drop_last": (bool, "")})
        collate, where = node.get("collate_fn"), "data.collate_fn"
        if isinstance(collate, str):
            yield from self._target(collate, where)[1]
        else:
            yield from self._inside(where, collate)

    def _component(self, where: str, node: Any, **supplied: Any) -> Iterator[ConfigError]:
        if is_node(node):
            yield from self._node(where, node, **supplied)
        elif isinstance(node, Mapping) and (node or "." in where):
            yield _no_target_error(node, where)

    def _node(
        self,
        where: str,
        node: Mapping[str, Any],
        *,
        positional_count: int = 0,
        named_elsewhere: Sequence[str] = (),
        elsewhere: tuple[str, ...] = (MISSING,),
        schedule: bool = False,
    ) -> Iterator[ConfigError]:
        """Check a node and the nodes inside it.

        The trainer supplies the first `positional_count` arguments, those in `named_elsewhere`, and those whose value
        is one of `elsewhere`.
        """
        key_errors = list(check_keys(node, where))
        yield from key_errors
        target, target_errors = self._target(node["_target_"], f"{where}._target_")
        takes = None if target is None else read_parameters(target)
        yield from target_errors
        package = getattr(target, "needs_package", "")
        if package and sys.modules.get(package) is None and find_spec(package) is None:
            message = f"{where} needs the package {package}, which is not installed"
            install = f'Install it: pip install "trainer-cli[{package}]".'
            yield ConfigError(message, location=f"{where}._target_", code=Code.target, hint=install)
        arguments = {str(key): value for key, value in node.items() if key not in SPECIAL}
        # After wrong special keys, further errors of the call would only follow from them.
        positional = [] if key_errors else list(node.get("_args_", []))
        if target is not None and takes is not None and not key_errors:
            named_arguments = {**dict.fromkeys(named_elsewhere, _SOMETHING), **arguments}
            named_arguments = {
                key: _SOMETHING if value in elsewhere else value for key, value in named_arguments.items()
            }
            # A duration becomes a number of steps, and total_steps is supplied, when the schedule is built.
            if schedule:
                if names_optimizer(takes):
                    positional_count, named_arguments = 0, {OPTIMIZER: _SOMETHING, **named_arguments}
                named_arguments = {key: 1 if _in_steps(value) else value for key, value in named_arguments.items()}
                if any(parameter.name == "total_steps" and parameter.by_name for parameter in takes):
                    named_arguments.setdefault("total_steps", _SOMETHING)
            partial = bool(node.get("_partial_"))
            values = [*[_SOMETHING] * positional_count, *positional]
            for error in find_misfits(
                where, _name(target), takes, values, named_arguments, first=positional_count, partial=partial
            ):
                _add_merge(error, where, arguments)
                yield _or_duration(error, takes) if schedule else error
        for key, value in arguments.items():
            yield from self._inside(f"{where}.{key}", value, elsewhere)
        yield from self._inside(f"{where}._args_", positional, elsewhere)

    def _inside(self, where: str, value: Any, elsewhere: tuple[str, ...] = (MISSING,)) -> Iterator[ConfigError]:
        if is_node(value):
            yield from self._node(where, value, elsewhere=elsewhere)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from self._inside(f"{where}.{key}", item, elsewhere)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from self._inside(f"{where}.{index}", item, elsewhere)

    def _target(self, path: Any, where: str) -> tuple[Callable[..., Any] | None, list[ConfigError]]:
        """The target, if targets are imported, and the mistakes in it."""
        if path == MISSING:
            return None, []
        try:
            if self.imports:
                return import_target(path, where, self.trust), []
            check_path(path, where)
            check_name(to_public_name(path), where, self.trust)
        except ConfigError as error:
            return None, [error]
        return None, []


def _add_merge(error: ConfigError, where: str, arguments: Mapping[str, Any]) -> None:
    """Add the cure where several named nodes are merged into the default one, as for `optimizer: {a: …, b: …}`."""
    section, _, name = (error.location or "").rpartition(".")
    if error.code is Code.argument and section == where in _NAMED and is_node(arguments.get(name)):
        error.cure = (
            f"They are merged into the default node: write `defaults: [{{override /{where}: null}}]` in their file, or "
            f"add `- override /{where}: null` to its defaults."
        )


def _or_duration(error: ConfigError, parameters: Sequence[Parameter]) -> ConfigError:
    """Add the hint that a number of steps may also be written as a duration."""
    name = (error.location or "").rpartition(".")[2]
    kinds = next(
        (parameter.kind.names for parameter in parameters if parameter.name == name and parameter.kind is not None),
        frozenset(),
    )
    if error.code is Code.wrong_type and error.hint is None and kinds == {"int"}:
        error.cure = "Or a duration, such as 500st or 1ep."
    return error


def _name(target: Callable[..., Any]) -> str:
    return getattr(target, "__name__", type(target).__name__)
