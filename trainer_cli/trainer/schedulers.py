"""The schedulers of a training: by name, each saved with its settings, and resumed at its position.

A schedule's settings are those of the config now, its position is the checkpoint's. Torch's schedulers keep both in
one state, so the state as it was when the scheduler was made is saved too: what has not moved since is a setting.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer_cli.checkpoint.model_state import Fitting
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import UserError

log = logging.getLogger(__name__)

NAME = "scheduler"
MOVED = frozenset({"lr", "momentum", "betas"})
"""The settings of parameter groups that torch's schedulers move."""
_LAST = "_last_lr"
_ABSENT = object()


def by_name(given: Any) -> dict[str, Any]:
    """Schedulers, or what makes them, by name: a mapping's own, `scheduler` for one, `scheduler_2` for the next."""
    if isinstance(given, Mapping):
        return {str(name): one for name, one in given.items() if one is not None}
    several = list(given) if isinstance(given, list | tuple) else [given]
    present = [one for one in several if one is not None]
    return {NAME if index == 0 else f"{NAME}_{index + 1}": one for index, one in enumerate(present)}


class Schedulers:
    """What steps once after each optimizer step, in the order in which it was given."""

    def __init__(self, given: Mapping[str, Any], optimizer: Any) -> None:
        self.live: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        for name, one in given.items():
            if not hasattr(one, "step") and callable(one):
                one = one(optimizer)
            _check(name, one)
            self.live[name] = one
            self._made[name] = _copied(one.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Each one's class, its state, and its state as it was made."""
        return {
            name: {"class": _class_name(one), "state": one.state_dict(), "made": self._made[name]}
            for name, one in self.live.items()
        }

    def fit(self, saved: Mapping[str, Any] | Sequence[Any], optimizer: Any) -> Fitting:
        """What of saved states does not fit, and the act of going on from them.

        Checkpoints of before schedulers had names hold a list of bare states.
        """
        rows: list[str] = []
        if not isinstance(saved, Mapping):
            if len(saved) != len(self.live):
                rows.append(f"the checkpoint has {len(saved)}, but here are {len(self.live)}")
            saved = {name: {"state": state} for name, state in zip(self.live, saved, strict=False)}
        else:
            rows += [f"{name}: missing in the checkpoint" for name in self.live if name not in saved]
            rows += [
                f"{name}: not in this training{'.' + near if (near := did_you_mean(name, self.live)) else ''}"
                for name in saved
                if name not in self.live
            ]
        states: dict[str, Any] = {}
        notes: list[str] = []
        for name, one in self.live.items():
            if name not in saved:
                continue
            kind = saved[name].get("class", _class_name(one))
            if kind != _class_name(one):
                rows.append(f"{name}: it is a {_class_name(one)}, but the checkpoint has a {kind}")
                continue
            made = saved[name].get("made", _ABSENT)
            merger = _Merger(rows, notes)
            states[name] = merger.merged(name, "", saved[name]["state"], made, self._made[name])

        def take() -> None:
            for line in notes:
                log.info("schedule %s", line)
            groups = optimizer.param_groups if optimizer is not None else []
            rates = [group["lr"] for group in groups]
            for name, state in states.items():
                self.live[name].load_state_dict(state)
            if len(states) > 1:
                # One that sets the rate as it is put back knows nothing of what the others made of it.
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate

        return Fitting(rows, take)


class _Merger:
    """Joins a saved state and one made now: positions of the first, settings of the second."""

    def __init__(self, rows: list[str], notes: list[str]) -> None:
        self._rows, self._notes = rows, notes

    def merged(self, path: str, key: str, saved: Any, made: Any, now: Any) -> Any:
        if _kind(saved) != _kind(now) and saved is not None and now is not None and made is not _ABSENT:
            self._rows.append(f"{path}: is a {_kind(saved)} in the checkpoint, but a {_kind(now)} here")
            return saved
        if _is_mapping(saved) and _is_mapping(now):
            return self._mapping(path, saved, made, now)
        if (
            isinstance(saved, list | tuple)
            and isinstance(now, list | tuple)
            and len(saved) == len(now)
            and (made is _ABSENT or len(made) == len(now))
        ):
            parts = [
                self.merged(f"{path}.{index}", key, *three)
                for index, three in enumerate(
                    zip(saved, [made] * len(now) if made is _ABSENT else made, now, strict=True)
                )
            ]
            return type(saved)(parts)
        if isinstance(now, list) and any(map(_is_mapping, now)):
            self._rows.append(f"{path}: has {len(saved)} schedules in the checkpoint, but {len(now)} here")
            return saved
        if made is _ABSENT or _same(made, now) or key == _LAST:
            return saved
        if _same(saved, made):
            if not _is_long(now):
                self._notes.append(f"{path}: {made} is {now} now, as configured")
            return _copied(now)
        self._rows.append(f"{path}: was {made} and is {now} now, but the training has moved it to {saved}")
        return saved

    def _mapping(self, path: str, saved: Mapping[str, Any], made: Any, now: Mapping[str, Any]) -> dict[str, Any]:
        merged = {}
        for key, value in saved.items():
            if key in now:
                before = made.get(key, _ABSENT) if _is_mapping(made) else _ABSENT
                merged[key] = self.merged(f"{path}.{key}", key, value, before, now[key])
            elif key.startswith("_"):
                # What a library keeps for itself changes with its version.
                merged[key] = value
            else:
                self._rows.append(f"{path}.{key}: not in this schedule")
        self._rows += [
            f"{path}.{key}: missing in the checkpoint" for key in now if key not in saved and not key.startswith("_")
        ]
        return merged


def _check(name: str, one: Any) -> None:
    for method in ("step", "state_dict", "load_state_dict"):
        if not hasattr(one, method):
            raise UserError(f"schedulers: expected a schedule, got {type(one).__name__} without {method}", where=name)
    try:
        takes = inspect.signature(one.step).parameters
    except (ValueError, TypeError):
        return
    if "metrics" in takes:
        raise UserError(
            f"{type(one).__name__} needs a metric at each step, and schedules here follow the step alone", where=name
        )


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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _copied(value: Any) -> Any:
    """A copy that later steps do not change; what is no plain data is kept, and refused when it is to be saved."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (dict, Counter):
        return type(value)({key: _copied(one) for key, one in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return value


def _class_name(one: Any) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"
