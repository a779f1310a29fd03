"""The claims of Lightning's tests about schedules, and about what may be given as optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import Net, Script, fit, make_trainer, rows, two_optimizers
from torch import nn
from torch.optim import SGD, lr_scheduler

from trainer_cli import (
    Callback,
    Scheduled,
    Trainer,
    UserError,
)

OPTIMIZERS = "test_optimizers: "
ONE = {"optimizer": lambda model: SGD(model.parameters(), lr=0.1)}


def check_rates(folder: Path, schedule: Any, after: Sequence[float], **loop: Any) -> None:
    """Rates after the steps of a training with two batches an epoch."""
    rates: list[float] = []

    class See(Callback):
        def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
            assert trainer.optimizer is not None
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    fit(
        batches=2, loop={"max_duration": len(after), "eval_interval": "1ep", **loop},
        callbacks=[See(), Script([1])], schedulers=schedule,
    )  # fmt: skip
    assert rates == pytest.approx(list(after))


def step_lr(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.1)


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)


class OwnPlateau(lr_scheduler.ReduceLROnPlateau):
    """A plateau schedule of the user's."""


def check_refused(folder: Path, settings: Mapping[str, Any], match: str) -> None:
    with pytest.raises((UserError, TypeError), match=match):
        fit(loop={"eval_interval": 2, "log_interval": 1}, **settings)


def check_one_cycle_by_epochs(folder: Path) -> None:
    """A schedule over steps at the interval of epochs is what the user said, and runs."""
    run = fit(
        batches=2,
        schedulers=Scheduled(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9), "epoch"),
    )
    assert run.trainer.schedulers.live["scheduler"].last_epoch == 2


def check_saved_schedule(folder: Path, interval: str, save: int | str, counts: Mapping[int, int]) -> None:
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


def check_forms(folder: Path, settings: Mapping[str, Any], optimizers: int, schedules: int) -> None:
    run = fit(**settings)
    assert len(run.trainer.optimizers) == optimizers
    assert len(run.trainer.schedulers.live) == schedules


def check_no_optimizer(folder: Path, training: bool) -> None:
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


def check_own_schedule(folder: Path) -> None:
    run = fit(schedulers=lambda optimizer: Minimal(optimizer))
    assert run.trainer.schedulers.live["scheduler"].count == 4


