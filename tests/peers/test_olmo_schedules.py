"""The claims of OLMo-core's tests about its schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_runs import fit
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, SequentialLR

from trainer_cli import (
    Callback,
    Scheduled,
    Trainer,
    UserError,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupStableDecay,
)

RATE = 0.1
"""The learning rate of `fit`."""
TOTAL = {"total_steps": 10_000}


def optimizer() -> Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize(
    ("make", "arguments", "factors"),
    [
        (
            WarmupCosine,
            {**TOTAL, "warmup": 3000, "min_ratio": 0.2},
            {3000: 1.0, 5000: 0.2 + 0.8 * (1 + math.cos(math.pi * 2 / 7)) / 2, 10_000: 0.2},
        ),
        (WarmupLinear, {**TOTAL, "warmup": 3000, "min_ratio": 0.2}, {3000: 1.0, 5000: 1 - 0.8 * 2 / 7, 10_000: 0.2}),
        (
            WarmupInverseSqrt,
            {"warmup": 3000},
            {3000: 1.0, 5000: math.sqrt(3001 / 5001), 10_000: math.sqrt(3001 / 10_001)},
        ),
        (
            WarmupStableDecay,
            {**TOTAL, "warmup": 1000, "decay": 2000},
            {1000: 1.0, 5000: 1.0, 8000: 1.0, 9000: 0.5, 10_000: 0.0},
        ),
    ],
)
def test_factors_after_a_warmup(make: Callable[..., Any], arguments: dict[str, Any], factors: dict[int, float]) -> None:
    schedule = make(optimizer(), **arguments)
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors)


@pytest.mark.parametrize(
    ("warmup", "decay", "total_steps"), [(-1, 10, 100), (10, 0, 100), (100, 600, 500), (500, 501, 1000)]
)
def test_wrong_lengths_of_a_schedule_are_refused(warmup: int, decay: int, total_steps: int) -> None:
    with pytest.raises(UserError, match="warmup"):
        WarmupStableDecay(optimizer(), total_steps, warmup=warmup, decay=decay)


class Rates(Callback):
    """Notes the learning rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"] / RATE)


def rates_of(schedule: Any, steps: int) -> list[float]:
    """The rate of each step of a training, as a factor of the optimizer's."""
    rates = Rates()
    fit(loop={"max_duration": steps}, callbacks=[rates], schedulers=schedule, val=None)
    return rates.rates


def sequence(optimizer: Optimizer) -> SequentialLR:
    rise, fall = LinearLR(optimizer, 0.5, 1.0, 2), LinearLR(optimizer, 1.0, 0.5, 2)
    return SequentialLR(optimizer, [rise, fall], [3])


def constant_with_warmup(optimizer: Optimizer) -> SequentialLR:
    rise, stay = LinearLR(optimizer, 0.25, 1.0, 3), ConstantLR(optimizer, 1.0, 1)
    return SequentialLR(optimizer, [rise, stay], [3])


def stable_decay_in_periods(step: int) -> float:
    """Two periods of four steps, each with a decay over its last two."""
    return min(1.0, (4 - step % 4) / 2)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Scheduled(constant_with_warmup, "step"), [0.25, 0.5, 0.75, 1.0, 1.0]),
        (Scheduled(sequence, "step"), [0.5, 0.75, 1.0, 1.0, 0.75, 0.5]),
    ],
)
def test_schedules_set_the_rates_of_a_training(schedule: Any, factors: list[float]) -> None:
    assert rates_of(schedule, len(factors)) == pytest.approx(factors)


@pytest.mark.parametrize(
    "factor",
    [
        lambda step: 0.001 * 1000 ** (step / 8),
        lambda step: min(1.0, 2 * (step + 1) ** -0.51),
        stable_decay_in_periods,
        lambda step: 1.0 if step < 5 else (8 - step) / 3,
        lambda step: min(1.0, 0.3 + 0.7 * step / 4),
    ],
)
def test_other_schedules_are_formulas(factor: Callable[[int], float]) -> None:
    rates = rates_of(lambda optimizer: LambdaLR(optimizer, factor), 8)
    assert rates == pytest.approx([factor(step) for step in range(8)])
