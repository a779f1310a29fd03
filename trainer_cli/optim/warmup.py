"""Learning rate schedules of a linear warm-up and a curve: cosine, linear, polynomial, stable-decay, inverse root."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import UserError
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger(__name__)

Curve = Callable[[int], float]
"""Steps since the end of the warm-up -> factor of the learning rate."""


class WarmupSchedule:
    """Multiply the peak learning rate of each group by a factor.

    The factor rises linearly over `warmup` steps, from 1 / (warmup + 1) at the first step, and is then
    `curve(steps since the end of the warm-up)`. The peak of a parameter group is the learning rate it was made with.
    Groups may be added later.
    """

    def __init__(self, optimizer: Optimizer, warmup: int, curve: Curve) -> None:
        if warmup < 0:
            raise UserError(f"warmup is {warmup}, but it must be at least 0 steps", where="warmup")
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise UserError(
                f"{type(optimizer).__name__} has no learning rate for a schedule to change",
                cure="Set its lr, or leave the schedule out.",
            )
        # The attributes and their order enter the digest by which a resume sees changed settings: do not rename them.
        # The optimizer and not its groups, because its load_state_dict replaces their list.
        self._optimizer = optimizer
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._warmup, self._curve = warmup, curve
        self._step = 0
        self._apply()

    def step(self) -> None:
        """Set the learning rates of the next optimizer step."""
        self._step += 1
        self._apply()

    def factor(self, step: int) -> float:
        """The factor of the peak learning rates at a step."""
        return (step + 1) / (self._warmup + 1) if step < self._warmup else self._curve(step - self._warmup)

    def get_last_lr(self) -> list[float]:
        """The current learning rate of each group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The step alone: peaks and lengths are settings of the config."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved step; peaks and lengths stay as configured."""
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        """Set the learning rate of each group to its peak times the factor of the present step."""
        factor = self.factor(self._step)
        for group in self._optimizer.param_groups[len(self._peaks) :]:
            # The peak is saved with the group, as torch does it, because after a resume `lr` is not the peak.
            self._peaks.append(float(group.setdefault("initial_lr", group["lr"])))
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            # From the peak, not from the last rate: rounding does not add up over the steps, and a resume gives the
            # same rate.
            group["lr"] = peak * factor


def require_length(total_steps: int | None) -> int:
    """The length of a schedule, which only `scheduler_factory` and a config set by themselves."""
    if total_steps is None:
        raise UserError(
            "the schedule needs total_steps, the number of steps of the run",
            where="total_steps",
            cure='In Python scheduler_factory(WarmupCosine, loop, warmup="1ep") sets it.',
        )
    return total_steps


def cut_warmup(warmup: int, total_steps: int) -> int:
    """Cut a warm-up that is as long as the training, with a warning."""
    if warmup >= total_steps:
        log.warning("warmup of %s is cut: the run has %s", *(format_count(n, "step") for n in (warmup, total_steps)))
        return total_steps - 1
    return warmup


def make_decay(steps: int, min_ratio: float, shape: Callable[[float], float]) -> Curve:
    """A curve from 1 to `min_ratio` over `steps` steps, and constant after them.

    Args:
        shape: the fraction of the steps -> a value that falls from 1 to 0.
    """
    if not 0 <= min_ratio <= 1:
        raise UserError(f"min_ratio is {min_ratio}, but it must lie between 0 and 1", where="min_ratio")
    return lambda step: min_ratio + (1 - min_ratio) * shape(min(1.0, step / steps))


class WarmupCosine(WarmupSchedule):
    """Linear warm-up, then a cosine down to `min_ratio` of the learning rate at `total_steps`, and constant after it.

    The peak of a parameter group is the learning rate it was made with; groups may be added later. `warmup` is in
    optimizer steps, or a duration such as `0.1ep` in a config. A warm-up as long as the training is cut, with a
    warning. In Python, `scheduler_factory(WarmupCosine, loop, warmup="0.1ep")` sets `total_steps`, and takes durations.
    The cosine is that of Loshchilov & Hutter, SGDR, arXiv:1608.03983, without restarts.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int | None = None, warmup: int = 0, min_ratio: float = 0.0
    ) -> None:
        total_steps = require_length(total_steps)
        warmup = cut_warmup(warmup, total_steps)
        curve = make_decay(total_steps - warmup, min_ratio, lambda done: 0.5 * (1 + math.cos(math.pi * done)))
        super().__init__(optimizer, warmup, curve)


class WarmupPolynomial(WarmupSchedule):
    """Linear warm-up, then (1 - fraction) ** `power` down to `min_ratio` of the learning rate at `total_steps`.

    `warmup` is in steps, or a duration in a config.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup: int = 0,
        power: float = 1.0,
        min_ratio: float = 0.0,
    ) -> None:
        if not (math.isfinite(power) and power > 0):
            raise UserError(f"power is {power}, but it must be a finite number above 0", where="power")
        total_steps = require_length(total_steps)
        warmup = cut_warmup(warmup, total_steps)
        curve = make_decay(total_steps - warmup, min_ratio, lambda done: float((1 - done) ** power))
        super().__init__(optimizer, warmup, curve)


class WarmupLinear(WarmupPolynomial):
    """Linear warm-up, then a linear decay to `min_ratio` of the learning rate at `total_steps`.

    `warmup` is in steps, or a duration in a config.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int | None = None, warmup: int = 0, min_ratio: float = 0.0
    ) -> None:
        super().__init__(optimizer, total_steps, warmup, 1.0, min_ratio)


class WarmupStableDecay(WarmupSchedule):
    """Linear warm-up, then the full learning rate, and a linear decay to `min_ratio` of it in the last `decay` steps.

    `warmup` and `decay` are in steps, or durations in a config; `decay` null: a tenth of the training. With a longer
    `total_steps` a run may continue from a checkpoint before the decay. This is WSD of Hu et al., MiniCPM,
    arXiv:2404.06395.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup: int = 0,
        decay: int | None = None,
        min_ratio: float = 0.0,
    ) -> None:
        total_steps = require_length(total_steps)
        decay = max(1, total_steps // 10) if decay is None else decay
        if decay < 1 or warmup + decay > total_steps:
            raise UserError(
                f"warmup ({warmup}) and decay ({decay}) do not fit into {format_count(total_steps, 'step')}",
                where="decay",
                cure="Make them shorter, or loop.max_duration longer.",
            )
        stable = total_steps - warmup - decay
        fall = make_decay(decay, min_ratio, lambda done: 1 - done)
        super().__init__(optimizer, warmup, lambda step: fall(max(0, step - stable)))


class WarmupInverseSqrt(WarmupSchedule):
    """Linear warm-up, then a learning rate in proportion to 1 / sqrt(step), without an end.

    `warmup` is in steps, at least 1, or a duration in a config. This is the schedule of Vaswani et al., Attention Is
    All You Need, arXiv:1706.03762, scaled so that its peak is the optimizer's learning rate.
    """

    def __init__(self, optimizer: Optimizer, warmup: int) -> None:
        if warmup < 1:
            raise UserError(f"warmup is {warmup}, but it must be at least 1 step", where="warmup")
        super().__init__(optimizer, warmup, lambda step: math.sqrt((warmup + 1) / (warmup + 1 + step)))
