"""Check and make the parts of a trainer: modules, optimizers, names, device, seed."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer_cli.data.order import sample_seed
from trainer_cli.errors import UserError
from trainer_cli.trainer.torch_compat import compile_deterministically

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
