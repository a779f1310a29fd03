"""Schedules with a warm-up, schedules of tagged groups, torch's own from YAML, bounds of the loss scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, everything, loader, same, trainer
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.trainer.optimizers import optimizer_factory
from trainer_cli.trainer.precision import LossScaler, Precision
from trainer_cli.trainer.scheduler_intervals import Scheduled
from trainer_cli.trainer.schedulers import scheduler_factory
from trainer_cli.trainer.training_loop import TrainingLoop
from trainer_cli.trainer.warmup import (
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupPolynomial,
    WarmupStableDecay,
)


def _rates(kind: Any, steps: int, **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD(Line().parameters(), lr=2.0)
    schedule = kind(optimizer, **settings)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("kind", "settings", "rates"),
    [
        (WarmupLinear, {"total_steps": 6, "warmup": 2}, [2 / 3, 4 / 3, 2, 1.5, 1, 0.5, 0, 0]),
        (WarmupPolynomial, {"total_steps": 4, "power": 2.0, "min_ratio": 0.5}, [2, 1.5625, 1.25, 1.0625, 1, 1]),
        (WarmupStableDecay, {"total_steps": 8, "warmup": 1, "decay": 4}, [1, 2, 2, 2, 2, 1.5, 1, 0.5, 0, 0]),
        (WarmupStableDecay, {"total_steps": 20}, [2] * 19 + [1, 0]),
        (WarmupInverseSqrt, {"warmup": 3}, [0.5, 1, 1.5, 2, *(2 * math.sqrt(4 / (4 + n)) for n in range(1, 4))]),
    ],
)
def test_a_schedule_rises_over_its_warm_up_and_then_follows_its_curve(
    kind: Any, settings: Any, rates: list[float]
) -> None:
    assert _rates(kind, len(rates), **settings) == pytest.approx(rates)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (WarmupLinear, {"total_steps": 6, "warmup": -1}, "warmup is -1"),
        (WarmupLinear, {"total_steps": 6, "min_ratio": 2.0}, "min_ratio is 2"),
        (WarmupPolynomial, {"total_steps": 6, "power": 0.0}, "power is 0"),
        (WarmupStableDecay, {"total_steps": 6, "warmup": 4, "decay": 3}, "do not fit into 6 steps"),
        (WarmupInverseSqrt, {"warmup": 0}, "warmup is 0, but it must be at least 1"),
    ],
)
def test_lengths_that_make_no_schedule_are_refused(kind: Any, settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _rates(kind, 1, **settings)


GROUPS = {"*bias": {"tag": "bias", "lr": 0.5}, "*weight": {"tag": "weight"}}


def _tagged(path: Path, steps: int) -> Any:
    loop = TrainingLoop(max_duration=6)
    return trainer(
        optimizer=optimizer_factory(torch.optim.SGD, lr=0.1, param_groups=GROUPS),
        schedulers={
            "bias": Scheduled(lambda optimizer: StepLR(optimizer, 2, gamma=0.1), "step", groups="bias"),
            "weight": scheduler_factory(WarmupLinear, loop, total_steps=8, groups=["weight"]),
        },
        checkpoint=CheckpointerCallback(path, save_interval=3),
        settings={"max_duration": steps},
    )


def test_schedules_of_tagged_groups_change_these_alone_and_resume_exactly(tmp_path: Path) -> None:
    straight = _tagged(tmp_path / "a", 6)
    straight.fit(loader())
    (weight, bias) = straight.optimizer.param_groups
    assert (weight["tag"], bias["tag"]) == ("weight", "bias")
    assert weight["lr"] == pytest.approx(0.1 * 2 / 8)
    assert bias["lr"] == pytest.approx(0.5 * 0.001)
    _tagged(tmp_path / "b", 3).fit(loader())
    resumed = _tagged(tmp_path / "b", 6)
    resumed.fit(loader())
    assert same(everything(straight), everything(resumed)) == []


def test_a_tag_that_no_group_has_is_refused() -> None:
    made = trainer(
        optimizer=optimizer_factory(torch.optim.SGD, lr=0.1, param_groups=GROUPS),
        schedulers=Scheduled(lambda optimizer: ExponentialLR(optimizer, 0.9), groups="bais"),
    )
    with pytest.raises(ConfigError, match=r"no parameter group has the tag 'bais'.*Did you mean 'bias'"):
        made.fit(loader())


def test_a_dynamic_loss_scale_stays_in_its_bounds() -> None:
    scaler = LossScaler(torch.device("cpu"), min_scale=1024.0, max_scale=32768.0)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    assert scaler.metrics()["loss_scale"] == 32768
    scales = []
    for value in (math.inf, math.inf, math.inf, math.inf, math.inf, math.inf, math.inf):
        parameter.grad = torch.full((1,), value)
        scaler.scaled(torch.ones(()))
        scaler.unscale(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.metrics()["loss_scale"])
    assert scales == [16384, 8192, 4096, 2048, 1024, 1024, 1024]
    state = scaler.state_dict()
    scaler._scaler.set_growth_interval(1)
    for _ in range(7):
        parameter.grad = torch.ones(1)
        scaler.unscale(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.metrics()["loss_scale"] == 32768
    scaler.load_state_dict(state)
    assert scaler.metrics()["loss_scale"] == 1024


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp8"}, "precision.dtype is 'fp8', but it must be one of fp32, bf16, fp16"),
        ({"min_loss_scale": 1.0}, "precision.min_loss_scale is of a dynamic loss scale, and there is none"),
        ({"dtype": "fp16", "loss_scale": 8, "max_loss_scale": 16.0}, "is of a dynamic loss scale"),
        ({"dtype": "fp16", "loss_scale": 8, "init_scale": 16.0}, "precision.init_scale is of a dynamic loss scale"),
        ({"growth_interval": 5}, "precision.growth_interval is of a dynamic loss scale"),
        ({"dtype": "fp16", "min_loss_scale": 8.0, "max_loss_scale": 4.0}, r"min_loss_scale \(8\) is above"),
        ({"dtype": "fp16", "init_scale": 2.0, "min_loss_scale": 4.0}, r"init_scale \(2\) is not between"),
        ({"dtype": "fp16", "init_scale": 8.0, "max_loss_scale": 4.0}, r"init_scale \(8\) is not between"),
        ({"dtype": "fp16", "growth_interval": 0}, "growth_interval is 0, but it must be a finite number of at least 1"),
    ],
)
def test_bounds_without_a_dynamic_scale_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Precision(**settings)
