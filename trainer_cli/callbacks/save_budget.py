"""What saves cost in this process, and when the next one fits into a share of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer_cli.policy import SaveCost
from trainer_cli.steps import Progress

_FAILURE_S = 1.0
"""Least cost of a failed save: with the default budget the next one comes 50 s later."""


def steps_until(wait_s: float, step_s: float) -> int:
    """The number of steps of `step_s` seconds, at least one, that a wait lasts, rounded up."""
    return max(1, math.ceil(wait_s / step_s)) if step_s > 0 else 1


class SaveBudget:
    """Measures the newest save: how long the training has waited for it, and when it began."""

    def __init__(self) -> None:
        self._began: float | None = None
        """When the newest save began, by `time.monotonic`; None before the first."""
        self._waited_s = self._min_cost_s = 0.0
        self._step, self._seconds = 0, 0.0
        """The step of the newest save, and the seconds of training until then."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time inside the block: saves, and waiting for one in flight."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - began

    def begin_save(self, progress: Progress) -> None:
        """Note that a save begins. It is called inside `measure`, whose whole block counts for this save."""
        self._began, self._waited_s, self._min_cost_s = time.monotonic(), 0.0, 0.0
        self._step, self._seconds = progress.step, progress.seconds

    def fail_save(self) -> None:
        """Note that the newest save has failed. It counts as a second, however soon it failed: otherwise a disk that
        fails for a short while would be tried, and given up, within that time."""
        self._min_cost_s = _FAILURE_S

    def cost(self) -> SaveCost | None:
        """The cost of the newest save; None before the first."""
        if self._began is None:
            return None
        return SaveCost(max(self._waited_s, self._min_cost_s), time.monotonic() - self._began)

    def next_step(self, budget: float, progress: Progress, latest: int | None) -> int:
        """The step after which the next save is expected to fit, but at most `latest`.

        Steps are taken to last as long as those since the newest save.
        """
        cost, steps_since = self.cost(), progress.step - self._step
        steps = 1
        if cost is not None and steps_since > 0:
            steps = steps_until(cost.wait_s(budget), (progress.seconds - self._seconds) / steps_since)
        return progress.step + steps if latest is None else min(latest, progress.step + steps)
