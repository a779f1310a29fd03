"""Bring new schedules to the position of a checkpoint by making their steps again.

Torch computes most rates from the rate before, so a schedule with other settings cannot go on from a saved rate.

Merge the saved state of a schedule with a new one: positions of the first, settings of the second.
"""

from __future__ import annotations

import hashlib
import heapq
import types
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from trainer_cli.core.schema import SchedulerInterval
from trainer_cli.trainer.warmup import WarmupSchedule

LAST_RATE = "_last_lr"
"""The key of a schedule's last rates in its state."""
ABSENT = object()
"""In place of a state as it was made, where an old checkpoint has none."""


class Merger:
    """Merges two states. What does not fit is added to `rows`, and a changed setting to `notes`."""

    def __init__(self, rows: list[str], notes: list[str]) -> None:
        self._rows, self._notes = rows, notes

    def merged(self, path: str, key: str, saved: Any, made: Any, now: Any) -> Any:
        if _kind(saved) != _kind(now) and saved is not None and now is not None and made is not ABSENT:
            self._rows.append(f"{path}: is a {_kind(saved)} in the checkpoint, but a {_kind(now)} here")
            return saved
        if _is_mapping(saved) and _is_mapping(now):
            return self._mapping(path, saved, made, now)
        if (
            isinstance(saved, list | tuple)
            and isinstance(now, list | tuple)
            and len(saved) == len(now)
            and (made is ABSENT or len(made) == len(now))
        ):
            parts = [
                self.merged(f"{path}.{index}", key, *three)
                for index, three in enumerate(
                    zip(saved, [made] * len(now) if made is ABSENT else made, now, strict=True)
                )
            ]
            return type(saved)(parts)
        if isinstance(now, list) and any(map(_is_mapping, now)):
            self._rows.append(f"{path}: has {len(saved)} schedules in the checkpoint, but {len(now)} here")
            return saved
        if made is ABSENT or is_same(made, now) or key == LAST_RATE:
            return saved
        if is_same(saved, made):
            if not _is_long(now):
                self._notes.append(f"{path}: {made} is {now} now, as configured")
            return copied(now)
        self._rows.append(f"{path}: was {made} and is {now} now, but the training has moved it to {saved}")
        return saved

    def _mapping(self, path: str, saved: Mapping[str, Any], made: Any, now: Mapping[str, Any]) -> dict[str, Any]:
        merged = {}
        for key, value in saved.items():
            if key in now:
                before = made.get(key, ABSENT) if _is_mapping(made) else ABSENT
                merged[key] = self.merged(f"{path}.{key}", key, value, before, now[key])
            elif key.startswith("_"):
                # Private entries change with the library's version.
                merged[key] = value
            else:
                self._rows.append(f"{path}.{key}: not in this schedule")
        self._rows += [
            f"{path}.{key}: missing in the checkpoint" for key in now if key not in saved and not key.startswith("_")
        ]
        return merged


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, Counter) and all(type(key) is str for key in value)


def _is_long(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _kind(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return "number"
    if isinstance(value, list | tuple):
        return "list"
    return "mapping" if isinstance(value, Mapping) else "tensor" if isinstance(value, torch.Tensor) else "value"


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def copied(value: Any) -> Any:
    """A copy of plain data; anything else is kept as it is, and refused on saving."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (dict, Counter):
        return type(value)({key: copied(one) for key, one in value.items()})
    if type(value) in (list, tuple):
        return type(value)(copied(one) for one in value)
    return value


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
