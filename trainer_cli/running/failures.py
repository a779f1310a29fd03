"""The interval of saves that loses least, for a given mean time between failures."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from trainer_cli.catalog import Spent
from trainer_cli.environment import unix
from trainer_cli.files import read_rows
from trainer_cli.goodput import Activity, best_interval_s, lost_share
from trainer_cli.runs import RunDir
from trainer_cli.terminal import format_count

_COPIED_BYTES = 32 * 2**20
_COPIES = 3
_MIN_SAVE_S = 0.001
"""Assumed for collecting and encoding the state of a save in the background, besides its tensors."""


@dataclass(frozen=True, slots=True)
class SaveTime:
    """How long training waits for a save, and how long a step takes."""

    save_s: float
    source: str
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class BestInterval:
    """What to set for a mean time between failures."""

    between_failures_s: float
    save_s: float
    source: str
    """Where `save_s` is from."""
    interval_s: float
    steps: int | None
    lost_share: float
    """Expected share of the time that goes to saves, and to repeated steps."""


def find_best_interval(
    run: RunDir, size_bytes: int | None, between_failures_s: float, step_time_s: float | None, *, in_background: bool
) -> BestInterval | None:
    """The best interval by the measured saves of a run, or else by the estimated ones; None if neither is known."""
    saves = measured_saves(run)
    if saves is None and in_background and size_bytes:
        seconds = _MIN_SAVE_S + copy_seconds(size_bytes)
        saves = SaveTime(seconds, "estimated, at least: 1 ms, and a copy of its size in memory")
    if saves is None:
        return None
    # A save that takes no time would have no best interval.
    save_s = max(saves.save_s, 1e-6)
    interval_s = best_interval_s(save_s, between_failures_s)
    step_s = step_time_s or saves.step_s
    return BestInterval(
        between_failures_s,
        save_s,
        saves.source,
        interval_s,
        None if step_s is None else max(1, round(interval_s / step_s)),
        lost_share(interval_s, save_s, between_failures_s),
    )


def measured_saves(run: RunDir) -> SaveTime | None:
    """The mean times of the saves of the newest attempt that has made two or more; None if there is no such attempt."""
    # Unix time at which the attempt after the one in question began.
    rows, end = read_rows(run.history_file), float("inf")
    for attempt in reversed(run.attempts):
        started = unix(attempt.get("started"))
        if started is None:
            continue
        saves = [(step, spent.time_s) for time, step, spent in Spent.noted(rows, started) if time < end]
        end = started
        if len(saves) > 1:
            # Each save records the time before it, so that the time of the last save itself is not known.
            (first_step, first), (last_step, last) = saves[0], saves[-1]
            spent = {activity: last.get(activity, 0.0) - first.get(activity, 0.0) for activity in Activity}
            count, steps = len(saves) - 1, last_step - first_step
            step_s = (spent[Activity.training] + spent[Activity.data]) / steps if steps > 0 else None
            source = f"measured: {format_count(count, 'save')} of attempt {attempt.get('attempt')}"
            return SaveTime(spent[Activity.saving] / count, source, step_s or None)
    return None


def copy_seconds(size_bytes: int) -> float:
    """Seconds of a copy of this size in memory, by copies of at most 32 MiB."""
    source = np.ones(max(1, min(size_bytes, _COPIED_BYTES)), np.uint8)
    target = np.empty_like(source)
    best_s = float("inf")
    for _ in range(_COPIES):
        began = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - began)
    return best_s * size_bytes / len(source)
