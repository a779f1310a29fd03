"""When and why a training stops: pure functions of progress and stop requests."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_cli.trainer.intervals import Interval
from trainer_cli.trainer.progress import Progress


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of a fit and its reason. Not `finished`: the run can be resumed."""

    reason: str
    finished: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the run may last. `max_time_s` bounds this process, in seconds."""

    max_duration: Interval
    hard_stop: Interval | None = None
    max_time_s: float | None = None


def why_stop(limits: Limits, now: Progress, *, process_s: float, stop_request: Stop | None) -> Stop | None:
    """Why the training ends at this step, or None. A complete run is finished, even if a stop was requested."""
    if limits.max_duration.reached(now):
        return Stop(f"max_duration of {limits.max_duration.duration} reached", finished=True)
    if limits.hard_stop is not None and limits.hard_stop.reached(now):
        return Stop(f"hard_stop at {limits.hard_stop.duration}", finished=True)
    if stop_request is not None:
        return stop_request
    if limits.max_time_s is not None and process_s >= limits.max_time_s:
        return Stop(f"max_time of {limits.max_time_s:g}s used up", finished=False)
    return None


def next_stop_step(limits: Limits, now: Progress) -> int:
    """The earliest step after `now` at which `why_stop` may return a reason, requests aside."""
    if limits.max_time_s is not None:
        return now.step + 1
    ends = [end for end in (limits.max_duration, limits.hard_stop) if end is not None]
    return min(now.step + 1 if end.end is None else end.end for end in ends)
