"""The schedulers of a training by name: step them, save them, and resume them at their position.

A resumed schedule has the settings of the config and the position of the checkpoint. If settings have changed, the new
schedule makes its steps again up to that position. A schedule that depends on more than its steps, such as
ReduceLROnPlateau, keeps settings and position in one state. For these the state right after construction is saved too:
what has not changed since then is a setting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.errors import ConfigError, UserError
from trainer_cli.layout import class_name
from trainer_cli.metric_names import Mode, choose_mode, find_usual_mode
from trainer_cli.optim.optimizers import ONLY, TaggedGroups, argument_names
from trainer_cli.optim.scheduler_intervals import (
    METRIC,
    Scheduled,
    check_step,
    default_interval,
    is_function,
    step_function,
    takes_metric,
    update_function,
)
from trainer_cli.optim.scheduler_state import (
    ABSENT,
    LAST_RATE,
    copy_plain,
    copy_rates,
    digest_settings,
    is_same,
    put_rates,
    read_position,
)
from trainer_cli.patterns import check_name, did_you_mean
from trainer_cli.schema import SchedulerInterval
from trainer_cli.signatures import OPTIMIZER, names_optimizer, read_parameters
from trainer_cli.state import Fitting
from trainer_cli.steps import Duration, Unit
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer import Trainer, TrainingLoop

log = logging.getLogger(__name__)

NAME = "scheduler"
_MOVED = frozenset({"lr", "momentum", "betas"})
"""Settings of parameter groups that torch's schedulers change."""
_STEP = SchedulerInterval.step


def scheduler_factory(kind: Callable[..., Any], loop: TrainingLoop, **settings: Any) -> Callable[[Optimizer], Any]:
    """A function `optimizer -> schedule` with the settings of a config's `scheduler`.

    See `schedule_from`.
    """
    # The mode is added now, not when the optimizer is made, so that an error names this call.
    return schedule_from(kind, _add_mode(kind, settings, settings.get("metric"), NAME), loop, adds_mode=False)


def schedule_from(
    kind: Callable[..., Any],
    settings: Mapping[str, Any],
    loop: TrainingLoop,
    *,
    where: str = NAME,
    call: Callable[..., Any] | None = None,
    adds_mode: bool = True,
) -> Scheduled:
    """A schedule that is made of an optimizer later, when the length of the training is known.

    The settings `interval`, `metric` and `groups` are for `Scheduled`. Durations such as `1ep` are converted to a
    number of intervals. If `kind` takes `total_steps` and it is not set, it is the number of steps in `max_duration`.

    Args:
        where: the settings' place in the config, for errors.
        call: makes the schedule with the arguments of `kind`; None: `kind`.
        adds_mode: set the usual mode of the metric if `kind` takes a mode and none is set.
    """
    arguments = {key: value for key, value in settings.items() if key not in ("interval", "metric", "groups")}
    metric = settings.get("metric")
    interval = settings.get("interval") or default_interval(kind, metric)

    def make(optimizer: Optimizer) -> Any:
        """Make the schedule of an optimizer: `kind` with its settings in steps."""
        settings_with_mode = _add_mode(kind, arguments, metric, where) if adds_mode else arguments
        converted = _convert_settings(kind, settings_with_mode, loop, interval, where)
        if names_optimizer(read_parameters(kind)):
            return (call or kind)(**{OPTIMIZER: optimizer}, **converted)
        return (call or kind)(optimizer, **converted)

    return Scheduled(make, interval, metric, settings.get("groups"))


def _add_mode(kind: Callable[..., Any], settings: Mapping[str, Any], metric: str | None, where: str) -> dict[str, Any]:
    """The settings of a schedule, with the usual mode of its metric if it takes a mode and none is set.

    Raises:
        ConfigError: the usual mode of a metric of this name is not known.
    """
    # Torch's own default is min, even for an accuracy.
    if settings.get("mode") in (None, Mode.auto) and takes_metric(kind) and "mode" in argument_names(kind):
        return {**settings, "mode": choose_mode(metric or METRIC, Mode.auto, f"{where}.mode").value}
    return dict(settings)


