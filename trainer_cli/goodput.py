"""Where the time of a run goes, over all its attempts, and the interval of saves that loses least.

The time of an attempt is divided among activities, of which there is one at a time. Training whose steps a later
attempt makes again is lost. Goodput is the share of a run's time spent computing steps that led to its state, not on
data, evaluation, saves or start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Activity(StrEnum):
    """What an attempt does at a moment."""

    start = "start"
    """Before the first step and after the last one, as far as it is nothing of the following."""
    loading = "loading"
    """Reading a checkpoint into model, optimizer and loaders; its verification before that is part of `start`."""
    training = "training"
    data = "data"
    """Waiting for a batch."""
    evaluation = "evaluation"
    saving = "saving"
    """Training waits for a save; what a thread writes in the background does not count."""


LOST = "lost"
Seconds = Mapping[str, float]
"""Seconds by the names of activities."""


def sum_attempts(attempts: Iterable[Seconds], kept_s: float) -> dict[str, float]:
    """The seconds of a run by activity, with training divided into what was kept and what is `lost`."""
    sums = dict.fromkeys((Activity.training, LOST, *Activity), 0.0)
    for seconds in attempts:
        for activity in Activity:
            sums[activity] += seconds.get(activity, 0.0)
    trained_s = sums[Activity.training]
    sums[Activity.training] = min(kept_s, trained_s)
    sums[LOST] = trained_s - sums[Activity.training]
    return {str(activity): round(amount, 3) for activity, amount in sums.items()}


def compute_goodput(seconds: Seconds) -> float | None:
    """Share of kept training in all time; None if there was none."""
    total_s = sum(seconds.values())
    return round(seconds.get(Activity.training, 0.0) / total_s, 4) if total_s > 0 else None


def complete_killed(recorded: Seconds, lasted_s: float) -> dict[str, float]:
    """The seconds of an attempt that was killed after `lasted_s` seconds: all beyond what is recorded was training."""
    rest_s = max(0.0, lasted_s - sum(recorded.values()))
    seconds = {**dict.fromkeys(map(str, Activity), 0.0), **recorded}
    return {**seconds, Activity.training.value: round(seconds[Activity.training] + rest_s, 3)}


def read_seconds(value: Any) -> dict[str, float] | None:
    """Seconds by activity from JSON; None if it is something else."""
    if not isinstance(value, dict):
        return None
    # Imported here: a training writes them, and does not read any.
    from trainer_cli.bounds import is_amount

    amounts = {str(name): float(amount) for name, amount in value.items() if is_amount(amount)}
    return amounts if len(amounts) == len(value) else None


def best_interval_s(save_s: float, between_failures_s: float) -> float:
    """Seconds between two saves that lose the least time to saves and failures together.

    Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps", which refines Young
    (1974): the square root of twice the product.

    Args:
        save_s: how long training waits for a save.
        between_failures_s: mean time between two failures.
    """
    ratio = save_s / (2 * between_failures_s)
    if ratio >= 1:
        return between_failures_s
    return math.sqrt(2 * save_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def lost_share(interval_s: float, save_s: float, between_failures_s: float) -> float:
    """Expected share of time that goes to saves, and to repeated steps, at an interval of saves.

    An approximation for failures that are rare beside the interval: 1.0 is all time, where they are not.
    """
    return min(1.0, save_s / (interval_s + save_s) + interval_s / (2 * between_failures_s))


@dataclass(frozen=True, slots=True)
class ProbedTimes:
    """What the first steps of a training took, when it was tried."""

    steps: int
    step_s: float
    """A usual step, with its wait for data."""
    spread: float | None
    """Standard deviation of the steps of a quarter of a second each, as a share of `step_s`; None of too few."""
    evaluation_s: float
    save_s: float
    """How long the training waits for a save; waits below 10 ms count as none."""
    start_s: float
    """All that comes once: imports, data, compilation, the end."""
    memory_bytes: int
    """Peak of resident memory of the main process."""
    device_bytes: int | None
    """Peak that torch has reserved on its GPU; None without one."""
