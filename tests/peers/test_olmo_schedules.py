"""The claims of OLMo-core's tests about its schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
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


def optimizer() -> Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def check_factors(folder: Path, make: Callable[..., Any], arguments: dict[str, Any], factors: dict[int, float]) -> None:
    schedule = make(optimizer(), **arguments)
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors)


def check_refused(folder: Path, warmup: int, decay: int, total_steps: int) -> None:
    with pytest.raises(UserError, match="warmup"):
        WarmupStableDecay(optimizer(), total_steps, warmup=warmup, decay=decay)


class Rates(Callback):
    """Notes the learning rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"] / RATE)


def check_trained(folder: Path, schedule: Any, factors: list[float]) -> None:
    rates = Rates()
    fit(loop={"max_duration": len(factors)}, callbacks=[rates], schedulers=schedule, val=None)
    assert rates.rates == pytest.approx(factors)


def check_formula(folder: Path, factor: Callable[[int], float]) -> None:
    check_trained(folder, lambda optimizer: LambdaLR(optimizer, factor), [factor(step) for step in range(8)])


def sequence(optimizer: Optimizer) -> SequentialLR:
    rise, fall = LinearLR(optimizer, 0.5, 1.0, 2), LinearLR(optimizer, 1.0, 0.5, 2)
    return SequentialLR(optimizer, [rise, fall], [3])


def constant_with_warmup(optimizer: Optimizer) -> SequentialLR:
    rise, stay = LinearLR(optimizer, 0.25, 1.0, 3), ConstantLR(optimizer, 1.0, 1)
    return SequentialLR(optimizer, [rise, stay], [3])


def stable_decay_in_periods(step: int) -> float:
    """Two periods of four steps, each with a decay over its last two."""
    return min(1.0, (4 - step % 4) / 2)


SCHEDULES = "optim/scheduler_test.py"
TOTAL = {"total_steps": 10_000}
CLAIMS: list[Claim] = [
    *claims(
        SCHEDULES,
        check_factors,
        {
            "a cosine after a warm-up, at three steps": (
                WarmupCosine,
                {**TOTAL, "warmup": 3000, "min_ratio": 0.2},
                {3000: 1.0, 5000: 0.2 + 0.8 * (1 + math.cos(math.pi * 2 / 7)) / 2, 10_000: 0.2},
            ),
            "a line after a warm-up, at three steps": (
                WarmupLinear,
                {**TOTAL, "warmup": 3000, "min_ratio": 0.2},
                {3000: 1.0, 5000: 1 - 0.8 * 2 / 7, 10_000: 0.2},
            ),
            "an inverse square root after a warm-up, at three steps": (
                WarmupInverseSqrt,
                {"warmup": 3000},
                {3000: 1.0, 5000: math.sqrt(3001 / 5001), 10_000: math.sqrt(3001 / 10_001)},
            ),
            "warm-up, full rate and decay, at five steps": (
                WarmupStableDecay,
                {**TOTAL, "warmup": 1000, "decay": 2000},
                {1000: 1.0, 5000: 1.0, 8000: 1.0, 9000: 0.5, 10_000: 0.0},
            ),
        },
    ),
    *claims(
        f"{SCHEDULES}: test_constant_with_warmup",
        check_trained,
        {"a constant rate after a warm-up": (Scheduled(constant_with_warmup, "step"), [0.25, 0.5, 0.75, 1.0, 1.0])},
    ),
    *claims(
        f"{SCHEDULES}: SequentialScheduler",
        check_trained,
        {"several schedules one after another": (Scheduled(sequence, "step"), [0.5, 0.75, 1.0, 1.0, 0.75, 0.5])},
    ),
    *claims(
        f"{SCHEDULES}: WSDS errors",
        check_refused,
        {
            f"a warm-up of {warmup} and a decay of {decay} in {total} steps are refused": (warmup, decay, total)
            for warmup, decay, total in [(-1, 10, 100), (10, 0, 100), (100, 600, 500), (500, 501, 1000)]
        },
    ),
    *claims(
        SCHEDULES,
        check_formula,
        {
            "an exponential range test of the rate": (lambda step: 0.001 * 1000 ** (step / 8),),
            "a rate that falls as a power of the step": (lambda step: min(1.0, 2 * (step + 1) ** -0.51),),
            "full rate and decay in several periods": (stable_decay_in_periods,),
            "a schedule with its end overridden by a decay": (lambda step: 1.0 if step < 5 else (8 - step) / 3,),
            "a warm-up that begins above 0": (lambda step: min(1.0, 0.3 + 0.7 * step / 4),),
        },
        difference="No class has this name: torch's LambdaLR with the formula, or a class of one's own, does the same.",
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
