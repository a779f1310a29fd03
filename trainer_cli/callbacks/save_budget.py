"""What saves cost in this process, and when the next one fits into a share of the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer_cli.core.policy import SaveCost, steps_until
from trainer_cli.core.progress import Progress


class SaveBudget:
    """Measures the newest save: for how long the training has stood still for it, and when it began."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._stood_s = 0.0
        self._step, self._seconds = 0, 0.0
        """Of the progress at that save."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time inside the block: saves, and waiting for one in flight."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._stood_s += time.monotonic() - began

    def begin_save(self, progress: Progress) -> None:
        """A save begins inside `measure`, all of whose block is of this save."""
        self._began, self._stood_s = time.monotonic(), 0.0
        self._step, self._seconds = progress.step, progress.seconds

    def cost(self) -> SaveCost | None:
        """The cost of the newest save; None before the first."""
        return None if self._began is None else SaveCost(self._stood_s, time.monotonic() - self._began)

    def next_step(self, budget: float, progress: Progress, latest: int | None) -> int:
        """The step after which the next save is expected to fit, but at most `latest`.

        Steps are taken to last as long as those since the newest save.
        """
        cost, made = self.cost(), progress.step - self._step
        steps = 1
        if cost is not None and made > 0:
            steps = steps_until(cost.wait_s(budget), (progress.seconds - self._seconds) / made)
        return progress.step + steps if latest is None else min(latest, progress.step + steps)
