"""Our own schedules: their warm-up, their curves, their groups, and their way back from a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, StopAt, assert_resumes_exactly, loader, trainer
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.optim.optimizers import optimizer_factory
from trainer_cli.optim.scheduler_intervals import Scheduled
from trainer_cli.optim.schedulers import scheduler_factory
from trainer_cli.optim.warmup import (
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupPolynomial,
    WarmupStableDecay,
)
from trainer_cli.trainer.training_loop import TrainingLoop


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
        (WarmupCosine, {"total_steps": 8, "warmup": 4, "min_ratio": 0.1},
         [0.4, 0.8, 1.2, 1.6, 2, *(0.2 + 0.9 * (1 + math.cos(math.pi * n / 4)) for n in range(1, 5)), 0.2]),
        (WarmupCosine, {"total_steps": 2}, [2, 1, 0]),
        (WarmupLinear, {"total_steps": 6, "warmup": 2}, [2 / 3, 4 / 3, 2, 1.5, 1, 0.5, 0, 0]),
        (WarmupPolynomial, {"total_steps": 4, "power": 2.0, "min_ratio": 0.5}, [2, 1.5625, 1.25, 1.0625, 1, 1]),
        (WarmupStableDecay, {"total_steps": 8, "warmup": 1, "decay": 4}, [1, 2, 2, 2, 2, 1.5, 1, 0.5, 0, 0]),
        (WarmupStableDecay, {"total_steps": 20}, [2] * 19 + [1, 0]),
        (WarmupInverseSqrt, {"warmup": 3}, [0.5, 1, 1.5, 2, *(2 * math.sqrt(4 / (4 + n)) for n in range(1, 4))]),
    ],
)  # fmt: skip
def test_a_schedule_rises_over_its_warm_up_and_then_follows_its_curve(
    kind: Any, settings: Any, rates: list[float]
) -> None:
    assert _rates(kind, len(rates), **settings) == pytest.approx(rates)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        *[
            (kind, {"warmup": warmup}, r"needs total_steps.*scheduler_factory\(WarmupCosine, loop")
            for kind in (WarmupCosine, WarmupLinear, WarmupPolynomial, WarmupStableDecay)
            for warmup in (1, "1ep")
        ],
        (WarmupCosine, {"total_steps": 10, "warmup": -1}, "warmup"),
        (WarmupCosine, {"total_steps": 10, "min_ratio": 1.5}, "min_ratio"),
        (WarmupCosine, {"total_steps": 10, "min_ratio": -0.1}, "min_ratio"),
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


GROUPS: dict[str, dict[str, Any]] = {"*bias": {"tag": "bias", "lr": 0.5}, "*weight": {"tag": "weight"}}


def _tagged(folder: Path, *callbacks: Any) -> Any:
    made = trainer(
        optimizer=optimizer_factory(torch.optim.SGD, lr=0.1, param_groups=GROUPS),
        schedulers={
            "bias": Scheduled(lambda optimizer: StepLR(optimizer, 2, gamma=0.1), "step", groups="bias"),
            "weight": scheduler_factory(WarmupLinear, TrainingLoop(max_duration=6), total_steps=8, groups=["weight"]),
        },
        callbacks=callbacks,
        checkpoint=CheckpointerCallback(folder),
    )
    made.fit(loader())
    return made


def test_schedules_of_tagged_groups_change_these_alone_and_resume_exactly(tmp_path: Path) -> None:
    straight, _ = assert_resumes_exactly(_tagged, tmp_path, 3)
    (weight, bias) = straight.optimizer.param_groups
    assert (weight["tag"], bias["tag"]) == ("weight", "bias")
    assert weight["lr"] == pytest.approx(0.1 * 2 / 8)
    assert bias["lr"] == pytest.approx(0.5 * 0.001)


def _scaled(folder: Path, *callbacks: Any, lr: float = 0.1, keep: Any = ()) -> Any:
    made = trainer(
        optimizer=optimizer_factory(torch.optim.SGD, lr=lr, param_groups={"*bias": {"lr_scale": 0.5}}),
        schedulers=scheduler_factory(WarmupLinear, TrainingLoop(max_duration=6), total_steps=8),
        callbacks=callbacks,
        checkpoint=CheckpointerCallback(folder),
    )
    made.fit(loader(), keep_settings=keep)
    return made


def test_scaled_rates_resume_exactly_and_follow_another_rate_of_the_optimizer(tmp_path: Path) -> None:
    assert_resumes_exactly(_scaled, tmp_path / "same", 3)
    _scaled(tmp_path / "changed", StopAt(3))
    changed = _scaled(tmp_path / "changed", lr=0.8, keep=("lr",))
    assert changed.loaded_step == 3
    assert [group["lr"] for group in changed.optimizer.param_groups] == pytest.approx([0.8 * 2 / 8, 0.4 * 2 / 8])


def test_a_tag_that_no_group_has_is_refused() -> None:
    made = trainer(
        optimizer=optimizer_factory(torch.optim.SGD, lr=0.1, param_groups=GROUPS),
        schedulers=Scheduled(lambda optimizer: ExponentialLR(optimizer, 0.9), groups="bais"),
    )
    with pytest.raises(ConfigError, match=r"no parameter group has the tag 'bais'.*Did you mean 'bias'"):
        made.fit(loader())


def groups(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def test_each_group_keeps_its_own_peak() -> None:
    schedule = WarmupCosine(groups(1.0, 0.1), total_steps=10)
    for _ in range(5):
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize("saved_at", [0, 1, 2, 6, 7])
def test_a_schedule_goes_on_where_it_was_saved_also_after_its_optimizer_was_loaded(saved_at: int) -> None:
    straight, rates = WarmupCosine(groups(0.3), total_steps=7, warmup=2), []
    for step in range(9):
        rates.append(straight.get_last_lr())
        if step == saved_at:
            optimizer = groups(0.3)
            resumed = WarmupCosine(optimizer, total_steps=7, warmup=2)
            optimizer.load_state_dict(straight._optimizer.state_dict())
            resumed.load_state_dict(straight.state_dict())
        straight.step()
    again = []
    for _ in range(saved_at, 9):
        again.append([group["lr"] for group in optimizer.param_groups])
        resumed.step()
    assert again == rates[saved_at:]


def test_a_group_added_later_has_its_own_peak_also_after_a_resume() -> None:
    def built(*rates: float) -> tuple[torch.optim.Optimizer, WarmupCosine]:
        optimizer = groups(0.3)
        schedule = WarmupCosine(optimizer, total_steps=8, warmup=2)
        for rate in rates:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate})
        return optimizer, schedule

    optimizer, schedule = built()
    schedule.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.9})
    schedule.step()
    schedule.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(3 * optimizer.param_groups[0]["lr"])
    again, resumed = built(0.9)
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    for one in (schedule, resumed):
        one.step()
    assert resumed.get_last_lr() == schedule.get_last_lr()
