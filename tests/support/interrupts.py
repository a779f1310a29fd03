"""A callback that sends the process a signal at the place that the environment variable INTERRUPT names.

`SIGKILL train 17 2` is before the third batch (counted from 0) of the optimizer step that follows step 17;
`SIGTERM validate 20 3` is before the fourth batch of the evaluation at step 20; `SIGKILL fit-end 40 0` is
after the last checkpoint, where that is step 40.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from trainer_cli.trainer.hooks import Callback


class Interrupt(Callback):
    """Does nothing at all where the variable is not set."""

    def __init__(self) -> None:
        number, self._where, step, batch = os.environ.get("INTERRUPT", "SIGTERM nowhere 0 0").split()
        self._number = signal.Signals[number]
        self._place = (int(step), int(batch))
        self._step = -1
        self._batch = 0

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        self._batch = self._batch + 1 if trainer.progress.step == self._step else 0
        self._step = trainer.progress.step
        self._send_at("train", self._step, self._batch)

    def on_validate_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        self._send_at("validate", trainer.progress.step, batch_idx)

    def on_fit_end(self, trainer: Any, loop: Any) -> None:
        self._send_at("fit-end", trainer.progress.step, 0)

    def _send_at(self, where: str, step: int, batch: int) -> None:
        if (where, (step, batch)) == (self._where, self._place):
            os.kill(os.getpid(), self._number)
