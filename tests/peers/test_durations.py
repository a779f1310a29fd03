"""Durations as texts, and schedules of the learning rate with a warm-up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from user_loaders import Watcher, batches, make_trainer

from trainer_cli import (
    ConfigError,
    Duration,
    TrainingLoop,
    WarmupCosine,
    WarmupLinear,
    WarmupPolynomial,
    scheduler_factory,
)

MILLION = {"total_steps": 1_000_000}


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("1ep", 1, "ep"),
        ("2st", 2, "st"),
        ("3e10sp", 3 * 10**10, "sp"),
        ("4tok", 4, "tok"),
        ("6sec", 6, "s"),
        ("1h20m40s", 4840, "s"),
        ("2.0ep", 2, "ep"),
        ("3.000st", 3, "st"),
        ("030.0sp", 30, "sp"),
        ("30sec", 30, "s"),
    ],
)
def test_durations_are_read(text: str, amount: int, unit: str) -> None:
    duration = Duration.parse(text)
    assert (float(duration.value), duration.unit.value) == (amount, unit)


def test_half_of_the_run_may_be_an_interval() -> None:
    watcher = Watcher()
    make_trainer(8, watcher, eval_interval="0.5dur").fit(batches(), batches())
    assert [step for step, _, _ in watcher.evaluations] == [4, 8]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *[(text, "expected a number of steps, .* 1e9tok") for text in ("3_0e10sp", "4_000tok", "4_00_0tok")],
        ("2ba", "such as 500st, 3ep"),
        ("2iter", "such as 500st, 3ep"),
        *[
            (text, "steps, samples and tokens are whole numbers")
            for text, name in (("2.1st", "step"), ("3.2sp", "sample"), ("3.4tok", "token"))
        ],
    ],
)
def test_wrong_durations_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"loop.max_duration: '{text}' is not a duration.*{reason}"):
        TrainingLoop(max_duration=text)


@pytest.mark.parametrize(("text", "steps"), [("1.5ep", 8), ("0.1sec", None)])
def test_parts_of_an_epoch_and_of_a_second(text: str, steps: int | None) -> None:
    made = make_trainer(text)
    made.fit(batches(10, 2))
    assert steps is None or made.progress.step == steps
    assert made.progress.seconds >= (0.1 if steps is None else 0)


def optimizer_of_rate_1() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.mark.parametrize(
    ("kind", "settings", "steps", "rates"),
    [
        (WarmupLinear, MILLION, (100_000, 200_000, 400_000), (0.9, 0.8, 0.6)),
        (WarmupLinear, MILLION | {"warmup": 500_000}, (500_000, 750_000, 1_000_000), (1, 0.5, 0)),
        (WarmupLinear, MILLION | {"warmup": 500}, (500, 500_250), (1, 0.5)),
        (WarmupCosine, MILLION, (0, 333_333, 500_000, 666_667, 1_000_000), (1, 0.75, 0.5, 0.25, 0)),
        (WarmupCosine, MILLION | {"warmup": 900_000}, (900_000, 933_333, 950_000, 1_000_000), (1, 0.75, 0.5, 0)),
        (
            WarmupCosine,
            {"total_steps": 10_000, "warmup": 9_000, "min_ratio": 0.5},
            (9_000, 9_333, 9_500, 10_000),
            (1, 0.875, 0.75, 0.5),
        ),
        (WarmupPolynomial, MILLION | {"power": 2.0}, (0, 100_000, 200_000, 500_000), (1, 0.81, 0.64, 0.25)),
        (WarmupPolynomial, MILLION | {"power": 2.0, "warmup": 900_000}, (900_000, 929_289, 1_000_000), (1, 0.5, 0)),
        (
            WarmupPolynomial,
            {"total_steps": 10_000, "power": 2.0, "warmup": 9_000, "min_ratio": 0.5},
            (9_000, 9_293, 10_000),
            (1, 0.75, 0.5),
        ),
    ],
)
def test_factors_of_schedules(
    kind: Any, settings: dict[str, Any], steps: Sequence[int], rates: Sequence[float]
) -> None:
    """The rates as a resume at each step sets them."""
    optimizer = optimizer_of_rate_1()
    schedule = kind(optimizer, **settings)
    for step, rate in zip(steps, rates, strict=True):
        schedule.load_state_dict({"step": step})
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, abs=1e-3), f"step {step}"


@pytest.mark.parametrize(
    ("kind", "settings", "steps", "rates"),
    [
        (torch.optim.lr_scheduler.StepLR, {"step_size": "10st", "interval": "step"}, (5, 15, 35), (1, 0.1, 0.001)),
        (
            torch.optim.lr_scheduler.MultiStepLR,
            {"milestones": [10, 30, 70], "interval": "step"},
            (5, 20, 50, 100),
            (1, 0.1, 0.01, 0.001),
        ),
        (torch.optim.lr_scheduler.ExponentialLR, {"gamma": 0.5}, (1, 2, 4), (0.5, 0.25, 0.0625)),
        (
            torch.optim.lr_scheduler.CosineAnnealingWarmRestarts,
            {"T_0": "30st", "interval": "step"},
            (0, 10, 15, 20, 30, 40),
            (1, 0.75, 0.5, 0.25, 1, 0.75),
        ),
        (
            WarmupCosine,
            {"total_steps": 30, "min_ratio": 0.5},
            (0, 10, 15, 20, 30, 50),
            (1, 0.875, 0.75, 0.625, 0.5, 0.5),
        ),
        (
            WarmupPolynomial,
            {"total_steps": 100, "power": 2.0, "min_ratio": 0.5},
            (0, 10, 20, 50),
            (1, 0.905, 0.82, 0.625),
        ),
    ],
)
def test_rates_of_schedules_in_a_training(
    kind: Any, settings: dict[str, Any], steps: Sequence[int], rates: Sequence[float]
) -> None:
    """The rates that the optimizer has in a training, at one step an epoch."""
    watcher = Watcher()
    made = make_trainer(
        max(steps) + 1,
        watcher,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        schedulers=scheduler_factory(kind, TrainingLoop(max_duration=max(steps) + 1), **settings),
    )
    made.fit(batches(2, 2))
    assert [watcher.rates[step] for step in steps] == pytest.approx(list(rates), abs=1e-6)


@pytest.mark.parametrize("warmup", [10, 500, 500_000])
def test_the_first_step_of_a_warmup_has_a_rate(warmup: int) -> None:
    """From a part of the rate, so that the first step trains, up to the whole."""
    optimizer = optimizer_of_rate_1()
    schedule = WarmupLinear(optimizer, total_steps=2 * warmup, warmup=warmup)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / (warmup + 1))
    assert schedule.factor(warmup // 2) == pytest.approx(0.5, abs=0.5 / warmup)
    assert schedule.factor(warmup) == 1.0


def test_a_warmup_as_long_as_the_run_warns() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    cast("Any", handler).emit = records.append
    logger = logging.getLogger("trainer_cli")
    logger.addHandler(handler)
    try:
        schedule = WarmupLinear(optimizer_of_rate_1(), total_steps=1000, warmup=1000)
    finally:
        logger.removeHandler(handler)
    assert [schedule.factor(step) for step in (99, 999)] == pytest.approx([0.1, 1.0])
    assert "warmup of 1,000 steps is cut: the run has 1,000 steps" in [record.getMessage() for record in records]
