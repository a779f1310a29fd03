"""Learning-rate schedules of our own: pure functions of the step, so a resume needs nothing but the step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import UserError

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger(__name__)


def warmup_cosine(total_steps: int, warmup: int = 0, min_ratio: float = 0.0) -> Callable[[int], float]:
    """The factor on the learning rate at each step.

    It rises linearly over `warmup` steps (the first step already has 1 / (warmup + 1)), then falls along a
    cosine to `min_ratio` at `total_steps`, and stays there. A warm-up as long as the training is cut to it,
    with a warning. Form of the schedule: Loshchilov & Hutter, SGDR, arXiv:1608.03983, without restarts.
    """
    if warmup < 0:
        raise UserError(f"warmup is {warmup}, but it must be at least 0 steps", where="scheduler.warmup")
    if warmup >= total_steps:
        log.warning("warmup of %d steps is cut: the training has %d steps", warmup, total_steps)
        warmup = total_steps - 1
    if not 0 <= min_ratio <= 1:
        raise UserError(f"min_ratio is {min_ratio}, but it must lie between 0 and 1")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (total_steps - warmup))
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


class WarmupCosine:
    """Linear warm-up, then a cosine down to `min_ratio` of the learning rate at `total_steps`.

    Each parameter group keeps its own peak: the learning rate that it is given, also one that is added later.
    `warmup` is in optimizer steps, or a duration such as `0.1ep` in a config.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup: int = 0, min_ratio: float = 0.0) -> None:
        # Not its groups: `load_state_dict` gives an optimizer a new list of them.
        self._optimizer = optimizer
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._factor = warmup_cosine(total_steps, warmup, min_ratio)
        self._step = 0
        self._apply()

    def step(self) -> None:
        """Set the learning rates of the next optimizer step."""
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group, as set now."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The step: peaks and lengths are the config's."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved step, along the schedule as it is configured now."""
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        factor = self._factor(self._step)
        for group in self._optimizer.param_groups[len(self._peaks) :]:
            # Saved with the group, as torch's schedules do: after a resume its `lr` is no peak.
            self._peaks.append(float(group.setdefault("initial_lr", group["lr"])))
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
