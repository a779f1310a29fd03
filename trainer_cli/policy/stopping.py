"""When and why a training stops, and what lets a finished run train further: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainer_cli.schema import LoopConfig, TrainConfig
from trainer_cli.steps import Duration, Interval, Progress, RunStatus

_HARD_STOP = "hard_stop"
_MAX_DURATION = "max_duration of "
"""How reasons begin, by which they are recognised in the files of a run."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of a fit and its reason. Not `finished`: the run can be resumed."""

    reason: str
    finished: bool
    by: str | None = None
    """The name of the callback that requested it, if it said so."""
    rule: tuple[str | float, ...] = ()
    """The settings of that callback's decision, from `Callback.end_rule`."""
    is_part: bool = False
    """Finished is only a part of the run: a later fit continues as if there had been no stop."""
    comes_again: bool = False
    """Not finished, and the same command would end here again."""

    @property
    def is_end(self) -> bool:
        """Whether the whole run ends: only then a last record, evaluation and regular checkpoint are made."""
        return self.finished and not self.is_part

    @property
    def status(self) -> RunStatus:
        """How a run ends by it."""
        return RunStatus.finished if self.finished else RunStatus.stopped


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the run may last. `max_time_s` bounds this process, in seconds."""

    max_duration: Interval
    hard_stop: Interval | None = None
    min_duration: Interval | None = None
    """Before it, a request to finish the run is deferred."""
    max_time_s: float | None = None

    def why_stop(self, now: Progress, *, process_s: float, stop_request: Stop | None) -> Stop | None:
        """Why the training ends at this step, or None. A complete run is finished, even if a stop was requested."""
        # The order decides which reason is recorded: a complete run before a part of it, a part before a stop.
        if self.max_duration.reached(now):
            return Stop(f"{_MAX_DURATION}{self.max_duration.duration} reached", finished=True)
        if stop_request is not None and stop_request.finished:
            return stop_request
        if self.hard_stop is not None and self.hard_stop.reached(now):
            return Stop(f"{_HARD_STOP} at {self.hard_stop.duration}", finished=True, is_part=True)
        if stop_request is not None:
            return stop_request
        if self.max_time_s is not None and process_s >= self.max_time_s:
            return Stop(f"max_time of {self.max_time_s:g}s used up", finished=False)
        return None

    def next_step(self, now: Progress, *, holds: bool = False) -> int:
        """The earliest step after `now` at which `why_stop` may return a reason without a request.

        With `holds`, a request is deferred: the step at which it must be handled counts too.
        """
        # Time may run out at any step.
        if self.max_time_s is not None:
            return now.step + 1
        min_duration = self.min_duration if holds else None
        limits = [limit for limit in (self.max_duration, self.hard_stop, min_duration) if limit is not None]
        # A limit that is not known in steps may be reached at any step.
        return min(now.step + 1 if limit.end is None else limit.end for limit in limits)


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """Why a run is finished, as its files record it."""

    reason: str
    by: str | None = None
    """The callback that decided it; None: none did, or it is unknown."""
    is_known: bool = False
    """Whether `by` is recorded. A checkpoint alone does not record it outside its states."""

    @classmethod
    def of(cls, reason: str, summary: Mapping[str, Any]) -> RecordedEnd:
        """The end for this reason, with the callback that the summary of the last attempt names for the same reason."""
        is_same_end = summary.get("status") == RunStatus.finished and summary.get("reason") == reason
        by = summary.get("ended_by") if is_same_end else None
        return cls(reason, by, is_known=is_same_end and "ended_by" in summary)

    def is_passed(self, old: LoopConfig, new: LoopConfig) -> bool:
        """Whether the new settings let the run train further: a longer `max_duration`, or, if `hard_stop` has ended it,
        another `hard_stop`."""
        # Any change: whether the new one is later may depend on the length of an epoch.
        if self.reason.startswith(_HARD_STOP) and old.hard_stop != new.hard_stop:
            return True
        old_duration, new_duration = Duration.parse(old.max_duration), Duration.parse(new.max_duration)
        return new_duration.unit is not old_duration.unit or new_duration.value > old_duration.value

    def may_reopen(self, old: TrainConfig, new: TrainConfig) -> bool:
        """Whether a run may train further: see `is_passed`; or the callback that decided the end has other settings.

        Other settings may still mean the same end, which is known once the callback is made: see `request_again`.
        """
        if self.is_passed(old.loop, new.loop):
            return True
        if self.reason.startswith((_MAX_DURATION, _HARD_STOP)):
            return False
        if not self.is_known:
            return old.callbacks != new.callbacks
        return self.by is not None and old.callbacks.get(self.by) != new.callbacks.get(self.by)

    def how_to_reopen(self) -> str:
        """What reopens the run, for the user."""
        if self.reason.startswith(_HARD_STOP):
            return "To train further, give a later loop.hard_stop, or loop.hard_stop=null"
        if self.by is None:
            return "To train further, give a larger loop.max_duration"
        settings = f"change its settings with 'resume_allow=[callbacks.{self.by}.*]'"
        return (
            f"callbacks.{self.by} has ended it. To train further, {settings}: with a larger loop.max_duration alone it "
            "may soon end the run again"
        )


class Occasion(StrEnum):
    """The event at which the policy is applied. It is applied once a step, with the strongest occasion that fits."""

    pre_train = "pre_train"
    step = "step"
    final = "final"
    part = "part"
    """The end of a part of the run, by `loop.hard_stop`."""
    stop = "stop"
    last_stop = "last_stop"
    """A stop when all steps are made and only the last evaluation is pending."""

    @classmethod
    def at(cls, stop: Stop | None) -> Occasion:
        """The occasion after a step, at which the training stops for this reason; None: it goes on."""
        if stop is None:
            return cls.step
        if stop.is_end:
            return cls.final
        return cls.part if stop.is_part else cls.stop
