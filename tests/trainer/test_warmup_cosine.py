"""The schedule of learning rates: its shape, its groups, and its way back from a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch

from trainer_cli import WarmupCosine
from trainer_cli.errors import UserError


def groups(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


@pytest.mark.parametrize(
    ("step", "factor"),
    [(0, 1 / 5), (3, 4 / 5), (4, 1.0), (12, 0.1 + 0.9 * 0.5), (20, 0.1), (99, 0.1)],
)
def test_the_rate_rises_linearly_then_falls_along_a_cosine_and_stays(step: int, factor: float) -> None:
    assert WarmupCosine(groups(1.0), 20, warmup=4, min_ratio=0.1).factor(step) == pytest.approx(factor)


def test_without_a_warmup_the_first_step_has_the_peak() -> None:
    assert WarmupCosine(groups(1.0), 10).factor(0) == 1.0


@pytest.mark.parametrize("wrong", [{"warmup": -1}, {"min_ratio": 1.5}, {"min_ratio": -0.1}])
def test_what_makes_no_schedule_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        WarmupCosine(groups(1.0), 10, **wrong)  # type: ignore[arg-type]


def test_each_group_keeps_its_own_peak() -> None:
    schedule = WarmupCosine(groups(1.0, 0.1), total_steps=10)
    for _ in range(5):
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize("saved_at", range(8))
def test_a_schedule_goes_on_where_it_was_saved_also_after_its_optimizer_was_loaded(saved_at: int) -> None:
    straight = WarmupCosine(groups(0.3), total_steps=7, warmup=2)
    rates = []
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
    assert all(math.isfinite(rate) for row in rates for rate in row)


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
