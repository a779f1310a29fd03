"""When and why a training stops, and whether it is started again after a failure: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_cli.schema.sections import LoopConfig, TrainConfig
from trainer_cli.steps import Duration, Interval, Progress, RunStatus
from trainer_cli.terminal import format_count

_HARD_STOP = "hard_stop"
_LENGTH = "max_duration of "


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


def why_stop(limits: Limits, now: Progress, *, process_s: float, stop_request: Stop | None) -> Stop | None:
    """Why the training ends at this step, or None. A complete run is finished, even if a stop was requested."""
    # The order decides which reason is recorded: a complete run before a part of it, a part before a stop.
    if limits.max_duration.reached(now):
        return Stop(f"{_LENGTH}{limits.max_duration.duration} reached", finished=True)
    if stop_request is not None and stop_request.finished:
        return stop_request
    if limits.hard_stop is not None and limits.hard_stop.reached(now):
        return Stop(f"{_HARD_STOP} at {limits.hard_stop.duration}", finished=True, is_part=True)
    if stop_request is not None:
        return stop_request
    if limits.max_time_s is not None and process_s >= limits.max_time_s:
        return Stop(f"max_time of {limits.max_time_s:g}s used up", finished=False)
    return None


def reopens(reason: str, old: LoopConfig, new: LoopConfig) -> bool:
    """Whether a run that is finished for this reason trains further: with a longer `max_duration`; if `hard_stop` has
    ended it, with another one.
    """
    # Any change: whether the new one is later may depend on the length of an epoch.
    if reason.startswith(_HARD_STOP) and old.hard_stop != new.hard_stop:
        return True
    before, now = Duration.parse(old.max_duration), Duration.parse(new.max_duration)
    return now.unit is not before.unit or now.value > before.value


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
        """The end for this reason, with what the summary of the last attempt adds, if it ended for the same one."""
        is_same = summary.get("status") == RunStatus.finished and summary.get("reason") == reason
        by = summary.get("ended_by")
        return cls(reason, by if is_same else None, is_same and "ended_by" in summary)

    def may_reopen(self, old: TrainConfig, new: TrainConfig) -> bool:
        """Whether a run may train further: see `reopens`; or the callback that decided the end has other settings.

        Whether its `end_rule` is another one is known once the callback is made: `request_again` then decides.
        """
        if reopens(self.reason, old.loop, new.loop):
            return True
        if self.reason.startswith((_LENGTH, _HARD_STOP)):
            return False
        if not self.is_known:
            return old.callbacks != new.callbacks
        return self.by is not None and old.callbacks.get(self.by) != new.callbacks.get(self.by)

    def how_to_reopen(self) -> str:
        """What reopens the run, for the user."""
        if self.reason.startswith(_HARD_STOP):
            return "To train further, give a later loop.hard_stop, or loop.hard_stop=null"
        longer = "give a larger loop.max_duration"
        if self.by is None:
            return f"To train further, {longer}"
        settings = f"change its settings with 'resume_allow=[callbacks.{self.by}.*]'"
        return f"callbacks.{self.by} has ended it. To train further, {settings}, or {longer}"


def next_stop_step(limits: Limits, now: Progress, *, holds: bool = False) -> int:
    """The earliest step after `now` at which `why_stop` may return a reason without a request, or, with `holds`, at
    which a deferred request must be handled.
    """
    # Time may run out at any step.
    if limits.max_time_s is not None:
        return now.step + 1
    min_duration = limits.min_duration if holds else None
    ends = [end for end in (limits.max_duration, limits.hard_stop, min_duration) if end is not None]
    return min(now.step + 1 if end.end is None else end.end for end in ends)


_LONGEST_S = 600.0
_OUTCOMES = {
    0: "the run is finished",
    2: "the config or the command is wrong",
    3: "no checkpoint is valid",
    4: "the run directory is in use, or another run's",
    75: "a stop was requested, or the disk is full",
    130: "a stop was requested",
}
"""Exit code -> why a restart cannot help."""
_REPEATABLE = ("AssertionError",)
"""Exceptions that a restart would raise again."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended. `exit_code` is negative for a signal; `reason` comes from summary.json."""

    exit_code: int
    reason: str
    progressed: bool
    """Whether the newest checkpoint is of a later step than before the attempt."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to restart: after `pause_s` seconds, or not at all if None. `failures` counts those in a row without
    progress."""

    pause_s: float | None
    why: str
    failures: int


def decide_restart(ended: Ended, *, failures: int, most: int, backoff_s: float) -> Verdict:
    """Restart after a failure that may be temporary, while there are at most `most` in a row without progress.

    The pause is `backoff_s` after the first failure, and doubles with each without progress, up to ten minutes.
    """
    # Before the count: such an end is no failure.
    if (why := _OUTCOMES.get(ended.exit_code)) is not None:
        return Verdict(None, why, failures)
    if exception := next((name for name in _REPEATABLE if ended.reason.startswith(name)), None):
        return Verdict(None, f"a restart does not fix an {exception}", failures)
    # Progress resets the count: a run that fails once a day may be restarted for ever.
    failures = 1 if ended.progressed else failures + 1
    if failures > most:
        return Verdict(None, f"{format_count(failures, 'failure')} in a row without progress", failures)
    end = f"signal {-ended.exit_code}" if ended.exit_code < 0 else f"exit code {ended.exit_code}"
    pause_s = min(_LONGEST_S, backoff_s * 2 ** (failures - 1))
    return Verdict(pause_s, f"{end}; failure {failures} of at most {most} without progress", failures)