CLAIMS: list[Claim] = [
    *claims(
        f"{OPTIMIZERS}test_optimizer_with_scheduling",
        check_rates,
        {"a schedule over epochs steps at their end": (step_lr, [0.1, 0.1, 0.01, 0.01])},
    ),
    *claims(
        f"{OPTIMIZERS}test_lr_scheduler_step_hook",
        check_rates,
        {"a schedule may step with each batch": (Scheduled(step_lr, "step"), [0.1, 0.01, 0.001])},
    ),
    *claims(
        f"{OPTIMIZERS}test_lr_scheduler_epoch_step_frequency",
        check_rates,
        {"evaluations every second epoch change no schedule over epochs": (step_lr, [0.1, 0.1, 0.01, 0.01, 0.001])},
    ),
    *claims(
        f"{OPTIMIZERS}test_reducelronplateau_scheduling",
        check_rates,
        {
            "a plateau of the metric lowers the rate": (
                Scheduled(plateau, metric="val/score"),
                [0.1, 0.1, 0.1, 0.1, 0.01, 0.01],
            )
        },
    ),
    *claims(
        f"{OPTIMIZERS}test_scheduler_initialized_with_custom_reduceonplateau",
        check_rates,
        {
            "a plateau schedule of the user's does so, too": (
                Scheduled(lambda optimizer: OwnPlateau(optimizer, patience=0), metric="val/score"),
                [0.1] * 4 + [0.01],
            )
        },
    ),
    *claims(
        f"{OPTIMIZERS}test_reducelronplateau_with_no_monitor_raises",
        check_forms,
        {"a plateau schedule without a metric": ({"schedulers": plateau, "loop": {"eval_interval": 2}}, 1, 1)},
        difference="Lightning refuses it; here it takes val/loss, and a run that reports none is refused.",
    ),
    *claims(
        f"{OPTIMIZERS}test_reducelronplateau_with_no_monitor_in_lr_scheduler_dict_raises",
        check_refused,
        {"a plateau schedule without validation data is refused": ({"schedulers": plateau, "val": 0}, "val/loss")},
    ),
    *claims(
        f"{OPTIMIZERS}test_lr_scheduler_strict",
        check_refused,
        {
            "a metric that nothing reports is refused": (
                {"schedulers": Scheduled(plateau, metric="val/nothing")},
                "val/nothing",
            )
        },
    ),
    *claims(
        f"{OPTIMIZERS}test_lr_scheduler_with_unknown_interval_raises",
        check_refused,
        {"an unknown interval is refused": ({"schedulers": Scheduled(step_lr, "batch")}, "interval is 'batch'")},
    ),
    *claims(
        f"{OPTIMIZERS}test_lr_scheduler_with_extra_keys_warns",
        check_refused,
        {
            "a plateau schedule with steps as its interval is refused": (
                {"schedulers": Scheduled(plateau, "step")},
                "interval",
            )
        },
        difference="Lightning warns of keys that have no effect; what contradicts itself is refused.",
    ),
    *claims(
        f"{OPTIMIZERS}test_onecyclelr_with_epoch_interval_warns",
        check_one_cycle_by_epochs,
        {"a schedule over steps that is to step each epoch": ()},
        difference="Lightning asks whether steps were meant; here OneCycleLR steps with each batch unless the interval "
        "is given, and then that is what is done.",
    ),
    *claims(
        f"{OPTIMIZERS}test_unknown_configure_optimizers_raises",
        check_refused,
        {"a number is no optimizer": ({"optimizer": lambda model: 1}, "ptimizer")},
    ),
    *claims(
        f"{OPTIMIZERS}test_invalid_optimizer_dict_raises",
        check_refused,
        {"a mapping of something else holds no optimizer": ({"optimizer": {"a": lambda model: None}}, "ptimizer")},
    ),
    *claims(
        f"{OPTIMIZERS}test_invalid_optimizer_in_scheduler",
        check_refused,
        {
            "a schedule over another optimizer is refused": (
                {"schedulers": lambda optimizer: step_lr(SGD([nn.Parameter(torch.ones(1))], lr=1))},
                "ptimizer",
            )
        },
    ),
    *claims(
        f"{OPTIMIZERS}test_invalid_scheduler_missing_state_dict",
        check_refused,
        {
            "a schedule without a state is refused": (
                {"schedulers": lambda optimizer: WithoutState(optimizer)},
                "state_dict",
            )
        },
    ),
    *claims(
        f"{OPTIMIZERS}test_lr_scheduler_with_no_actual_scheduler_raises",
        check_refused,
        {"a schedule that is none is refused": ({"schedulers": lambda optimizer: 3}, "sched")},
    ),
    *claims(
        f"{OPTIMIZERS}test_optimizer_return_options",
        check_forms,
        {
            "an optimizer alone": (ONE, 1, 0),
            "several by name": ({"optimizer": two_optimizers()}, 2, 0),
            "one with a schedule": ({**ONE, "schedulers": step_lr}, 1, 1),
            "one with a list of schedules": ({**ONE, "schedulers": [step_lr, step_lr]}, 1, 2),
            "several with a schedule each": ({"optimizer": two_optimizers(), "schedulers": step_lr}, 2, 2),
        },
    ),
    *claims(
        f"{OPTIMIZERS}test_none_optimizer",
        check_no_optimizer,
        {"a training without an optimizer": (True,)},
        difference="Lightning warns and trains nothing; here a trainer without an optimizer can only validate.",
    ),
    *claims(
        f"{OPTIMIZERS}test_init_optimizers_during_evaluation_and_prediction",
        check_no_optimizer,
        {"an evaluation needs no optimizer": (False,)},
    ),
    *claims(
        f"{OPTIMIZERS}test_lr_scheduler_state_updated_before_saving",
        check_saved_schedule,
        {
            "at an epoch's end a checkpoint has the stepped schedule": ("epoch", "1ep", {3: 1, 6: 2}),
            "every second step one over epochs has those that ended": ("epoch", 2, {2: 0, 4: 1, 6: 2}),
            "every second step one over steps has all of them": ("step", 2, {2: 2, 4: 4, 6: 6}),
        },
    ),
    *claims(
        f"{OPTIMIZERS}test_invalid_lr_scheduler_with_custom_step_method",
        check_own_schedule,
        {"a schedule of another class is stepped": ()},
        difference="Lightning asks for a step of the user's own; here step, state_dict and load_state_dict are enough.",
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
