"""The claims of Lightning's tests about schedules, and about what may be given as optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Net, Script, fit, make_trainer, rows, two_optimizers
from torch import nn
from torch.optim import SGD, lr_scheduler

from trainer_cli import (
    Callback,
    Scheduled,
    Trainer,
    UserError,
)

ONE = {"optimizer": lambda model: SGD(model.parameters(), lr=0.1)}


def step_lr(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.1)


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)


class OwnPlateau(lr_scheduler.ReduceLROnPlateau):
    """A plateau schedule of the user's."""


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        (step_lr, [0.1, 0.1, 0.01, 0.01]),
        (Scheduled(step_lr, "step"), [0.1, 0.01, 0.001]),
        (step_lr, [0.1, 0.1, 0.01, 0.01, 0.001]),
        (Scheduled(plateau, metric="val/score"), [0.1, 0.1, 0.1, 0.1, 0.01, 0.01]),
        (Scheduled(lambda optimizer: OwnPlateau(optimizer, patience=0), metric="val/score"), [0.1] * 4 + [0.01]),
    ],
)
def test_rates_of_a_schedule(schedule: Any, after: Sequence[float]) -> None:
    """Rates after the steps of a training with two batches an epoch."""
    rates: list[float] = []

    class See(Callback):
        def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
            assert trainer.optimizer is not None
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    fit(
        batches=2, loop={"max_duration": len(after), "eval_interval": "1ep"},
        callbacks=[See(), Script([1])], schedulers=schedule,
    )  # fmt: skip
    assert rates == pytest.approx(list(after))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"schedulers": plateau, "val": 0}, "val/loss"),
        ({"schedulers": Scheduled(plateau, metric="val/nothing")}, "val/nothing"),
        ({"schedulers": Scheduled(step_lr, "batch")}, "interval is 'batch'"),
        ({"schedulers": Scheduled(plateau, "step")}, "interval"),
        ({"optimizer": lambda model: 1}, "ptimizer"),
        ({"optimizer": {"a": lambda model: None}}, "ptimizer"),
        ({"schedulers": lambda optimizer: step_lr(SGD([nn.Parameter(torch.ones(1))], lr=1))}, "ptimizer"),
        ({"schedulers": lambda optimizer: WithoutState(optimizer)}, "state_dict"),
        ({"schedulers": lambda optimizer: 3}, "sched"),
    ],
)
def test_wrong_optimizers_and_schedules_are_refused(settings: Mapping[str, Any], match: str) -> None:
    with pytest.raises((UserError, TypeError), match=match):
        fit(loop={"eval_interval": 2, "log_interval": 1}, **settings)


def test_one_cycle_steps_with_batches_unless_told() -> None:
    """A schedule over steps at the interval of epochs is what the user said, and runs."""
    run = fit(
        batches=2,
        schedulers=Scheduled(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9), "epoch"),
    )
    assert run.trainer.schedulers.live["scheduler"].last_epoch == 2


@pytest.mark.parametrize(
    ("interval", "save", "counts"),
    [("epoch", "1ep", {3: 1, 6: 2}), ("epoch", 2, {2: 0, 4: 1, 6: 2}), ("step", 2, {2: 2, 4: 4, 6: 6})],
)
def test_a_checkpoint_has_the_stepped_schedule(
    folder: Path, interval: str, save: int | str, counts: Mapping[int, int]
) -> None:
    """The schedule in a checkpoint has made the step of that moment."""
    fit(
        folder, batches=3, save={"save_interval": save, "save_final": False}, loop={"max_duration": "2ep"},
        schedulers=Scheduled(step_lr, interval),
    )  # fmt: skip
    for step, count in counts.items():
        trainer = make_trainer(schedulers=Scheduled(step_lr, interval))
        trainer.load_checkpoint(folder / "checkpoints" / f"step{step}")
        assert trainer.schedulers.live["scheduler"].last_epoch == count
        assert trainer.optimizer is not None
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**count)


@pytest.mark.parametrize(
    ("settings", "optimizers", "schedules"),
    [
        ({"schedulers": plateau, "loop": {"eval_interval": 2}}, 1, 1),
        (ONE, 1, 0),
        ({"optimizer": two_optimizers()}, 2, 0),
        ({**ONE, "schedulers": step_lr}, 1, 1),
        ({**ONE, "schedulers": [step_lr, step_lr]}, 1, 2),
        ({"optimizer": two_optimizers(), "schedulers": step_lr}, 2, 2),
    ],
)
def test_forms_of_optimizers_and_schedules(settings: Mapping[str, Any], optimizers: int, schedules: int) -> None:
    run = fit(**settings)
    assert len(run.trainer.optimizers) == optimizers
    assert len(run.trainer.schedulers.live) == schedules


@pytest.mark.parametrize("training", [True, False])
def test_only_a_training_needs_an_optimizer(training: bool) -> None:
    trainer = Trainer(model=Net, seed=0, device="cpu")
    if training:
        with pytest.raises(UserError, match="no optimizer"):
            trainer.fit(rows(2))
    else:
        assert "loss" in trainer.validate(rows(2))["val"]


class Minimal:
    """A schedule that is none of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class WithoutState:
    """A schedule that has no state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...


def test_a_schedule_of_another_class_is_stepped() -> None:
    run = fit(schedulers=lambda optimizer: Minimal(optimizer))
    assert run.trainer.schedulers.live["scheduler"].count == 4
