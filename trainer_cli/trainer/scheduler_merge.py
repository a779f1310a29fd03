"""Merge the saved state of a schedule with a new one: positions of the first, settings of the second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

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
