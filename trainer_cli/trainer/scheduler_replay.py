"""Bring new schedules to the position of a checkpoint by making their steps again.

Torch computes most rates from the rate before, so a schedule with other settings cannot go on from a saved rate.
"""

from __future__ import annotations

import hashlib
import heapq
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from trainer_cli.config.schema import SchedulerInterval
from trainer_cli.trainer.warmup import WarmupSchedule

_CYCLED = "max_momentum"
"""The key that torch's schedules add to a group whose momentum they change."""
_MOST_VALUES = 10_000
"""How many values of a schedule are compared."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One schedule to step again: so many times, at steps `period` apart."""

    schedule: Any
    interval: str
    count: int
    period: float


def is_replayable(schedule: Any) -> bool:
    """Whether the rate of a schedule follows from its settings and the number of its steps alone."""
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        return False
    return isinstance(schedule, lr_scheduler.LRScheduler | WarmupSchedule)


def read_position(state: Any) -> int | None:
    """The number of steps that a saved schedule has made; None if it does not say."""
    if not isinstance(state, Mapping):
        return None
    if parts := state.get("_schedulers"):
        # Torch's chained schedules keep no count; each of theirs has made all steps.
        return state["last_epoch"] if type(state.get("last_epoch")) is int else read_position(parts[0])
    count = state.get("last_epoch", state.get("step"))
    return count if type(count) is int and count >= 0 else None


def replay(schedules: Iterable[Replayed]) -> None:
    """Step schedules of one optimizer that are as they were made, in the order in which a training steps them."""
    order = [str(interval) for interval in SchedulerInterval]

    def events(index: int, replayed: Replayed) -> Iterator[tuple[float, int, int, Any]]:
        rank = order.index(replayed.interval)
        return ((made * replayed.period, rank, index, replayed.schedule) for made in range(1, replayed.count + 1))

    with warnings.catch_warnings():
        # Torch warns of a schedule that steps before its optimizer.
        warnings.simplefilter("ignore")
        for *_, schedule in heapq.merge(*(events(*each) for each in enumerate(schedules)), key=lambda event: event[:3]):
            schedule.step()


def copy_rates(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What schedules have set in each parameter group."""
    rates = []
    for group in optimizer.param_groups:
        keys = ("lr", "momentum", "betas") if _CYCLED in group else ("lr",)
        rates.append({key: _copied(group[key]) for key in keys if key in group})
    return rates


def put_rates(optimizer: Optimizer, rates: Iterable[Mapping[str, Any]]) -> None:
    """Set what `copy_rates` returned."""
    for group, settings in zip(optimizer.param_groups, rates, strict=False):
        for key, value in settings.items():
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def digest_settings(schedule: Any) -> str:
    """A digest of a new schedule: its values, and the code and captured values of its functions."""
    return hashlib.blake2b(repr(_Description().describe(schedule)).encode(), digest_size=16).hexdigest()


class _Description:
    """Describes values by plain data, in which no address appears; of very large values a beginning."""

    def __init__(self) -> None:
        self._above: list[int] = []
        self._left = _MOST_VALUES

    def describe(self, value: Any) -> Any:
        """Data that is the same for equal values."""
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self._left -= 1
        if self._left < 0 or id(value) in self._above or isinstance(value, Optimizer | nn.Module | types.ModuleType):
            return name
        self._above.append(id(value))
        try:
            return name, self._describe_parts(value)
        finally:
            self._above.pop()

    def _describe_parts(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            values = value.tolist() if value.numel() <= _MOST_VALUES and not value.is_meta else None
            return str(value.dtype), tuple(value.shape), values
        if isinstance(value, list | tuple):
            return [self.describe(each) for each in value[:_MOST_VALUES]]
        if isinstance(value, Mapping):
            return [(self.describe(key), self.describe(each)) for key, each in value.items()]
        if isinstance(value, set | frozenset):
            return sorted(repr(self.describe(each)) for each in value)
        if isinstance(value, type):
            return value.__module__, value.__qualname__
        if isinstance(value, types.CodeType):
            return value.co_code, value.co_names, self.describe(value.co_consts)
        if isinstance(value, types.FunctionType):
            captured = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            return [
                self.describe(each) for each in (value.__code__, value.__defaults__, value.__kwdefaults__, captured)
            ]
        if isinstance(value, types.MethodType):
            return self.describe(value.__func__), self.describe(value.__self__)
        if isinstance(value, partial):
            return self.describe(value.func), self.describe(value.args), self.describe(value.keywords)
        return self.describe(getattr(value, "__dict__", None))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
