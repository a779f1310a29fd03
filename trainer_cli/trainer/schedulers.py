"""The schedulers of a training by name, saved with their settings and resumed at their position.

A schedule's settings are those of the config now, its position is the checkpoint's. Torch's schedulers keep both in
one state, so the state as it was when the scheduler was made is saved too: what has not moved since is a setting.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.checkpoint.model_state import Fitting
from trainer_cli.config.schema import SchedulerInterval
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.trainer.duration import Duration, Unit
from trainer_cli.trainer.optimizers import ONLY, argument_names
from trainer_cli.trainer.scheduler_intervals import Scheduled, is_function, natural_interval
from trainer_cli.trainer.tagged_groups import TaggedGroups
from trainer_cli.trainer.warmup import WarmupCosine as WarmupCosine  # its name in configs of earlier runs

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop

log = logging.getLogger(__name__)

NAME = "scheduler"
MOVED = frozenset({"lr", "momentum", "betas"})
"""The settings of parameter groups that torch's schedulers change."""
_RENAMED = {
    f"trainer_cli.trainer.{module}.WarmupCosine": "trainer_cli.trainer.warmup.WarmupCosine"
    for module in ("schedules", "schedulers")
}
"""Classes under the names that earlier versions saved."""
_LAST = "_last_lr"
_ABSENT = object()
_STEP = SchedulerInterval.step


def scheduler_factory(kind: Callable[..., Any], loop: TrainingLoop, **settings: Any) -> Callable[[Optimizer], Any]:
    """A function `optimizer -> schedule`, as a config's `scheduler` describes it.

    `interval`, `metric` and `groups` among the settings are those of `Scheduled`. Durations such as `1ep` become a
    number of intervals, and `total_steps`, where `kind` takes it and it is not given, is that of the loop's
    `max_duration`.
    """
    interval, metric = settings.pop("interval", None) or natural_interval(kind), settings.pop("metric", None)
    groups = settings.pop("groups", None)
    return Scheduled(
        lambda optimizer: kind(optimizer, **schedule_settings(kind, settings, loop, interval)), interval, metric, groups
    )


