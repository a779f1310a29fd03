"""The claims of Composer's tests of durations and of learning-rate schedules."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from peer_runs import Watcher, batches, make_trainer

from trainer_cli import (
    ConfigError,
    Duration,
    TrainingLoop,
    WarmupCosine,
    WarmupLinear,
    WarmupPolynomial,
    scheduler_factory,
)


def check_parsed(folder: Path, text: str, amount: int, unit: str) -> None:
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (amount, unit)


def check_share_of_the_run(folder: Path) -> None:
    watcher = Watcher()
    make_trainer(8, watcher, eval_interval="0.5dur").fit(batches(), batches())
    assert [step for step, _, _ in watcher.evaluations] == [4, 8]


def check_refused(folder: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"loop.max_duration: '{text}' is not a duration.*{reason}"):
        TrainingLoop(max_duration=text)


def check_fraction_trains(folder: Path, text: str, steps: int | None) -> None:
    made = make_trainer(text)
    made.fit(batches(10, 2))
    assert steps is None or made.progress.step == steps
    assert made.progress.seconds >= (0.1 if steps is None else 0)


def optimizer_of_rate_1() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def check_factors(
    folder: Path, kind: Any, settings: dict[str, Any], steps: Sequence[int], rates: Sequence[float]
) -> None:
    """The rates as a resume at each step sets them."""
    optimizer = optimizer_of_rate_1()
    schedule = kind(optimizer, **settings)
    for step, rate in zip(steps, rates, strict=True):
        schedule.load_state_dict({"step": step})
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, abs=1e-3), f"step {step}"


def check_rates_of_a_training(
    folder: Path, kind: Any, settings: dict[str, Any], steps: Sequence[int], rates: Sequence[float]
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


def check_rising(folder: Path, warmup: int) -> None:
    """From a part of the rate, so that the first step trains, up to the whole."""
    optimizer = optimizer_of_rate_1()
    schedule = WarmupLinear(optimizer, total_steps=2 * warmup, warmup=warmup)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / (warmup + 1))
    assert schedule.factor(warmup // 2) == pytest.approx(0.5, abs=0.5 / warmup)
    assert schedule.factor(warmup) == 1.0


def check_warmup_as_long_as_the_training(folder: Path) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("trainer_cli")
    logger.addHandler(handler)
    try:
        schedule = WarmupLinear(optimizer_of_rate_1(), total_steps=1000, warmup=1000)
    finally:
        logger.removeHandler(handler)
    assert [schedule.factor(step) for step in (99, 999)] == pytest.approx([0.1, 1.0])
    assert "warmup of 1000 steps is cut: the training has 1000 steps" in [one.getMessage() for one in records]


MILLION = {"total_steps": 1_000_000}
NO_UNDERSCORES = "Digits of a number are not grouped by underscores here, as YAML itself reads 4_000 in other ways."
LATE = "The first step already has 1 / (warmup + 1) of the rate, because a step at a rate of 0 would train nothing."
PARTS = "A part of an epoch is a number of steps here, and a part of a second a time, so both mean something."
TIME_PARSE, BAD_STRINGS = "test_time: test_time_parse", "test_time: test_timestep_bad_strings"
SCHEDULES = "optim/test_scheduler: test_scheduler_init"

CLAIMS: list[Claim] = [
    *claims(
        TIME_PARSE,
        check_parsed,
        {
            "1ep is an epoch": ("1ep", 1, "ep"),
            "2st are two steps": ("2st", 2, "st"),
            "3e10sp are thirty billion samples": ("3e10sp", 3 * 10**10, "sp"),
            "4tok are four tokens": ("4tok", 4, "tok"),
            "6sec are six seconds": ("6sec", 6, "s"),
            "1h20m40s are 4840 seconds": ("1h20m40s", 4840, "s"),
        },
    ),
    *claims(
        TIME_PARSE,
        check_refused,
        {
            f"{text} is read, with digits grouped by underscores": (text, "expected a number of steps, .* 1e9tok")
            for text in ("3_0e10sp", "4_000tok", "4_00_0tok")
        },
        difference=NO_UNDERSCORES,
    ),
    *claims(TIME_PARSE, check_share_of_the_run, {"0.5dur is half of the training": ()}),
    *claims(
        TIME_PARSE,
        check_refused,
        {
            "2ba, a count of batches, is read": ("2ba", "such as 500st, 3ep"),
            "2iter, a count of iterations, is read": ("2iter", "such as 500st, 3ep"),
        },
        difference="Lengths are counted in optimizer steps (st) here; the message shows the units that there are.",
    ),
    *claims(
        BAD_STRINGS,
        check_refused,
        {
            f"{text}, a part of a {name}, is refused": (text, "steps, samples and tokens are whole numbers")
            for text, name in (("2.1st", "step"), ("3.2sp", "sample"), ("3.4tok", "token"))
        },
    ),
    *claims(
        BAD_STRINGS,
        check_fraction_trains,
        {
            "1.5ep, a part of an epoch, is refused": ("1.5ep", 8),
            "0.1sec, a part of a second, is refused": ("0.1sec", None),
        },
        difference=PARTS,
    ),
    *claims(
        "test_time: test_timestep_valid_strings",
        check_parsed,
        {
            "2.0ep are two epochs": ("2.0ep", 2, "ep"),
            "3.000st are three steps": ("3.000st", 3, "st"),
            "030.0sp are thirty samples": ("030.0sp", 30, "sp"),
            "30sec are thirty seconds": ("30sec", 30, "s"),
        },
    ),
    *claims(
        SCHEDULES,
        check_rates_of_a_training,
        {
            "a tenth of the rate every 10 steps": (
                torch.optim.lr_scheduler.StepLR,
                {"step_size": "10st", "interval": "step"},
                (5, 15, 35), (1, 0.1, 0.001),
            ),
            "a tenth of the rate at each of three milestones": (
                torch.optim.lr_scheduler.MultiStepLR,
                {"milestones": [10, 30, 70], "interval": "step"},
                (5, 20, 50, 100), (1, 0.1, 0.01, 0.001),
            ),
            "half of the rate after each epoch": (
                torch.optim.lr_scheduler.ExponentialLR, {"gamma": 0.5}, (1, 2, 4), (0.5, 0.25, 0.0625),
            ),
            "a cosine that starts again every 30 steps": (
                torch.optim.lr_scheduler.CosineAnnealingWarmRestarts,
                {"T_0": "30st", "interval": "step"},
                (0, 10, 15, 20, 30, 40), (1, 0.75, 0.5, 0.25, 1, 0.75),
            ),
            "a cosine of 30 steps down to half of the rate, then constant": (
                WarmupCosine, {"total_steps": 30, "min_ratio": 0.5},
                (0, 10, 15, 20, 30, 50), (1, 0.875, 0.75, 0.625, 0.5, 0.5),
            ),
            "a square of 100 steps down to half of the rate": (
                WarmupPolynomial, {"total_steps": 100, "power": 2.0, "min_ratio": 0.5},
                (0, 10, 20, 50), (1, 0.905, 0.82, 0.625),
            ),
        },
    ),
    *claims(
        SCHEDULES,
        check_factors,
        {
            "a line over a million steps": (WarmupLinear, MILLION, (100_000, 200_000, 400_000), (0.9, 0.8, 0.6)),
            "a line after a warm-up of half a million steps": (
                WarmupLinear, MILLION | {"warmup": 500_000}, (500_000, 750_000, 1_000_000), (1, 0.5, 0),
            ),
            "a line after a warm-up of 500 steps": (
                WarmupLinear, MILLION | {"warmup": 500}, (500, 500_250), (1, 0.5),
            ),
            "a cosine over a million steps": (
                WarmupCosine, MILLION, (0, 333_333, 500_000, 666_667, 1_000_000), (1, 0.75, 0.5, 0.25, 0),
            ),
            "a cosine after a warm-up of nine tenths": (
                WarmupCosine, MILLION | {"warmup": 900_000},
                (900_000, 933_333, 950_000, 1_000_000), (1, 0.75, 0.5, 0),
            ),
            "a cosine to half of the rate after a warm-up of nine tenths": (
                WarmupCosine, {"total_steps": 10_000, "warmup": 9_000, "min_ratio": 0.5},
                (9_000, 9_333, 9_500, 10_000), (1, 0.875, 0.75, 0.5),
            ),
            "a square over a million steps": (
                WarmupPolynomial, MILLION | {"power": 2.0},
                (0, 100_000, 200_000, 500_000), (1, 0.81, 0.64, 0.25),
            ),
            "a square after a warm-up of nine tenths": (
                WarmupPolynomial, MILLION | {"power": 2.0, "warmup": 900_000},
                (900_000, 929_289, 1_000_000), (1, 0.5, 0),
            ),
            "a square to half of the rate after a warm-up of nine tenths": (
                WarmupPolynomial, {"total_steps": 10_000, "power": 2.0, "warmup": 9_000, "min_ratio": 0.5},
                (9_000, 9_293, 10_000), (1, 0.75, 0.5),
            ),
        },
    ),
    *claims(
        SCHEDULES,
        check_rising,
        {
            f"a warm-up of {warmup} steps begins at a rate of 0, and has half of it half way": (warmup,)
            for warmup in (10, 500, 500_000)
        },
        difference=LATE,
    ),
    *claims(
        SCHEDULES,
        check_warmup_as_long_as_the_training,
        {"a warm-up as long as the training reaches the rate at its end, with a warning": ()},
    ),
]  # fmt: skip


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
