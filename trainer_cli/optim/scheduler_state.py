"""The state of a scheduler, the rates that it has set, and a digest of its settings."""

from __future__ import annotations

import hashlib
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_CYCLED = "max_momentum"
"""Key that torch's schedules add to a group whose momentum they change."""


_MAX_VALUES = 10_000
"""Maximal number of values of a schedule that enter its digest."""
_MODULES = {"trainer_cli.optim.warmup": "trainer_cli.trainer.warmup"}
"""The module of schedules -> the one that they were in when digests in checkpoints were first made with it."""


LAST_RATE = "_last_lr"
"""Key of the last learning rates in the state of a schedule."""


ABSENT = object()
"""Stands for an initial state that an old checkpoint does not hold."""


def is_same(first: Any, second: Any) -> bool:
    """Whether two values are equal in type and value; NaN is equal to itself."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first.cpu(), second.cpu())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(is_same, first, second))
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return False
    if type(first) is not type(second):
        return False
    # NaN alone is not equal to itself.
    return bool(first == second or (first != first and second != second))


def copy_plain(value: Any) -> Any:
    """Copy tensors and plain containers. Other values are returned as they are, and refused on saving."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (dict, Counter):
        return type(value)({key: copy_plain(entry) for key, entry in value.items()})
    if type(value) in (list, tuple):
        return type(value)(copy_plain(element) for element in value)
    return value


def read_position(state: Any) -> int | None:
    """The number of steps that a saved schedule has made; None if its state does not hold it."""
    if not isinstance(state, Mapping):
        return None
    count = state.get("last_epoch", state.get("step"))
    if state.get("_schedulers") and type(state.get("last_epoch")) is not int:
        # ChainedScheduler keeps no count, but each schedule inside it has made all steps.
        return read_position(state["_schedulers"][0])
    return count if type(count) is int and count >= 0 else None


def copy_rates(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copy what schedules change in each parameter group: `lr`, and the momentum if a schedule cycles it."""
    rates = []
    for group in optimizer.param_groups:
        keys = ("lr", "momentum", "betas") if _CYCLED in group else ("lr",)
        rates.append({key: copy_plain(group[key]) for key in keys if key in group})
    return rates


def put_rates(optimizer: Optimizer, rates: Iterable[Mapping[str, Any]]) -> None:
    """Set the rates that `copy_rates` returned."""
    for group, settings in zip(optimizer.param_groups, rates, strict=False):
        for key, value in settings.items():
            if isinstance(group[key], torch.Tensor):
                # In place, as torch's schedules do: a captured or compiled step reads this tensor.
                group[key].fill_(value)
            else:
                group[key] = value


def digest_settings(schedule: Any) -> str:
    """A digest of a new schedule: its attributes, and the code and captured values of its functions."""
    return hashlib.blake2b(repr(_Describer().describe(schedule)).encode(), digest_size=16).hexdigest()


class _Describer:
    """Describe values by plain data without addresses, which is the same in every process."""

    def __init__(self) -> None:
        self._ancestors: list[int] = []
        """ids of the values that contain the current one."""
        self._budget = _MAX_VALUES

    def describe(self, value: Any) -> Any:
        """Data that is the same for equal values. Beyond `_MAX_VALUES` values, only their types are described."""
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        name = ".".join(_name_class(type(value)))
        self._budget -= 1
        # A schedule that refers to itself would be described without end.
        is_cyclic = id(value) in self._ancestors
        if self._budget < 0 or is_cyclic or isinstance(value, Optimizer | nn.Module | types.ModuleType):
            return name
        self._ancestors.append(id(value))
        try:
            return name, self._describe_content(value)
        finally:
            self._ancestors.pop()

    def _describe_content(self, value: Any) -> Any:
        """Data about the content of a container, a function or an object, by its type."""
        if isinstance(value, torch.Tensor):
            values = value.tolist() if value.numel() <= _MAX_VALUES and not value.is_meta else None
            return str(value.dtype), tuple(value.shape), values
        if isinstance(value, list | tuple):
            return [self.describe(element) for element in value[:_MAX_VALUES]]
        if isinstance(value, Mapping):
            return [(self.describe(key), self.describe(entry)) for key, entry in value.items()]
        if isinstance(value, set | frozenset):
            return sorted(repr(self.describe(element)) for element in value)
        if isinstance(value, type):
            return _name_class(value)
        if isinstance(value, types.CodeType):
            return value.co_code, value.co_names, self.describe(value.co_consts)
        if isinstance(value, types.FunctionType):
            captured = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            contents = (value.__code__, value.__defaults__, value.__kwdefaults__, captured)
            return [self.describe(content) for content in contents]
        if isinstance(value, types.MethodType):
            return self.describe(value.__func__), self.describe(value.__self__)
        if isinstance(value, partial):
            return self.describe(value.func), self.describe(value.args), self.describe(value.keywords)
        return self.describe(getattr(value, "__dict__", None))


def _name_class(kind: type) -> tuple[str, str]:
    """The module and the name of a class, the same in all versions of this package."""
    return _MODULES.get(kind.__module__, kind.__module__), kind.__qualname__


def _is_filled(cell: types.CellType) -> bool:
    """Whether a captured variable has a value: a function may be defined before it."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
