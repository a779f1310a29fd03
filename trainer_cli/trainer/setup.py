"""Check and make the parts of a trainer: modules, optimizers, names, device, seed.

Compile a model's forward in place, so that the names in its state stay as they are.

Parameters by patterns of their names: freeze them, and say what a pattern that matches nothing may have meant.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer_cli.core.order import sample_seed
from trainer_cli.core.patterns import did_you_mean, matches, why_no_pattern
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.parallel.torch_compat import compile_deterministically


def compile_model(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Compile the forward of a model at its first call; `settings` are those of torch.compile.

    Raises:
        ConfigError: torch has no such backend, or refuses the settings.
    """
    if not isinstance(settings, Mapping):
        what = f"compile: expected a mapping of arguments of torch.compile, got {type(settings).__name__}"
        raise ConfigError(what, location="compile", hint="Give {} for its defaults.")
    settings = {key: value for key, value in settings.items() if value is not None}
    backend = settings.get("backend", "inductor")
    if isinstance(backend, str) and backend != "inductor":
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            cure = did_you_mean(backend, known).strip() or f"There are {', '.join(known)}."
            raise ConfigError(f"there is no compiler '{backend}'", location="compile.backend", hint=cure)
    try:
        model.compile(**settings)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(f"torch.compile refused its settings: {error}", location="compile") from error


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Set `requires_grad` to False for the parameters whose names match a glob, or a regular expression after `re:`.

    Returns the norms whose `running_mean` matches too. They belong in evaluation mode, where the statistics stay.

    Raises:
        ConfigError: a pattern matches no parameter, or all are frozen.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        check_pattern(pattern, "freeze")
        found = [parameter for name, parameter in named.items() if matches(name, pattern)]
        if not found:
            raise matches_nothing(pattern, list(named), "freeze")
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError("freeze: no parameter is left to train", location="freeze")
    norms = [
        module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "running_mean", None), torch.Tensor)
        and any(matches(f"{name}.running_mean".lstrip("."), pattern) for pattern in patterns)
    ]
    for norm in norms:
        norm.eval()
    return norms


def check_pattern(pattern: str, where: str) -> None:
    """Refuse what is no regular expression."""
    if (fault := why_no_pattern(pattern)) is not None:
        raise ConfigError(f"{where}: {fault}", location=where)


def matches_nothing(pattern: str, names: Sequence[str], where: str, what: str = "parameter") -> ConfigError:
    """The error for a pattern that matches none of these names, with the nearest name or module."""
    modules = {name.rsplit(".", depth)[0] + ".*" for name in names for depth in range(1, name.count(".") + 1)}
    like = f"Its parameters are named like {', '.join(names[:4])}."
    return ConfigError(
        f"{where}: '{pattern}' matches no {what} of the model",
        location=where,
        hint=" ".join(filter(None, (did_you_mean(pattern, [*sorted(modules), *names]).strip(), like))),
    )


log = logging.getLogger(__name__)

_LEAST_OF_CHANCE = 2**32
"""Torch begins with a random seed of 53 bits, people give smaller ones."""


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def warn_if_never_seeded() -> None:
    """Warn that weights which a module has drawn already differ from process to process, unless torch was seeded."""
    if torch.initial_seed() >= _LEAST_OF_CHANCE:
        log.warning(
            "the model was made before the seed was set: weights that it drew at random differ from process to "
            "process. Give its class, or a function that makes it"
        )


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed a rank but the first with numbers of its own, so that ranks do not draw the same dropout."""
    if rank:
        seed_everything(sample_seed(seed, step, rank))


def be_deterministic() -> None:
    """Use only deterministic kernels from now on, on every device, and let no compiler choose kernels by their time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    compile_deterministically()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is cuda, else mps, else cpu. `meta` has shapes, but no values.

    Raises:
        UserError: this machine has no such device.
    """
    if name == "meta":
        return torch.device(name)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UserError(f"device: expected auto, cpu, cuda or mps, got {name!r}", where="device") from None
    if not available.get(device.type, False):
        have = ", ".join(kind for kind in available if available[kind])
        raise UserError(f"device is {name}, but this machine has none", where="device", cure=f"It has: {have}.")
    return device


SUBCLASSED = ("Callback", "Logger", "TrainStep")
"""Public classes whose subclasses a user gives."""


def made(given: Any, kind: type, *args: Any) -> Any:
    """A part, made by calling it if it is a function."""
    return given if isinstance(given, kind) or not callable(given) else given(*args)


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model with parameters or buffers that have no shape before its first forward, as of nn.LazyLinear.

    Raises:
        UserError: naming the first of them.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"{name} has no shape before the model's first forward, so no optimizer and no checkpoint can hold it",
                where="model",
                cure="Call the model once with a batch when it is made, such as at the end of its __init__.",
            )


def typed(slot: str, value: Any, kind: type) -> Any:
    """The value, if it is of this kind; else raise UserError."""
    if not isinstance(value, kind):
        got, cure = type(value).__name__, None
        if isinstance(value, type) and issubclass(value, kind):
            got, cure = f"the class {value.__name__}", f"Give an instance of it: {value.__name__}(…)."
        elif kind.__name__ in SUBCLASSED:
            cure = f"Subclass it: from trainer_cli import {kind.__name__}."
        raise UserError(f"{slot}: expected {kind.__name__}, got {got}", cure=cure)
    return value


def named(slot: str, given: Any, kind: type) -> dict[str, Any]:
    """A mapping, or a sequence by the names of its classes, with every value checked."""
    if not isinstance(given, Mapping | Iterable):
        raise UserError(f"{slot}: expected a sequence or mapping of {kind.__name__}, got {type(given).__name__}")
    found: dict[str, Any] = {}
    if isinstance(given, Mapping):
        for name, value in given.items():
            if value is not None and found.setdefault(str(name), value) is not value:
                raise UserError(f"{slot}: two are called '{name}'", cure="Name each of them in a mapping.")
    else:
        add_by_class(found, given)
    for name, value in [*found.items()]:
        first = next(other for other, earlier in found.items() if earlier is value)
        if first != name:
            log.warning("%s: '%s' is the same object as '%s', and is used once", slot, name, first)
            del found[name]
    return {name: typed(f"{slot}.{name}", value, kind) for name, value in found.items()}


def leave_out_frozen(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Remove the parameters that need no gradient from new optimizers, and groups that are then empty."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def add_by_class(found: dict[str, Any], given: Iterable[Any]) -> None:
    """Add each under the name of its class, with a number behind it where the name is taken."""
    for value in given:
        name, count = type(value).__name__, 1
        while name in found:
            count += 1
            name = f"{type(value).__name__}_{count}"
        found[name] = value


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, copied."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def reset(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """Reset an optimizer to these groups and settings, without state or gradients."""
    optimizer.zero_grad()
    optimizer.state.clear()
    del optimizer.param_groups[len(settings) :]
    for group, first in zip(optimizer.param_groups, settings, strict=True):
        params = group["params"]
        group.clear()
        group.update(params=params, **first)
