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

_NAMED_NODES = ("optimizer", "scheduler")
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

_LATER = object()
"""Stands for an argument that is known only when the object is built."""


def check_components(
    config: TrainConfig, trust: Trust, sections: Collection[str] = SECTIONS, *, imports: bool = False
) -> Iterator[ConfigError]:
    """Check the components of a config, interpolations resolved; each mistake has the key where it is.

    With `imports` the targets are imported, each must be a class or function, and must accept its arguments. The
    project's root must be on `sys.path` then.
    """
    checker = _Checker(trust, imports=imports)
    errors_of_sections = [checker.check_section(name, getattr(config, name)) for name in sections]
    if "optimizer" in sections:
        errors_of_sections += [checker.check_groups(config.optimizer, config.param_groups), check_auto(config)]
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


def _is_duration(value: Any) -> bool:
    """Whether an argument of a schedule is a duration such as `1ep`, which is converted to a number of steps."""
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

    def check_section(self, name: str, value: Any) -> Iterator[ConfigError]:
        """Check one section."""
        match name:
            case "model":
                yield from self._check_component(name, value, placeholders=(MISSING, FROM_DATA))
            case "data":
                yield from self._check_data(value)
            case "optimizer":
                for where, node in list_optimizers(value).items():
                    yield from self._check_optimizer(where, node)
            case "step" | "sparsity":
                yield from self._check_component(name, value)
            case "scheduler":
                for where, node in list_schedules(value):
                    yield from self._check_schedule(where, node)
            case "callbacks" | "loggers":
                for key, node in value.items():
                    supplied = _SAVER_KEYS if (name, key) == ("callbacks", SAVER) else ()
                    yield from self._check_component(f"{name}.{key}", node, supplied=supplied)

    def check_groups(self, optimizer: Any, groups: Mapping[str, Any]) -> Iterator[ConfigError]:
        """Check the settings of parameter groups: torch's optimizers ignore unknown ones without a warning."""
        nodes = list(list_optimizers(optimizer).values())
        # With several optimizers it is not known here which one a group belongs to.
        single_node = nodes[0] if len(nodes) == 1 and is_node(nodes[0]) else None
        target = self._find_target(single_node["_target_"], "optimizer")[0] if single_node else None
        parameters = None if target is None else read_parameters(target)
        if target is None or parameters is None or not target.__module__.startswith("torch.optim"):
            return  # Other optimizers may accept settings that their constructor does not; checked when they are built.
        for pattern, settings in groups.items():
            if isinstance(settings, Mapping):
                arguments = {str(key): value for key, value in settings.items() if key not in ("tag", "lr_scale")}
                where = f"param_groups.{pattern}"
                yield from find_misfits(where, _name_of(target), parameters, [_LATER], arguments, first=1, partial=True)

    def _check_optimizer(self, where: str, node: Any) -> Iterator[ConfigError]:
        """Check the only optimizer, or a named one, which has the key `params` too."""
        if where != "optimizer" and isinstance(node, Mapping):
            name = where.partition(".")[2]
            if not name.isidentifier():
                message = f"optimizer has the name {name!r}, but a name has only letters, digits and _"
                yield ConfigError(message, location=where)
            yield from check_kinds(node, where, _OPTIMIZER_KINDS)
            node = {key: value for key, value in node.items() if key != "params"}
        elif is_node(node) and node.get("lr") == AUTO:
            node = {**node, "lr": _LATER}
        yield from self._check_component(where, node, positional_count=1)

    def _check_schedule(self, where: str, node: Any) -> Iterator[ConfigError]:
        """Check a schedule: the keys that the trainer reads, then the arguments."""
        if isinstance(node, Mapping):
            yield from check_kinds(node, where, _SCHEDULER_KINDS)
            arguments = {key: value for key, value in node.items() if key not in SCHEDULER_KEYS}
            yield from self._check_component(where, arguments, positional_count=1, is_schedule=True)

    def _check_data(self, node: Any) -> Iterator[ConfigError]:
        """Check the data: the keys of our loaders, then the arguments of its class."""
        if not is_node(node):
            yield from self._check_component("data", node)
            return
        target, _ = self._find_target(node["_target_"], "data._target_")
        parameters = (target is not None and read_parameters(target)) or ()
        required = [parameter.name for parameter in parameters if parameter.required]
        loader_keys = [name for name in required if name in DATA_KEYS]
        for key in loader_keys:
            assert target is not None
            yield ConfigError(
                f"{_name_of(target)} requires '{key}', but data.{key} is for the loader and is not passed to it",
                location="data._target_",
                code=Code.argument,
                hint=f"Remove the argument and give datasets, not loaders; or rename it, such as my_{key}.",
            )
        arguments = {key: value for key, value in node.items() if key not in DATA_KEYS}
        # They are reported above, and not again as missing arguments.
        yield from self._check_component("data", arguments, supplied=loader_keys)
        yield from check_data_counts(node)
        yield from check_kinds(node, "data", {"drop_last": (bool, "")})
        collate, where = node.get("collate_fn"), "data.collate_fn"
        if isinstance(collate, str):
            yield from self._find_target(collate, where)[1]
        else:
            yield from self._check_inside(where, collate)

    def _check_component(self, where: str, node: Any, **options: Any) -> Iterator[ConfigError]:
        """Check what a key of the config has as component, with the `options` of `_check_node`."""
        if is_node(node):
            yield from self._check_node(where, node, **options)
        elif isinstance(node, Mapping) and (node or "." in where):
            yield _no_target_error(node, where)

    def _check_node(
        self,
        where: str,
        node: Mapping[str, Any],
        *,
        positional_count: int = 0,
        supplied: Sequence[str] = (),
        placeholders: tuple[str, ...] = (MISSING,),
        is_schedule: bool = False,
    ) -> Iterator[ConfigError]:
        """Check a node and the nodes inside it.

        The trainer supplies the first `positional_count` arguments, those named in `supplied`, and those whose value is
        one of the `placeholders`.
        """
        key_errors = list(check_keys(node, where))
        yield from key_errors
        target, target_errors = self._find_target(node["_target_"], f"{where}._target_")
        parameters = None if target is None else read_parameters(target)
        yield from target_errors
        package = getattr(target, "needs_package", "")
        if package and sys.modules.get(package) is None and find_spec(package) is None:
            message = f"{where} needs the package {package}, which is not installed"
            install = f'Install it: pip install "trainer-cli[{package}]".'
            yield ConfigError(message, location=f"{where}._target_", code=Code.target, hint=install)
        arguments = {str(key): value for key, value in node.items() if key not in SPECIAL}
        # After wrong special keys, further errors of the call would only follow from them.
        positional = [] if key_errors else list(node.get("_args_", []))
        if target is not None and parameters is not None and not key_errors:
            named = {**dict.fromkeys(supplied, _LATER), **arguments}
            named = {key: _LATER if value in placeholders else value for key, value in named.items()}
            # A duration becomes a number of steps, and total_steps is supplied, when the schedule is built.
            if is_schedule:
                if names_optimizer(parameters):
                    positional_count, named = 0, {OPTIMIZER: _LATER, **named}
                named = {key: 1 if _is_duration(value) else value for key, value in named.items()}
                if any(parameter.name == "total_steps" and parameter.by_name for parameter in parameters):
                    named.setdefault("total_steps", _LATER)
            partial = bool(node.get("_partial_"))
            values = [*[_LATER] * positional_count, *positional]
            for error in find_misfits(
                where, _name_of(target), parameters, values, named, first=positional_count, partial=partial
            ):
                _explain_merge(error, where, arguments)
                yield _mention_duration(error, parameters) if is_schedule else error
        for key, value in arguments.items():
            yield from self._check_inside(f"{where}.{key}", value, placeholders)
        yield from self._check_inside(f"{where}._args_", positional, placeholders)

    def _check_inside(
        self, where: str, value: Any, placeholders: tuple[str, ...] = (MISSING,)
    ) -> Iterator[ConfigError]:
        """Check the nodes in an argument, which may be one, or a list or mapping with nodes in it."""
        if is_node(value):
            yield from self._check_node(where, value, placeholders=placeholders)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from self._check_inside(f"{where}.{key}", item, placeholders)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from self._check_inside(f"{where}.{index}", item, placeholders)

    def _find_target(self, path: Any, where: str) -> tuple[Callable[..., Any] | None, list[ConfigError]]:
        """The class or function at a path, None unless targets are imported; and the mistakes in the path."""
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


def _explain_merge(error: ConfigError, where: str, arguments: Mapping[str, Any]) -> None:
    """Set the cure of an error that follows from named nodes, `optimizer: {a: …, b: …}`, merged into the default."""
    section, _, name = (error.location or "").rpartition(".")
    is_named_node = section == where and where in _NAMED_NODES and is_node(arguments.get(name))
    if error.code is Code.argument and is_named_node:
        error.cure = (
            f"They are merged into the default node: write `defaults: [{{override /{where}: null}}]` in their file, or "
            f"add `- override /{where}: null` to its defaults."
        )


def _mention_duration(error: ConfigError, parameters: Sequence[Parameter]) -> ConfigError:
    """Add the hint that a number of steps may also be written as a duration."""
    name = (error.location or "").rpartition(".")[2]
    kind = next((parameter.kind for parameter in parameters if parameter.name == name), None)
    takes_int = kind is not None and kind.names == {"int"}
    if error.code is Code.wrong_type and error.hint is None and takes_int:
        error.cure = "Or a duration, such as 500st or 1ep."
    return error


def _name_of(target: Callable[..., Any]) -> str:
    """The name of a class or function; of any other callable the name of its class."""
    return getattr(target, "__name__", type(target).__name__)
