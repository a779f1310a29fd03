"""Resume a schedule at its saved position with the settings of the config.

Torch computes most rates from the previous rate, so a schedule with other settings cannot continue from a saved rate.
`replay` makes its steps again. `Merger` is for schedules that depend on more than their steps: it takes positions from
the saved state, and settings from the new one.
"""

from __future__ import annotations

import heapq
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler

from trainer_cli.optim.scheduler_intervals import step_function
from trainer_cli.optim.scheduler_state import ABSENT, LAST_RATE, copy_plain, is_same
from trainer_cli.optim.warmup import WarmupSchedule
from trainer_cli.schema import SchedulerInterval
from trainer_cli.terminal import format_count


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
        """The value for a schedule that is resumed: the saved one of a position, the new one of a setting.

        Args:
            path: where the value is, for messages.
            key: last key of the path that is not an index.
            saved: the value in the checkpoint.
            initial: the value when the saved schedule was made, or ABSENT.
            new: the value in the new schedule.
        """
        # A value that is or was None has no kind to compare.
        are_values = saved is not None and new is not None
        if _kind(saved) != _kind(new) and are_values and initial is not ABSENT:
            self._rows.append(f"{path}: is a {_kind(saved)} in the checkpoint, but a {_kind(new)} here")
            return saved
        if _is_mapping(saved) and _is_mapping(new):
            return self._merge_mapping(path, saved, initial, new)
        are_sequences = isinstance(saved, list | tuple) and isinstance(new, list | tuple)
        if are_sequences and len(saved) == len(new) and (initial is ABSENT or len(initial) == len(new)):
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
            # A note about a container would be long.
            if not isinstance(new, Mapping | list | tuple):
                self._notes.append(f"{path}: {initial} is {new} now, as configured")
            return copy_plain(new)
        self._rows.append(f"{path}: was {initial} and is {new} now, but the run has moved it to {saved}")
        return saved

    def _merge_mapping(
        self, path: str, saved: Mapping[str, Any], initial: Any, new: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Merge the entries of two mappings; a line is added for each public key that only one of them has."""
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
    """Whether a value is a mapping with entries to merge one by one."""
    # A Counter, such as the milestones of MultiStepLR, is one setting: its keys are steps.
    return isinstance(value, Mapping) and not isinstance(value, Counter) and all(type(key) is str for key in value)


def _kind(value: Any) -> str:
    """The kind of a value, as messages call it. All numbers are of one kind, because 1 may become 1.0."""
    if isinstance(value, bool | int | float):
        return "number"
    if isinstance(value, list | tuple):
        return "list"
    return "mapping" if isinstance(value, Mapping) else "tensor" if isinstance(value, torch.Tensor) else "value"


@dataclass(frozen=True, slots=True)
class Replay:
    """The steps of a schedule that are made again: `count` of them, `period` optimizer steps apart."""

    schedule: Any
    interval: str
    count: int
    period: float


def is_replayable(schedule: Any) -> bool:
    """Whether the rate of a schedule depends on its settings and the number of its steps alone."""
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        return False
    return isinstance(schedule, lr_scheduler.LRScheduler | WarmupSchedule)


def replay(schedules: Iterable[Replay]) -> None:
    """Step new schedules of an optimizer, in the order in which a training steps them."""
    order = [str(interval) for interval in SchedulerInterval]

    replays = list(schedules)
    functions = [step_function(steps.schedule) for steps in replays]

    # Sorted by position, then by interval, then by schedule, as a training steps them.
    def list_events(index: int, steps: Replay) -> Iterator[tuple[float, int, int, int]]:
        """The time of each step of a schedule, and what orders steps at the same time."""
        interval_order = order.index(steps.interval)
        return ((count * steps.period, interval_order, index, count) for count in range(1, steps.count + 1))

    with warnings.catch_warnings():
        # Torch warns of a schedule that steps before its optimizer.
        warnings.simplefilter("ignore")
        events = [list_events(index, steps) for index, steps in enumerate(replays)]
        for *_, index, count in heapq.merge(*events):
            functions[index](count)
