"""Resume a schedule at its saved position with the settings of the config.

Torch computes most rates from the previous rate, so a schedule with other settings cannot continue from a saved rate.
`replay` makes its steps again. `Merger` is for schedules that depend on more than their steps: it takes positions from
the saved state, and settings from the new one.
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

from trainer_cli.optim.scheduler_intervals import step_function
from trainer_cli.optim.warmup import WarmupSchedule
from trainer_cli.schema import SchedulerInterval
from trainer_cli.terminal import format_count

LAST_RATE = "_last_lr"
"""Key of the last learning rates in the state of a schedule."""
ABSENT = object()
"""Stands for an initial state that an old checkpoint does not hold."""


class Merger:
    """Merge the saved state of a schedule with that of a new one.

    A value that has changed since the schedule was made is a position, and taken from the saved state. One that has not
    is a setting, and taken from the new state.

    Args:
        rows: a line is added for each value that cannot be merged.
        notes: a line is added for each setting that has changed.
    """

    def __init__(self, rows: list[str], notes: list[str]) -> None:
        self._rows, self._notes = rows, notes

    def merge(self, path: str, key: str, saved: Any, initial: Any, new: Any) -> Any:
        """Merge a value.

        Args:
            path: where the value is, for messages.
            key: last key of the path that is not an index.
            saved: the value in the checkpoint.
            initial: the value when the saved schedule was made, or ABSENT.
            new: the value in the new schedule.
        """
        if _kind(saved) != _kind(new) and saved is not None and new is not None and initial is not ABSENT:
            self._rows.append(f"{path}: is a {_kind(saved)} in the checkpoint, but a {_kind(new)} here")
            return saved
        if _is_mapping(saved) and _is_mapping(new):
            return self._merge_mapping(path, saved, initial, new)
        if (
            isinstance(saved, list | tuple)
            and isinstance(new, list | tuple)
            and len(saved) == len(new)
            and (initial is ABSENT or len(initial) == len(new))
        ):
            initial = [ABSENT] * len(new) if initial is ABSENT else initial
            triples = enumerate(zip(saved, initial, new, strict=True))
            return type(saved)([self.merge(f"{path}.{index}", key, *triple) for index, triple in triples])
        if isinstance(new, list) and any(map(_is_mapping, new)):
            self._rows.append(
                f"{path}: has {format_count(len(saved), 'schedule')} in the checkpoint, but {len(new)} here"
            )
            return saved
        if initial is ABSENT or is_same(initial, new) or key == LAST_RATE:
            return saved
        if is_same(saved, initial):
            # A note of a container would be long.
            if not isinstance(new, Mapping | list | tuple):
                self._notes.append(f"{path}: {initial} is {new} now, as configured")
            return copy_plain(new)
        self._rows.append(f"{path}: was {initial} and is {new} now, but the run has moved it to {saved}")
        return saved

    def _merge_mapping(
        self, path: str, saved: Mapping[str, Any], initial: Any, new: Mapping[str, Any]
    ) -> dict[str, Any]:
        merged = {}
        for key, value in saved.items():
            if key in new:
                initial_value = initial.get(key, ABSENT) if _is_mapping(initial) else ABSENT
                merged[key] = self.merge(f"{path}.{key}", key, value, initial_value, new[key])
            elif key.startswith("_"):
                # Private entries change with the library's version.
                merged[key] = value
            else:
                self._rows.append(f"{path}.{key}: not in this schedule")
        self._rows += [
            f"{path}.{key}: missing in the checkpoint" for key in new if key not in saved and not key.startswith("_")
        ]
        return merged


def _is_mapping(value: Any) -> bool:
    # A Counter, such as the milestones of MultiStepLR, is one setting: its keys are steps.
    return isinstance(value, Mapping) and not isinstance(value, Counter) and all(type(key) is str for key in value)


def _kind(value: Any) -> str:
    """The kind of a value, in the word of the messages. All numbers are of one kind, as 1 may become 1.0."""
    if isinstance(value, bool | int | float):
        return "number"
    if isinstance(value, list | tuple):
        return "list"
    return "mapping" if isinstance(value, Mapping) else "tensor" if isinstance(value, torch.Tensor) else "value"


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
    return type(first) is type(second) and bool(first == second or (first != first and second != second))


def copy_plain(value: Any) -> Any:
    """Copy tensors and plain containers. Other values are returned as they are, and refused on saving."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (dict, Counter):
        return type(value)({key: copy_plain(entry) for key, entry in value.items()})
    if type(value) in (list, tuple):
        return type(value)(copy_plain(element) for element in value)
    return value


_CYCLED = "max_momentum"
"""Key that torch's schedules add to a group whose momentum they change."""
_MAX_VALUES = 10_000
"""Maximal number of values of a schedule that enter its digest."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The steps of a schedule that are computed again: `count` of them, `period` optimizer steps apart."""

    schedule: Any
    interval: str
    count: int
    period: float


def is_replayable(schedule: Any) -> bool:
    """Whether the rate of a schedule depends on its settings and the number of its steps alone."""
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        return False
    return isinstance(schedule, lr_scheduler.LRScheduler | WarmupSchedule)


def read_position(state: Any) -> int | None:
    """The number of steps that a saved schedule has made; None if its state does not hold it."""
    if not isinstance(state, Mapping):
        return None
    if inner_states := state.get("_schedulers"):
        # ChainedScheduler keeps no count, but each schedule inside it has made all steps.
        return state["last_epoch"] if type(state.get("last_epoch")) is int else read_position(inner_states[0])
    count = state.get("last_epoch", state.get("step"))
    return count if type(count) is int and count >= 0 else None


def replay(schedules: Iterable[Replay]) -> None:
    """Step new schedules of an optimizer, in the order in which a training steps them."""
    order = [str(interval) for interval in SchedulerInterval]

    schedules = list(schedules)
    functions = [step_function(steps.schedule) for steps in schedules]

    def events(index: int, steps: Replay) -> Iterator[tuple[float, int, int, int]]:
        rank = order.index(steps.interval)
        return ((number * steps.period, rank, index, number) for number in range(1, steps.count + 1))

    with warnings.catch_warnings():
        # Torch warns of a schedule that steps before its optimizer.
        warnings.simplefilter("ignore")
        streams = [events(index, steps) for index, steps in enumerate(schedules)]
        for *_, index, number in heapq.merge(*streams):
            functions[index](number)


def copy_rates(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copy the settings of each parameter group that schedules change."""
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
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self._budget -= 1
        # A schedule that refers to itself would be described without end.
        if (
            self._budget < 0
            or id(value) in self._ancestors
            or isinstance(value, Optimizer | nn.Module | types.ModuleType)
        ):
            return name
        self._ancestors.append(id(value))
        try:
            return name, self._describe_content(value)
        finally:
            self._ancestors.pop()

    def _describe_content(self, value: Any) -> Any:
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
            return value.__module__, value.__qualname__
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


def _is_filled(cell: types.CellType) -> bool:
    """Whether a captured variable has a value: a function may be defined before it."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
