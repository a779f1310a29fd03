"""The schedulers of a training by name, saved with their settings and resumed at their position.

A schedule's settings are those of the config now, its position is the checkpoint's. Where settings have changed, the
new schedule makes its steps again up to that position. One that depends on more than its steps, such as
ReduceLROnPlateau, has both in one state: the state as it was when the scheduler was made is saved too, and what has
not moved since is a setting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.checkpoint.model_state import Fitting
from trainer_cli.core.intervals import Duration, Unit
from trainer_cli.core.naming import class_name
from trainer_cli.core.patterns import did_you_mean
from trainer_cli.core.schema import SchedulerInterval
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.trainer.optimizers import ONLY, TaggedGroups, argument_names
from trainer_cli.trainer.scheduler_intervals import Scheduled, is_function, natural_interval
from trainer_cli.trainer.scheduler_resume import (
    ABSENT,
    LAST_RATE,
    Merger,
    Replayed,
    copied,
    copy_rates,
    digest_settings,
    is_replayable,
    is_same,
    put_rates,
    read_position,
    replay,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop

log = logging.getLogger(__name__)

NAME = "scheduler"
MOVED = frozenset({"lr", "momentum", "betas"})
"""The settings of parameter groups that torch's schedulers change."""
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
    count = loop.steps_of(duration)
    if interval == SchedulerInterval.epoch and duration.unit is Unit.RUN and count is not None and loop.steps_per_epoch:
        # A part of an epoch counts as a whole one.
        return -(-count // loop.steps_per_epoch)
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
        self._settings: dict[str, str] = {}
        self._first_rates = [[float(group["lr"]) for group in one.param_groups] for one in self._optimizers.values()]
        self._warned = False
        for name, (optimizer, one) in by_name(given, self._optimizers).items() if self._optimizers else ():
            scheduled = one if isinstance(one, Scheduled) else Scheduled(one)
            live = scheduled(self._optimizers[optimizer])
            _check(name, live, self._optimizers[optimizer])
            self.live[name] = live
            self._timing[name] = scheduled.settled(live, name)
            self._made[name] = copied(live.state_dict())
            self._optimizer_of[name] = optimizer
            self._settings[name] = digest_settings(live)
        self._made_rates = {name: copy_rates(optimizer) for name, optimizer in self._optimizers.items()}

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
        """Setting -> metric that an evaluation, or the training, must report."""
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
            metrics: of the evaluation or the log that was made just now.
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
        """Each one's class and interval, its state, its state as it was made, and a digest of its settings."""
        return {
            name: {
                "class": class_name(one),
                "interval": self._timing[name].interval,
                "state": one.state_dict(),
                "made": self._made[name],
                "settings": self._settings[name],
            }
            for name, one in self.live.items()
        }

    def fit(
        self,
        saved: Mapping[str, Any] | Sequence[Any],
        progress: Mapping[str, Any] | None = None,
        steps_per_epoch: int | None = None,
        *,
        with_rates: bool = True,
    ) -> Fitting:
        """The parts of saved states that do not fit, and a function that loads them. Old checkpoints hold a list of
        states without names.

        Args:
            progress: of the checkpoint; a schedule that has another interval now is brought to this position.
            steps_per_epoch: orders the steps of schedules of several intervals.
            with_rates: whether the optimizers have loaded the rates that the schedules had set.
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
        rates: dict[str, list[dict[str, Any]]] = {}
        changed: set[str] = set()
        for owner in self._optimizers:
            names = self._fitting_names(owner, saved, rows)
            if not any(self._is_changed(name, saved[name]) for name in names):
                states |= {name: self._merge(name, saved[name], rows, notes) for name in names}
                continue
            changed.add(owner)
            # A schedule that was given as an object may have made steps before this training.
            if all(is_replayable(self.live[name]) and not read_position(self._made[name]) for name in names):
                counts = self._counts(names, saved, progress or {}, rows)
                if len(counts) == len(names):
                    new_states, rates[owner] = self._replayed(owner, counts, steps_per_epoch, rows)
                    states |= new_states
            else:
                rows += [fault for name in names if (fault := self._interval_fault(name, saved[name]))]
                states |= {name: self._merge(name, saved[name], rows, notes) for name in names}

        def load() -> None:
            for line in notes:
                log.info("schedule %s", line)
            for owner, optimizer in self._optimizers.items():
                names = [name for name in states if self._optimizer_of[name] == owner]
                loaded = copy_rates(optimizer)
                for name in names:
                    self.live[name].load_state_dict(states[name])
                is_same_schedule = owner not in changed and all("settings" in saved[name] for name in names)
                if with_rates and (len(names) > 1 or is_same_schedule):
                    # A scheduler that sets the rate on load knows neither the factors of the others nor what a
                    # callback has set.
                    put_rates(optimizer, loaded)
                put_rates(optimizer, rates.get(owner, ()))
                if owner in changed:
                    self._report_change(owner, saved, exact=owner in rates)

        return Fitting(rows, load)

    def _fitting_names(self, owner: str, saved: Mapping[str, Any], rows: list[str]) -> list[str]:
        """The schedules of an optimizer that the checkpoint has as well, of the same class."""
        names = []
        for name in (name for name, optimizer in self._optimizer_of.items() if optimizer == owner and name in saved):
            here = class_name(self.live[name])
            kind = saved[name].get("class", here)
            if kind == here:
                names.append(name)
            else:
                rows.append(f"{name}: it is a {here}, but the checkpoint has a {kind}")
        return names

    def _is_changed(self, name: str, saved: Mapping[str, Any]) -> bool:
        """Whether a schedule was made with other settings than the one in the checkpoint."""
        if saved.get("interval", self._timing[name].interval) != self._timing[name].interval:
            return True
        if "settings" in saved:
            return bool(saved["settings"] != self._settings[name])
        return "made" in saved and not is_same(saved["made"], self._made[name])

    def _merge(self, name: str, saved: Mapping[str, Any], rows: list[str], notes: list[str]) -> Any:
        made = saved.get("made", ABSENT)
        return Merger(rows, notes).merged(name, "", saved["state"], made, self._made[name])

    def _interval_fault(self, name: str, saved: Mapping[str, Any]) -> str | None:
        before, now = saved.get("interval"), self._timing[name].interval
        return None if before in (None, now) else f"{name}: its interval was {before} and is {now} now"

    def _counts(
        self, names: Sequence[str], saved: Mapping[str, Any], progress: Mapping[str, Any], rows: list[str]
    ) -> dict[str, int]:
        """How many steps each schedule has made; what is not known is added to `rows`."""
        counts = {}
        for name in names:
            count = read_position(saved[name]["state"])
            if (fault := self._interval_fault(name, saved[name])) is not None:
                count = progress.get(str(self._timing[name].interval))
                of_metrics = (SchedulerInterval.evaluation, SchedulerInterval.log)
                if saved[name]["interval"] in of_metrics or count is None:
                    rows.append(f"{fault}, which says nothing of its position")
                    continue
            if count is None:
                rows.append(f"{name}: its position is not in the checkpoint")
                continue
            counts[name] = count
        return counts

    def _replayed(
        self, owner: str, counts: Mapping[str, int], steps_per_epoch: int | None, rows: list[str]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The states of an optimizer's schedules after so many steps, and its rates; nothing is changed."""
        optimizer, longest = self._optimizers[owner], max(counts.values())
        states = {name: copied(self.live[name].state_dict()) for name in counts}
        rates = copy_rates(optimizer)
        periods: dict[str | None, float] = {SchedulerInterval.step: 1.0}
        if steps_per_epoch is not None:
            periods[SchedulerInterval.epoch] = float(steps_per_epoch)
        steps = []
        for name, count in counts.items():
            interval = str(self._timing[name].interval)
            steps.append(Replayed(self.live[name], interval, count, periods.get(interval, longest / max(count, 1))))
        try:
            for name in counts:
                self.live[name].load_state_dict(copied(self._made[name]))
            put_rates(optimizer, self._made_rates[owner])
            replay(steps)
            return {name: copied(self.live[name].state_dict()) for name in counts}, copy_rates(optimizer)
        except Exception as error:
            # A schedule of the user, or of torch beyond its end.
            rows.append(f"{', '.join(counts)}: cannot make {longest} steps: {type(error).__name__}: {error}")
            return {}, []
        finally:
            for name, state in states.items():
                self.live[name].load_state_dict(state)
            put_rates(optimizer, rates)

    def _report_change(self, owner: str, saved: Mapping[str, Any], *, exact: bool) -> None:
        """Log the rates before and after a change of settings."""
        names = [name for name in saved if self._optimizer_of.get(name) == owner]
        states = [state for name in names if isinstance(state := saved[name]["state"], Mapping)]
        last = next((state[LAST_RATE] for state in reversed(states) if LAST_RATE in state), None)
        now = [float(group["lr"]) for group in self._optimizers[owner].param_groups]
        before = "" if last is None else f" from {', '.join(f'{float(rate):g}' for rate in dict.fromkeys(last))}"
        after = ", ".join(f"{rate:g}" for rate in dict.fromkeys(now))
        what = f"{', '.join(names)}: settings have changed; the learning rate goes{before} to {after}"
        if exact:
            log.info("schedule %s, that of a run with these settings from its beginning", what)
        else:
            log.warning("schedule %s. It depends on more than its steps, so no straight run has this rate", what)


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