def _convert_settings(
    kind: Callable[..., Any], settings: Mapping[str, Any], loop: TrainingLoop, interval: str, where: str
) -> dict[str, Any]:
    """The settings of a schedule with durations as a number of intervals.

    Raises:
        ConfigError: a duration is not a whole number of intervals, or the length of the training is needed and unknown.
    """
    converted = {
        key: _count_intervals(value, f"{where}.{key}", loop, interval, where) for key, value in settings.items()
    }
    if "total_steps" not in converted and "total_steps" in argument_names(kind):
        duration = Duration.parse(loop.settings.max_duration)
        if loop.planned_steps is None and duration.unit is Unit.STEP:
            raise UserError(
                "the schedule needs the length of the run, and the loop given to scheduler_factory is not of "
                "this trainer",
                where=where,
                cure="Give both the same TrainingLoop.",
            )
        if loop.planned_steps is None:
            raise ConfigError(
                f"the schedule needs the number of steps, and loop.max_duration={loop.settings.max_duration} "
                "does not give it",
                location=where,
                hint=f"{loop.cure_by_steps(duration)} loop.max_duration in steps, or set {where}.total_steps.",
            )
        converted["total_steps"] = loop.planned_steps
        if interval == SchedulerInterval.epoch and loop.planned_epoch_steps is not None:
            # Rounded up: the last epoch may be cut short.
            converted["total_steps"] = -(-loop.planned_steps // loop.planned_epoch_steps)
    return converted


def _count_intervals(value: Any, key: str, loop: TrainingLoop, interval: str, where: str) -> Any:
    """Convert a duration string to a number of intervals. Other values are returned as they are.

    Args:
        key: the setting, for errors.
        where: the place of all settings in the config, for errors.

    Raises:
        ConfigError: it is not a whole number of intervals.
    """
    if not isinstance(value, str):
        return value
    try:
        duration = Duration.parse(value)
    except ValueError:
        return value
    counts_epochs = interval == SchedulerInterval.epoch
    if counts_epochs and duration.unit is Unit.EPOCH and duration.value == int(duration.value):
        return int(duration.value)
    count = loop.steps_of(duration)
    epoch_steps = loop.planned_epoch_steps if counts_epochs else None
    if duration.unit is Unit.RUN and count is not None and epoch_steps:
        # Rounded up: the last epoch may be cut short.
        return -(-count // epoch_steps)
    if interval != _STEP:
        if count is None or epoch_steps is None or count % epoch_steps:
            message = f"{key} is {value}, but the schedule steps once an {interval} and counts these"
            raise ConfigError(message, location=key, hint=f"Give their number, or set {where}.interval=step.")
        return count // epoch_steps
    return loop.require_steps(f"{key} is {value}", duration, key)


def name_schedulers(schedulers: Any, optimizers: Collection[str] = (ONLY,)) -> dict[str, tuple[str, Any]]:
    """Give each scheduler a name and an optimizer. Returns name -> (optimizer, schedule or function that makes it).

    With one optimizer, a mapping keeps its own names; otherwise the first is `scheduler`, the next `scheduler_2`. With
    several optimizers, a single function is called for each of them; a mapping has the names of the optimizers as keys,
    and as values what one optimizer may have.

    Raises:
        UserError: a key of the mapping is not an optimizer.
    """
    if list(optimizers) == [ONLY]:
        return {name: (ONLY, schedule) for name, schedule in _number_schedules(schedulers, NAME).items()}
    if not isinstance(schedulers, Mapping):
        schedule = schedulers.schedule if isinstance(schedulers, Scheduled) else schedulers
        if schedule is not None and not is_function(schedule):
            raise UserError("schedulers: there are several optimizers", cure="Give a mapping of their names.")
        schedulers = dict.fromkeys(optimizers, schedulers)
    named: dict[str, tuple[str, Any]] = {}
    for optimizer, schedules in schedulers.items():
        check_name("optimizer", str(optimizer), optimizers, "schedulers")
        # Keys of a mapping may repeat from optimizer to optimizer.
        prefix = f"{optimizer}." if isinstance(schedules, Mapping) else ""
        for name, schedule in _number_schedules(schedules, str(optimizer)).items():
            named[f"{prefix}{name}"] = str(optimizer), schedule
    return named


def _number_schedules(schedules: Any, name: str) -> dict[str, Any]:
    """The schedules of an optimizer by name: the keys of a mapping, else `name`, `name_2` and so on."""
    if isinstance(schedules, Mapping):
        return {str(key): schedule for key, schedule in schedules.items() if schedule is not None}
    sequence = schedules if isinstance(schedules, list | tuple) else [schedules]
    present = [schedule for schedule in sequence if schedule is not None]
    return {name if index == 0 else f"{name}_{index + 1}": schedule for index, schedule in enumerate(present)}


@dataclass
class _Resume:
    """What a resume will do with the schedulers."""

    rows: list[str] = field(default_factory=list)
    """A line for each fault."""
    notes: list[str] = field(default_factory=list)
    """A line for each changed setting or pace."""
    states: dict[str, Any] = field(default_factory=dict)
    """Scheduler -> state to load."""
    rates: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Optimizer -> rates to set, for those with schedules that made their steps again."""
    changed: set[str] = field(default_factory=set)
    """Optimizers with a schedule whose settings have changed."""


class Schedulers:
    """The schedulers of a training, each with the interval at which it steps, in the order of the config."""

    def __init__(self, schedulers: Any = None, optimizers: Mapping[str, Optimizer] | None = None) -> None:
        self._optimizers = dict(optimizers or {})
        self.live: dict[str, Any] = {}
        """Name -> schedule."""
        self._timing: dict[str, Scheduled] = {}
        """Name -> interval and metric."""
        self._optimizer_of: dict[str, str] = {}
        self._initial_states: dict[str, Any] = {}
        self._settings: dict[str, str] = {}
        """Name -> digest of its settings."""
        # Read before a schedule is made, which may lower them for a warm-up.
        self._peak_rates = {name: rates_of(optimizer) for name, optimizer in self._optimizers.items()}
        self._step_functions: dict[str, Callable[..., Any]] = {}
        """Name -> function that steps the schedule."""
        self._warned = False
        named = name_schedulers(schedulers, self._optimizers) if self._optimizers else {}
        for name, (owner, schedule) in named.items():
            scheduled = schedule if isinstance(schedule, Scheduled) else Scheduled(schedule)
            live = scheduled(self._optimizers[owner])
            if isinstance(live, Scheduled):
                # A function may return a schedule with its interval. That it came from a function stays known.
                scheduled, live = replace(live, schedule=scheduled.schedule), live(self._optimizers[owner])
            _check_schedule(name, live, self._optimizers[owner])
            self.live[name], self._step_functions[name] = live, step_function(live)
            self._timing[name] = scheduled.resolve(live, name)
            _warn_of_mode(name, live, self._timing[name].metric)
            self._optimizer_of[name] = owner
            self._initial_states[name] = copy_plain(live.state_dict())
            self._settings[name] = digest_settings(live)
        self._initial_rates = {name: copy_rates(optimizer) for name, optimizer in self._optimizers.items()}

    def of(self, optimizer: str) -> list[Any]:
        """The schedules of an optimizer."""
        return [self.live[name] for name, owner in self._optimizer_of.items() if owner == optimizer]

    def moved_settings(self, optimizer: str) -> frozenset[str]:
        """The settings of an optimizer's parameter groups that its schedules may change."""
        return _MOVED if self.of(optimizer) else frozenset()

    def functions_of_steps(self, optimizer: str) -> list[tuple[Any, Callable[[int], Any]]]:
        """Each schedule of an optimizer that steps after a step of the run, and a function of the number of steps."""
        functions = []
        for name, schedule in self.live.items():
            function = update_function(schedule)
            if function is None and self._timing[name].interval == _STEP:
                function = self._step_functions[name]
            if function is not None and self._optimizer_of[name] == optimizer:
                functions.append((schedule, function))
        return functions

    def has(self, interval: str) -> bool:
        """Whether a schedule steps at this interval."""
        return any(timing.interval == interval for timing in self._timing.values())

    def wanted_metrics(self) -> dict[str, str]:
        """Setting -> metric that an evaluation, or the training, must report."""
        return {
            f"the metric of {name}": timing.metric for name, timing in self._timing.items() if timing.metric is not None
        }

    def step(
        self,
        trainer: Trainer,
        interval: str,
        metrics: Mapping[str, float] | None = None,
        *,
        all_metrics: bool = True,
        epoch: int | None = None,
    ) -> None:
        """Step the schedules of an interval other than `step`, each between its hooks.

        Args:
            epoch: the number of epochs, for schedules that take it; None: the epoch of the progress.
            metrics: values of the evaluation or the log at which they step.
            all_metrics: False if only some loaders were evaluated; a schedule whose metric is missing then does not
                step.

        Raises:
            UserError: the metric of a schedule is missing.
        """
        for name, timing in self._timing.items():
            # A schedule with `step_update` counts epochs too, whatever its interval.
            counts_epochs = interval == SchedulerInterval.epoch and update_function(self.live[name])
            if timing.interval != interval and not counts_epochs:
                continue
            scheduler, optimizer = self.live[name], self._optimizers[self._optimizer_of[name]]
            value: float = trainer.progress.epoch if epoch is None else epoch
            if timing.metric is not None:
                if not all_metrics and timing.metric not in (metrics or {}):
                    continue
                if metrics is None or timing.metric not in metrics:
                    raise UserError(f"the metric of {name} is '{timing.metric}', which was not reported")
                value = metrics[timing.metric]
            trainer.hooks.call("on_before_scheduler_step", trainer, trainer.model, optimizer, scheduler)
            self._step_functions[name](value)
            trainer.hooks.call("on_after_scheduler_step", trainer, trainer.model, optimizer, scheduler)

    def warn_of_lost_rate(self, step: int, steps_per_epoch: int | None, total_steps: int | None) -> None:
        """Warn once if a learning rate falls by a factor of a million within the first epoch, before its end."""
        if self._warned or not self.has(_STEP):
            return
        # Up to the last step of the epoch, before which a short epoch has no log; not in the last tenth of the run,
        # because schedules may end at zero.
        limits = (steps_per_epoch and steps_per_epoch + 1, total_steps and total_steps * 9 // 10)
        limit = min((count for count in limits if count), default=None)
        if limit is not None and step >= limit:
            self._warned = True
            return
        for owner, optimizer in self._optimizers.items():
            names = [
                name
                for name, timing in self._timing.items()
                if timing.interval == _STEP and self._optimizer_of[name] == owner
            ]
            for peak, rate in zip(self._peak_rates[owner], rates_of(optimizer), strict=False):
                is_lost = peak is not None and rate is not None and rate < peak * 1e-6
                if names and is_lost:
                    self._warned = True
                    log.warning(
                        "the learning rate%s fell from %g to %g within the first epoch, at step %d%s: %s moves once "
                        "after each step. Is interval: epoch meant, or a schedule as long as the run (1dur)?",
                        "" if owner == ONLY else f" of {owner}", peak, rate, step,
                        "" if total_steps is None else f" of {total_steps}", ", ".join(names),
                    )  # fmt: skip
                    return

    def state_dict(self) -> dict[str, Any]:
        """Name -> class, interval, state, initial state and digest of the settings."""
        return {
            name: {
                "class": class_name(schedule),
                "interval": self._timing[name].interval,
                "state": schedule.state_dict(),
                "made": self._initial_states[name],
                "settings": self._settings[name],
            }
            for name, schedule in self.live.items()
        }

    def fit(
        self,
        saved: Mapping[str, Any] | Sequence[Any],
        progress: Mapping[str, Any] | None = None,
        steps_per_epoch: int | None = None,
        *,
        with_rates: bool = True,
    ) -> Fitting:
        """Compare saved states with these schedulers. Returns the faults, and a function that loads the states.

        Args:
            saved: result of `state_dict`. Old checkpoints hold a list of states without names.
            progress: progress of the checkpoint; a schedule whose interval has changed is brought to this position.
            steps_per_epoch: orders the steps of schedules with different intervals.
            with_rates: whether the optimizers have loaded the rates that the schedules had set.
        """
        resume = _Resume()
        if not isinstance(saved, Mapping):
            if len(saved) != len(self.live):
                resume.rows.append(f"the checkpoint has {len(saved)}, but here are {len(self.live)}")
            saved = {name: {"state": state} for name, state in zip(self.live, saved, strict=False)}
        else:
            resume.rows += [f"{name}: missing in the checkpoint" for name in self.live if name not in saved]
            for name in saved:
                if name not in self.live:
                    near = did_you_mean(name, self.live)
                    resume.rows.append(f"{name}: not in this run{'.' + near if near else ''}")
        for owner in self._optimizers:
            self._fit_optimizer(owner, saved, progress or {}, steps_per_epoch, resume)
        return Fitting(resume.rows, lambda: self._load(resume, saved, with_rates=with_rates))

    def _fit_optimizer(
        self,
        owner: str,
        saved: Mapping[str, Any],
        progress: Mapping[str, Any],
        steps_per_epoch: int | None,
        resume: _Resume,
    ) -> None:
        """Find the states to load into the schedules of an optimizer: all by replaying their steps, or all by merging.

        Adds them, and faults, to `resume`.
        """
        # Not above: only a resume needs it.
        from trainer_cli.optim.scheduler_resume import Merger, is_replayable

        names = self._fitting_names(owner, saved, resume.rows)
        for name in names:
            moves = (read_position(saved[name]["state"]) or 0) - (read_position(saved[name].get("made")) or 0)
            steps = progress.get("step")
            # Earlier versions moved it with each step of its optimizer, of which a step of the run may have several.
            if self._timing[name].interval == _STEP and steps is not None and moves > steps:
                resume.notes.append(
                    f"{name}: it has moved {format_count(moves, 'time')} in {format_count(steps, 'step')} of the run; "
                    "from here on it moves once a step"
                )
        if any(self._is_changed(name, saved[name]) for name in names):
            resume.changed.add(owner)
            # A schedule that was passed as an object may have made steps before this training.
            if all(is_replayable(self.live[name]) and not read_position(self._initial_states[name]) for name in names):
                counts = self._count_steps(names, saved, progress, resume.rows)
                if len(counts) == len(names):
                    self._replay(owner, counts, steps_per_epoch, resume)
                return
            resume.rows += [fault for name in names if (fault := self._interval_fault(name, saved[name]))]
        merger = Merger(resume.rows, resume.notes)
        for name in names:
            initial = saved[name].get("made", ABSENT)
            resume.states[name] = merger.merge(name, "", saved[name]["state"], initial, self._initial_states[name])

    def _load(self, resume: _Resume, saved: Mapping[str, Any], *, with_rates: bool) -> None:
        """Load the states and rates that `fit` has found, and log what has changed; `with_rates` as in `fit`."""
        for line in resume.notes:
            log.info("schedule %s", line)
        for owner, optimizer in self._optimizers.items():
            names = [name for name in resume.states if self._optimizer_of[name] == owner]
            loaded_rates = copy_rates(optimizer)
            for name in names:
                self.live[name].load_state_dict(resume.states[name])
            is_same_schedule = owner not in resume.changed and all("settings" in saved[name] for name in names)
            if with_rates and (len(names) > 1 or is_same_schedule):
                # A scheduler that sets the rate on load knows neither the factors of the other schedulers nor the
                # rates that a callback has set.
                put_rates(optimizer, loaded_rates)
            put_rates(optimizer, resume.rates.get(owner, ()))
            if owner in resume.changed:
                self._report_change(owner, saved, exact=owner in resume.rates)

    def _fitting_names(self, owner: str, saved: Mapping[str, Any], rows: list[str]) -> list[str]:
        """The schedules of an optimizer that the checkpoint also has, with the same class."""
        names = []
        for name, optimizer in self._optimizer_of.items():
            if optimizer != owner or name not in saved:
                continue
            kind = class_name(self.live[name])
            saved_kind = saved[name].get("class", kind)
            if saved_kind == kind:
                names.append(name)
            else:
                rows.append(f"{name}: it is a {kind}, but the checkpoint has a {saved_kind}")
        return names

    def _is_changed(self, name: str, saved: Mapping[str, Any]) -> bool:
        """Whether the settings of a schedule differ from those in the checkpoint."""
        if saved.get("interval", self._timing[name].interval) != self._timing[name].interval:
            return True
        if "settings" in saved:
            return bool(saved["settings"] != self._settings[name])
        # Old checkpoints have no digest, and the oldest no initial state.
        return "made" in saved and not is_same(saved["made"], self._initial_states[name])

    def _interval_fault(self, name: str, saved: Mapping[str, Any]) -> str | None:
        """A line if a schedule has another interval than in the checkpoint; else None."""
        saved_interval, interval = saved.get("interval"), self._timing[name].interval
        if saved_interval in (None, interval):
            return None
        return f"{name}: its interval was {saved_interval} and is {interval} now"

    def _count_steps(
        self, names: Sequence[str], saved: Mapping[str, Any], progress: Mapping[str, Any], rows: list[str]
    ) -> dict[str, int]:
        """The number of steps that each schedule has made. A line is added to `rows` where it is unknown."""
        counts = {}
        for name in names:
            count = read_position(saved[name]["state"])
            if (fault := self._interval_fault(name, saved[name])) is not None:
                # It is brought to the progress of the checkpoint.
                count = progress.get(str(self._timing[name].interval))
                of_metrics = (SchedulerInterval.evaluation, SchedulerInterval.log)
                if saved[name]["interval"] in of_metrics or count is None:
                    # Evaluations and logs are not counted in the progress.
                    rows.append(f"{fault}, which says nothing of its position")
                    continue
            if count is None:
                rows.append(f"{name}: its position is not in the checkpoint")
                continue
            counts[name] = count
        return counts

    def _replay(self, owner: str, counts: Mapping[str, int], steps_per_epoch: int | None, resume: _Resume) -> None:
        """Find the states and rates of an optimizer's schedules after these numbers of steps.

        The schedules make the steps and are then restored: nothing is loaded before all faults are known.
        """
        from trainer_cli.optim.scheduler_resume import Replay, replay

        optimizer, longest = self._optimizers[owner], max(counts.values())
        present_states = {name: copy_plain(self.live[name].state_dict()) for name in counts}
        present_rates = copy_rates(optimizer)
        periods: dict[str | None, float] = {SchedulerInterval.step: 1.0}
        if steps_per_epoch is not None:
            periods[SchedulerInterval.epoch] = float(steps_per_epoch)
        replays = []
        for name, count in counts.items():
            interval = str(self._timing[name].interval)
            # Evaluations and logs are taken to be evenly spaced.
            replays.append(Replay(self.live[name], interval, count, periods.get(interval, longest / max(count, 1))))
        try:
            for name in counts:
                self.live[name].load_state_dict(copy_plain(self._initial_states[name]))
            put_rates(optimizer, self._initial_rates[owner])
            replay(replays)
            resume.states |= {name: copy_plain(self.live[name].state_dict()) for name in counts}
            resume.rates[owner] = copy_rates(optimizer)
        except Exception as error:
            # A user's schedule may raise anything, and torch's OneCycleLR does beyond its end.
            resume.rows.append(
                f"{', '.join(counts)}: cannot make {format_count(longest, 'step')}: {type(error).__name__}: {error}"
            )
        finally:
            for name, state in present_states.items():
                self.live[name].load_state_dict(state)
            put_rates(optimizer, present_rates)

    def _report_change(self, owner: str, saved: Mapping[str, Any], *, exact: bool) -> None:
        """Log the rates before and after a change of settings; `exact`: whether its schedules made all steps again."""
        names = [name for name in saved if self._optimizer_of.get(name) == owner]
        states = [saved[name]["state"] for name in names]
        saved_rates = [state[LAST_RATE] for state in states if isinstance(state, Mapping) and LAST_RATE in state]
        origin = ""
        if saved_rates:
            # The last schedule has set the rates.
            origin = f" from {', '.join(f'{float(rate):g}' for rate in dict.fromkeys(saved_rates[-1]))}"
        rates = [rate for rate in rates_of(self._optimizers[owner]) if rate is not None]
        present = ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
        message = f"{', '.join(names)}: settings have changed; the learning rate goes{origin} to {present}"
        if exact:
            log.info("%s, as in a run that had these settings from its start", message)
        else:
            log.warning("%s. It depends on more than the step, so no uninterrupted run has this rate", message)


def rates_of(optimizer: Optimizer) -> list[float | None]:
    """The learning rate of each parameter group; None for one that has no number, as of an optimizer with its own."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [float(rate) if isinstance(rate, int | float | torch.Tensor) else None for rate in rates]


def _warn_of_mode(name: str, schedule: Any, metric: str | None) -> None:
    """Warn of a schedule whose mode is not the usual one of its metric: torch's mode is min by default."""
    usual, mode = find_usual_mode(metric or ""), getattr(schedule, "mode", None)
    if usual is not None and mode in (Mode.min, Mode.max) and mode != usual:
        log.warning(
            "%s: its mode is %s, but of %s the %s value is usually best (mode=%s)",
            name, mode, metric, "largest" if usual is Mode.max else "smallest", usual,
        )  # fmt: skip


def _check_schedule(name: str, schedule: Any, optimizer: Optimizer) -> None:
    """Raise UserError for a value that is not a schedule of this optimizer."""
    if isinstance(schedule, type):
        raise UserError(
            f"schedulers: expected a schedule, got the class {schedule.__name__}",
            where=name,
            cure=f"Give `lambda optimizer: {schedule.__name__}(optimizer, …)`.",
        )
    for method in ("step", "state_dict", "load_state_dict"):
        if not hasattr(schedule, method):
            kind = type(schedule).__name__
            cure = "A schedule has step, state_dict and load_state_dict, as those of torch.optim.lr_scheduler."
            if isinstance(schedule, list | tuple | Mapping):
                cure = f"Give a {kind} of functions, each of which returns one schedule."
            raise UserError(f"schedulers: expected a schedule, got {kind} without {method}", where=name, cure=cure)
    check_step(schedule, name)
    owner = getattr(schedule, "optimizer", optimizer)
    if isinstance(owner, torch.optim.Optimizer) and not isinstance(owner, TaggedGroups) and owner is not optimizer:
        raise UserError("schedulers: the schedule is of another optimizer than the trainer's", where=name)