def schedule_settings(
    kind: Callable[..., Any], settings: Mapping[str, Any], loop: TrainingLoop, interval: str, where: str = NAME
) -> dict[str, Any]:
    """The settings of a schedule, durations as a number of intervals.

    Raises:
        ConfigError: a duration is not a whole number of them, or the training's length is needed and unknown.
    """
    found = {key: _intervals(value, f"{where}.{key}", loop, interval, where) for key, value in settings.items()}
    if "total_steps" not in found and "total_steps" in argument_names(kind):
        if loop.total_steps is None and Duration.parse(loop.settings.max_duration).unit is Unit.STEP:
            raise UserError(
                "the schedule needs the length of the training, and the loop given to scheduler_factory is not of "
                "this trainer",
                where=where,
                cure="Give both the same TrainingLoop.",
            )
        if loop.total_steps is None:
            raise ConfigError(
                f"the schedule needs the number of steps, and loop.max_duration={loop.settings.max_duration} "
                "does not give it",
                location=where,
                hint=f"Give loop.max_duration in steps, or set {where}.total_steps.",
            )
        found["total_steps"] = loop.total_steps
        if interval == SchedulerInterval.epoch and loop.steps_per_epoch is not None:
            found["total_steps"] = -(-loop.total_steps // loop.steps_per_epoch)
    return found


def _intervals(value: Any, key: str, loop: TrainingLoop, interval: str, where: str) -> Any:
    """A duration string as a number of intervals; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        duration = Duration.parse(value)
    except ValueError:
        return value
    if interval == SchedulerInterval.epoch and duration.unit is Unit.EPOCH and duration.value == int(duration.value):
        return int(duration.value)
    count = duration.steps(loop.steps_per_epoch)
    if interval != _STEP:
        length = loop.steps_per_epoch if interval == SchedulerInterval.epoch else None
        if count is None or length is None or count % length:
            what = f"{key} is {value}, but the schedule steps once an {interval} and counts these"
            raise ConfigError(what, location=key, hint=f"Give their number, or set {where}.interval=step.")
        return count // length
    if count is None:
        raise ConfigError(f"{key} is {value}, which is not a number of steps", location=key)
    return count


def by_name(given: Any, optimizers: Collection[str] = (ONLY,)) -> dict[str, tuple[str, Any]]:
    """Name -> (optimizer, schedule or function that makes it).

    For one optimizer: a mapping's own names, `scheduler` for one without, `scheduler_2` for the next. For several:
    one function is called for each of them; a mapping has their names, each with what one optimizer may have.

    Raises:
        UserError: a mapping names no optimizer.
    """
    if list(optimizers) == [ONLY]:
        return {name: (ONLY, one) for name, one in _several(given, NAME).items()}
    if not isinstance(given, Mapping):
        one = given.schedule if isinstance(given, Scheduled) else given
        if one is not None and not is_function(one):
            raise UserError("schedulers: there are several optimizers", cure="Give a mapping of their names.")
        given = dict.fromkeys(optimizers, given)
    found: dict[str, tuple[str, Any]] = {}
    for optimizer, own in given.items():
        if optimizer not in optimizers:
            cure = did_you_mean(str(optimizer), optimizers).strip() or f"There are: {', '.join(optimizers)}."
            raise UserError(f"schedulers: there is no optimizer '{optimizer}'", cure=cure)
        names = _several(own, str(optimizer))
        prefix = f"{optimizer}." if isinstance(own, Mapping) else ""
        found |= {f"{prefix}{name}": (str(optimizer), one) for name, one in names.items()}
    return found


def _several(given: Any, name: str) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {str(key): one for key, one in given.items() if one is not None}
    several = list(given) if isinstance(given, list | tuple) else [given]
    present = [one for one in several if one is not None]
    return {name if index == 0 else f"{name}_{index + 1}": one for index, one in enumerate(present)}


class Schedulers:
    """The schedulers of a training, each with the interval at which it steps, in the given order."""

    def __init__(self, given: Any = None, optimizers: Mapping[str, Optimizer] | None = None) -> None:
        self._optimizers = dict(optimizers or {})
        self.live: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        self._optimizer_of: dict[str, str] = {}
        self._timing: dict[str, Scheduled] = {}
        self._first_rates = [[float(group["lr"]) for group in one.param_groups] for one in self._optimizers.values()]
        self._warned = False
        for name, (optimizer, one) in by_name(given, self._optimizers).items() if self._optimizers else ():
            scheduled = one if isinstance(one, Scheduled) else Scheduled(one)
            live = scheduled(self._optimizers[optimizer])
            _check(name, live, self._optimizers[optimizer])
            self.live[name] = live
            self._timing[name] = scheduled.settled(live, name)
            self._made[name] = _copied(live.state_dict())
            self._optimizer_of[name] = optimizer

    def of(self, optimizer: str, interval: str | None = None) -> list[Any]:
        """Those of the optimizer with this name, all or those with this interval."""
        return [
            self.live[name]
            for name, owner in self._optimizer_of.items()
            if owner == optimizer and interval in (None, self._timing[name].interval)
        ]

    def has(self, interval: str) -> bool:
        """Whether there is one with this interval."""
        return any(one.interval == interval for one in self._timing.values())

    def wanted_metrics(self) -> dict[str, str]:
        """Setting -> metric that an evaluation must report."""
        return {f"the metric of {name}": one.metric for name, one in self._timing.items() if one.metric is not None}

    def step(
        self,
        trainer: Trainer,
        interval: str,
        metrics: Mapping[str, float] | None = None,
        *,
        all_metrics: bool = True,
    ) -> None:
        """Step those with this interval, the hooks around each.

        Args:
            metrics: of the evaluation that was made just now.
            all_metrics: False: of some loaders alone; one whose metric is not among them does not step.

        Raises:
            UserError: a scheduler's metric is not among them.
        """
        for name, timing in self._timing.items():
            if timing.interval != interval:
                continue
            scheduler, optimizer = self.live[name], self._optimizers[self._optimizer_of[name]]
            values: list[float] = []
            if timing.metric is not None:
                if not all_metrics and timing.metric not in (metrics or {}):
                    continue
                if metrics is None or timing.metric not in metrics:
                    raise UserError(f"the metric of {name} is '{timing.metric}', which was not reported")
                values = [metrics[timing.metric]]
            trainer.hooks.call("on_before_scheduler_step", trainer, trainer.model, optimizer, scheduler)
            scheduler.step(*values)
            trainer.hooks.call("on_after_scheduler_step", trainer, trainer.model, optimizer, scheduler)

    def warn_of_lost_rate(self, step: int, steps_per_epoch: int | None, total_steps: int | None) -> None:
        """Warn once of a learning rate that falls by more than a million within the first epoch, its end apart."""
        if self._warned or not self.has(_STEP):
            return
        # The end of the epoch counts: in a short one nothing else is evaluated or logged before it.
        limits = (steps_per_epoch and steps_per_epoch + 1, total_steps and total_steps * 9 // 10)
        last = min((one for one in limits if one), default=None)
        if last is not None and step >= last:
            self._warned = True
            return
        for first, optimizer in zip(self._first_rates, self._optimizers.values(), strict=True):
            for before, group in zip(first, optimizer.param_groups, strict=False):
                if before > 0 and group["lr"] < before * 1e-6:
                    self._warned = True
                    names = ", ".join(name for name, one in self._timing.items() if one.interval == _STEP)
                    log.warning(
                        "the learning rate fell from %g to %g within the first epoch: %s steps after every optimizer "
                        "step. Is interval: epoch meant?",
                        before, float(group["lr"]), names,
                    )  # fmt: skip
                    return

    def state_dict(self) -> dict[str, Any]:
        """Each one's class, its state, and its state as it was made."""
        return {
            name: {"class": _class_name(one), "state": one.state_dict(), "made": self._made[name]}
            for name, one in self.live.items()
        }

    def fit(self, saved: Mapping[str, Any] | Sequence[Any]) -> Fitting:
        """The parts of saved states that do not fit, and a function that loads them. Old checkpoints hold a list of
        states without names.
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
            if _RENAMED.get(kind, kind) != _class_name(one):
                rows.append(f"{name}: it is a {_class_name(one)}, but the checkpoint has a {kind}")
                continue
            made = saved[name].get("made", _ABSENT)
            merger = _Merger(rows, notes)
            states[name] = merger.merged(name, "", saved[name]["state"], made, self._made[name])

        def load() -> None:
            for line in notes:
                log.info("schedule %s", line)
            for owner, optimizer in self._optimizers.items():
                own = [name for name in states if self._optimizer_of[name] == owner]
                rates = [group["lr"] for group in optimizer.param_groups]
                for name in own:
                    self.live[name].load_state_dict(states[name])
                if len(own) > 1:
                    # A scheduler that sets the rate on load does not know the factors of the others.
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        group["lr"] = rate

        return Fitting(rows, load)


class _Merger:
    """Merges a saved state and a new one: positions of the first, settings of the second."""

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
                # Private entries change with the library's version.
                merged[key] = value
            else:
                self._rows.append(f"{path}.{key}: not in this schedule")
        self._rows += [
            f"{path}.{key}: missing in the checkpoint" for key in now if key not in saved and not key.startswith("_")
        ]
        return merged


def _check(name: str, one: Any, optimizer: Optimizer) -> None:
    if isinstance(one, type):
        raise UserError(
            f"schedulers: expected a schedule, got the class {one.__name__}",
            where=name,
            cure=f"Give `lambda optimizer: {one.__name__}(optimizer, …)`.",
        )
    for method in ("step", "state_dict", "load_state_dict"):
        if not hasattr(one, method):
            raise UserError(f"schedulers: expected a schedule, got {type(one).__name__} without {method}", where=name)
    of = getattr(one, "optimizer", optimizer)
    if isinstance(of, torch.optim.Optimizer) and not isinstance(of, TaggedGroups) and of is not optimizer:
        raise UserError("schedulers: the schedule is of another optimizer than the trainer's", where=name)


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
    """A copy of plain data; anything else is kept as it is, and refused on saving."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (dict, Counter):
        return type(value)({key: _copied(one) for key, one in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return value


def _class_name(one: Any) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"
