"""Schedules that rise linearly, then follow a curve: cosine, linear, polynomial, stable and decay, inverse root."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import UserError

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger(__name__)

Curve = Callable[[int], float]


class WarmupSchedule:
    """The learning rate of each group times a factor: it rises linearly over `warmup` steps (the first step already
    has 1 / (warmup + 1)), then it is `curve(steps after the warm-up)`.

    Each parameter group keeps its own peak, the learning rate it was made with; groups may be added later.
    """

    def __init__(self, optimizer: Optimizer, warmup: int, curve: Curve) -> None:
        if warmup < 0:
            raise UserError(f"warmup is {warmup}, but it must be at least 0 steps", where="warmup")
        # Not the groups: `load_state_dict` replaces their list.
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
        """What the peaks are multiplied by at a step."""
        return (step + 1) / (self._warmup + 1) if step < self._warmup else self._curve(step - self._warmup)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group, as set now."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The step: peaks and lengths are the config's."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved step; peaks and lengths stay as configured."""
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        factor = self.factor(self._step)
        for group in self._optimizer.param_groups[len(self._peaks) :]:
            # Saved with the group, as torch does: after a resume its `lr` is not the peak.
            self._peaks.append(float(group.setdefault("initial_lr", group["lr"])))
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor


def cut(warmup: int, total_steps: int) -> int:
    """The warm-up, cut with a warning where it is as long as the training."""
    if warmup >= total_steps:
        log.warning("warmup of %d steps is cut: the training has %d steps", warmup, total_steps)
        return total_steps - 1
    return warmup


def check_ratio(min_ratio: float) -> None:
    """Refuse a ratio below 0 or above 1."""
    if not 0 <= min_ratio <= 1:
        raise UserError(f"min_ratio is {min_ratio}, but it must lie between 0 and 1", where="min_ratio")


def falling(steps: int, min_ratio: float, shape: Callable[[float], float]) -> Curve:
    """From 1 to `min_ratio` over so many steps, and there from then on; `shape` falls from 1 at 0 to 0 at 1."""
    check_ratio(min_ratio)
    return lambda step: min_ratio + (1 - min_ratio) * shape(min(1.0, step / steps))


class WarmupCosine(WarmupSchedule):
    """Linear warm-up, then a cosine down to `min_ratio` of the learning rate at `total_steps`, and there from then on.

    Each parameter group keeps its own peak, the learning rate it was made with; groups may be added later. `warmup` is
    in optimizer steps, or a duration such as `0.1ep` in a config. A warm-up as long as the training is cut to it, with
    a warning. Form: Loshchilov & Hutter, SGDR, arXiv:1608.03983, without restarts.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup: int = 0, min_ratio: float = 0.0) -> None:
        warmup = cut(warmup, total_steps)
        shape = lambda done: 0.5 * (1 + math.cos(math.pi * done))  # noqa: E731
        super().__init__(optimizer, warmup, falling(total_steps - warmup, min_ratio, shape))


class WarmupPolynomial(WarmupSchedule):
    """Linear warm-up, then (1 - done) ** `power` down to `min_ratio` of the learning rate at `total_steps`. `warmup` is
    in steps, or a duration in a config.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup: int = 0, power: float = 1.0, min_ratio: float = 0.0
    ) -> None:
        if not (math.isfinite(power) and power > 0):
            raise UserError(f"power is {power}, but it must be a finite number above 0", where="power")
        warmup = cut(warmup, total_steps)
        super().__init__(
            optimizer, warmup, falling(total_steps - warmup, min_ratio, lambda done: float((1 - done) ** power))
        )


class WarmupLinear(WarmupPolynomial):
    """Linear warm-up, then a line down to `min_ratio` of the learning rate at `total_steps`. `warmup` is in steps, or a
    duration in a config.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup: int = 0, min_ratio: float = 0.0) -> None:
        super().__init__(optimizer, total_steps, warmup, 1.0, min_ratio)


class WarmupStableDecay(WarmupSchedule):
    """Linear warm-up, then the full learning rate, and in the last `decay` steps a line down to `min_ratio` of it at
    `total_steps`. `warmup` and `decay` are in steps, or durations in a config; `decay` null: a tenth of the training.

    WSD of Hu et al., MiniCPM, arXiv:2404.06395. With a longer `total_steps` a run goes on from a checkpoint before
    the decay.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup: int = 0,
        decay: int | None = None,
        min_ratio: float = 0.0,
    ) -> None:
        decay = max(1, total_steps // 10) if decay is None else decay
        if decay < 1 or warmup + decay > total_steps:
            raise UserError(
                f"warmup ({warmup}) and decay ({decay}) do not fit into {total_steps} steps",
                where="decay",
                cure="Make them shorter, or loop.max_duration longer.",
            )
        stable = total_steps - warmup - decay
        fall = falling(decay, min_ratio, lambda done: 1 - done)
        super().__init__(optimizer, warmup, lambda step: fall(max(0, step - stable)))


class WarmupInverseSqrt(WarmupSchedule):
    """Linear warm-up, then the learning rate falls as 1 / sqrt(step), without an end. `warmup` is in steps, at least 1,
    or a duration in a config.

    Vaswani et al., Attention Is All You Need, arXiv:1706.03762, scaled so that the peak is the optimizer's rate.
    """

    def __init__(self, optimizer: Optimizer, warmup: int) -> None:
        if warmup < 1:
            raise UserError(f"warmup is {warmup}, but it must be at least 1 step", where="warmup")
        super().__init__(optimizer, warmup, lambda step: math.sqrt((warmup + 1) / (warmup + 1 + step)))
