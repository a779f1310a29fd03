"""Find a step whose loss lies far above those before it, before the weights are updated by it."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from trainer_cli.errors import TrainError
from trainer_cli.parts import FAILED_STEP
from trainer_cli.runs import RunDir
from trainer_cli.terminal import format_count
from trainer_cli.trainer import Callback, Trainer
from trainer_cli.values import check_at_least, check_whole

log = logging.getLogger(__name__)

_TO_SIGMA = 1.4826
"""The standard deviation of normal noise, in its median absolute deviations."""
_LEAST_SHARE = 0.01
"""A deviation is at least this share of the median: losses that are all but equal would make any rise a spike."""


class LossSpike(Callback):
    """Acts on a step whose loss is far above the losses of the steps before it.

    The limit is the median of the last `window` losses plus `deviations` times their median absolute deviation,
    scaled to a standard deviation of normal noise: unlike mean and standard deviation, these do not move with the
    spikes that they are to find (Leys et al., 2013, doi:10.1016/j.jesp.2013.03.013). There is none before half a window
    of losses is known. Losses of spikes count in the window, so that a loss which stays high is no spike for long.

    Args:
        action: `stop` ends the training with an error, before the update of the step. `skip` leaves out the update:
            weights and optimizer stay as before the step, which counts; statistics of norms have seen its batches.
            `roll_back` loads the newest checkpoint, and continues with the data after the spike. `warn` only logs.
        deviations: how far above the median a spike is.
        window: number of steps whose losses are compared.
        max_times: how many steps may be skipped, or how often the training may go back, in the whole run; one more
            ends it with an error.

    Losses that are not finite are no spikes: CheckFinite acts on these. The loss of a step is the weighted mean over
    its accumulated batches and over all ranks, so that all ranks do the same. It is read before each update, for which
    the host waits for the device. A step of one's own that steps many optimizers in turn is judged by the losses
    before the first of them.
    """

    def __init__(
        self,
        action: Literal["stop", "skip", "roll_back", "warn"] = "stop",
        deviations: float = 6.0,
        window: int = 128,
        max_times: int = 10,
    ) -> None:
        check_at_least("deviations", deviations, 0.1)
        check_whole("window", window, 4)
        check_whole("max_times", max_times, 0)
        self.action, self.deviations, self.window, self.max_times = action, deviations, window, max_times
        self.rolls_back = action == "roll_back"
        self.times = 0
        """Steps that were skipped, or times that the training went back."""
        self._before: list[float] = []
        """The losses of the last steps."""
        self._losses: list[tuple[Tensor, float | Tensor]] = []
        """Loss and weight of each batch of this step, on the device."""
        self._compared_step = 0
        """The step whose loss was compared: of many optimizers the first that is stepped decides for all."""
        self._goes_back = False

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        """Forget a step that an error has ended, and say if the training is too short for a limit."""
        self._losses.clear()
        last = trainer.loop.last_step
        known = len(self._before) + (last or 0) - trainer.progress.step - 1
        if last is not None and 2 * known < self.window and trainer.strategy.group.is_main:
            log.info(
                "LossSpike acts after %d losses, half of its window, and the training ends at step %d before that",
                math.ceil(self.window / 2), last,
            )  # fmt: skip

    def on_before_backward(self, trainer: Trainer, model: Any, loss: Tensor) -> None:
        """Keep the loss on the device."""
        self._losses.append((loss.detach(), trainer.step.weight))

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        """Compare the loss of this step with those before it, and act."""
        step = trainer.step.step_idx + 1
        spike = None if step == self._compared_step else self._find_spike(trainer)
        self._losses.clear()
        self._compared_step = step
        if spike is None:
            return
        message, look = f"loss spike at step {step}: {spike}", _describe_step(trainer.run_dir, step)
        if self.action == "stop" or (self.action != "warn" and self.times >= self.max_times):
            raise TrainError(
                message + (f", after {format_count(self.times, 'other')}" if self.times else ""),
                cure=f"{look}To train on without it, resume with callbacks.loss_spike.action=skip, or a larger "
                "max_times, and 'resume_allow=[callbacks]'.",
            )
        if trainer.strategy.group.is_main:
            log.warning("%s; action: %s. %s", message, self.action, look)
        self.times += self.action != "warn"
        self._goes_back = self.action == "roll_back"
        # Another callback may have left out the update already.
        trainer.step.skips_update |= self.action == "skip"

    def _find_spike(self, trainer: Trainer) -> str | None:
        """Add the loss of this step to the window; what makes it a spike, or None. Collective."""
        # Weight 0 is a padding batch, whose loss may be NaN.
        pairs = [(float(loss), float(weight)) for loss, weight in self._losses if weight]
        sums = [sum(loss * weight for loss, weight in pairs), sum(weight for _, weight in pairs)]
        total, weight = trainer.strategy.group.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        loss, before = total / (weight or math.nan), self._before
        if not math.isfinite(loss):
            return None
        self._before = [*before, loss][-self.window :]
        if 2 * len(before) < self.window:
            return None
        middle = median(before)
        spread = max(_TO_SIGMA * median(abs(value - middle) for value in before), _LEAST_SHARE * abs(middle))
        if loss <= middle + self.deviations * spread:
            return None
        distance = (loss - middle) / (spread or math.inf)
        steps = format_count(len(before), "step")
        return f"{loss:.4g} is {distance:.1f} deviations above {middle:.4g}, the median of {steps}"

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """After a step with a spike: ask to go back, on every rank at the same step."""
        if self._goes_back and trainer.is_step_complete:
            self._goes_back, self._compared_step = False, 0
            trainer.ask_to_roll_back()
            if trainer.agreement is not None:
                # At once: the request would reach the other ranks one step later.
                trainer.requests.accept_interrupt()

    def state_dict(self) -> dict[str, Any]:
        """The losses of the window, and how many spikes there were."""
        return {"window": self._before, "times": self.times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the window, and the number of spikes unless the training goes back, before which it was smaller."""
        self._before, self.times = state["window"], max(self.times, state["times"])


def _describe_step(run: Path | None, step: int) -> str:
    """The commands that look at a step and its samples, and a space; empty if it cannot be looked at."""
    describe = FAILED_STEP.find()
    # What is said of the spike must not be replaced by an error of the run's files.
    with suppress(TrainError, OSError):
        # The folder of a replay is no run.
        if describe is None or run is None or not RunDir(run).exists_as_run():
            return ""
        if text := describe(run, step, step):
            return f"{text} "
    return ""
