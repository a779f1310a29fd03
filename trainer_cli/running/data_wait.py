"""Tell once that a training waits for its data, with the share of the time and a cure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_cli.environment import usable_cores
from trainer_cli.goodput import Activity
from trainer_cli.terminal import format_count
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)

_WINDOW_S = 10.0
"""Seconds of training after which the share is computed."""
_LARGE = 0.2
"""Share of the time of training, from which on it is told."""
_WORKERS = 4
"""Number of workers that is advised without any."""


class DataWait(Callback):
    """Compares the time of waiting for batches with that of computing steps, from log to log.

    Workers start before the first log, so that their start does not count.
    """

    def __init__(self) -> None:
        self._mark: tuple[int, float, float] | None = None
        """Step, and seconds of waiting and of computing, at the beginning of the window."""
        self._is_told, self._loader = False, None

    def on_train_start(self, trainer: Trainer, model: Any, train_loader: Any, loop: Any, loop_idx: int) -> None:
        self._loader = train_loader

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if self._is_told:
            return
        seconds = trainer.metric_logger.time.seconds()
        now = (trainer.progress.step, seconds[Activity.data], seconds[Activity.training])
        steps, waited_s, computed_s = (new - old for new, old in zip(now, self._mark or now, strict=True))
        if self._mark is not None and waited_s + computed_s < _WINDOW_S:
            return
        self._mark = now
        if waited_s > _LARGE * (waited_s + computed_s):
            self._is_told = True
            share = waited_s / (waited_s + computed_s)
            log.warning(
                "training waited %.0f %% of the last %s for data: %s",
                100 * share,
                format_count(int(steps), "step"),
                _advise(self._loader),
            )


def _advise(loader: Any) -> str:
    """How the data of a loader may come faster."""
    workers: int | None = getattr(loader, "num_workers", None)
    if workers is None:
        return "its loader makes its own batches; give it more workers"
    if workers >= usable_cores():
        return f"num_workers={workers} is one for each core; store samples as they are used"
    return f"set data.num_workers={min(2 * workers or _WORKERS, usable_cores())}, or =auto"
