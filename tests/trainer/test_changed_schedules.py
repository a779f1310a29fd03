"""A resume with other settings of a schedule: from the next step on, the rates are those of a straight run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, loader, on, same, trainer
from torch.optim import lr_scheduler as lr

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import UserError
from trainer_cli.optim.scheduler_intervals import Scheduled

STEPS = 6
"""The steps of a run before it is resumed."""


class Factor:
    """A factor with a memory, which a checkpoint holds."""

    def __init__(self, base: float) -> None:
        self.base, self.calls = base, 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return self.base ** (self.calls // 3)


def _power(base: float, step: int) -> float:
    return base**step


Maker = Callable[[int, float], Any]

KINDS: dict[str, tuple[Maker, float, float]] = {
    "LambdaLR of a function": (lambda n, x: lambda o: lr.LambdaLR(o, lambda step: (1 - step / n) * x), 1.0, 0.5),
    "LambdaLR of a partial": (lambda n, x: lambda o: lr.LambdaLR(o, partial(_power, x)), 0.9, 0.8),
    "LambdaLR of an object": (lambda n, x: lambda o: lr.LambdaLR(o, Factor(x)), 0.5, 0.7),
    "MultiplicativeLR": (lambda n, x: lambda o: lr.MultiplicativeLR(o, lambda step: x), 0.9, 0.7),
    "StepLR": (lambda n, x: lambda o: lr.StepLR(o, n // 2, x), 0.5, 0.1),
    "MultiStepLR": (lambda n, x: lambda o: lr.MultiStepLR(o, [n // 3, n // 2], x), 0.5, 0.1),
    "ConstantLR": (lambda n, x: lambda o: lr.ConstantLR(o, x, n - 1), 0.5, 0.25),
    "LinearLR": (lambda n, x: lambda o: lr.LinearLR(o, x, total_iters=n), 0.5, 0.25),
    "ExponentialLR": (lambda n, x: lambda o: lr.ExponentialLR(o, x), 0.8, 0.5),
    "PolynomialLR": (lambda n, x: lambda o: lr.PolynomialLR(o, n, x), 1.0, 2.0),
    "CosineAnnealingLR": (lambda n, x: lambda o: lr.CosineAnnealingLR(o, n, x), 0.0, 0.01),
    "CosineAnnealingWarmRestarts": (lambda n, x: lambda o: lr.CosineAnnealingWarmRestarts(o, n // 2, 2, x), 0.0, 0.01),
    "CyclicLR": (lambda n, x: lambda o: lr.CyclicLR(o, 0.01, x, step_size_up=n // 3), 0.2, 0.3),
    "CyclicLR of a function": (
        lambda n, x: lambda o: lr.CyclicLR(o, 0.01, 0.2, n // 3, scale_fn=lambda k: x**k),
        0.5,
        0.25,
    ),
    "OneCycleLR": (lambda n, x: lambda o: lr.OneCycleLR(o, x, total_steps=n), 0.2, 0.3),
    "SequentialLR": (
        lambda n, x: lambda o: lr.SequentialLR(
            o, [lr.LinearLR(o, x, total_iters=3), lr.CosineAnnealingLR(o, n - 3)], [3]
        ),
        0.5,
        0.25,
    ),
    "ChainedScheduler": (
        lambda n, x: lambda o: lr.ChainedScheduler([lr.LinearLR(o, total_iters=n), lr.ExponentialLR(o, x)]),
        0.9,
        0.7,
    ),
    "a chain with a sequence": (
        lambda n, x: lambda o: lr.ChainedScheduler(
            [lr.SequentialLR(o, [lr.ConstantLR(o, x), lr.PolynomialLR(o, n)], [2]), lr.ExponentialLR(o, 0.9)]
        ),
        0.5,
        0.25,
    ),
    "WarmupCosine": (lambda n, x: lambda o: WarmupCosine(o, n, 2, x), 0.0, 0.1),
    "several": (
        lambda n, x: {
            "warm": lambda o: WarmupCosine(o, n, 2),
            "decay": lambda o: lr.ExponentialLR(o, x),
            "line": lambda o: lr.LinearLR(o, total_iters=n),
        },
        0.9,
        0.7,
    ),
}  # fmt: skip


def _two_groups(model: Any, rate: float = 0.1) -> torch.optim.Optimizer:
    weight, bias = model.parameters()
    return torch.optim.SGD([{"params": [weight], "lr": rate}, {"params": [bias], "lr": rate / 4}], momentum=0.9)


def _scheduled(schedulers: Any, interval: str | None) -> Any:
    if isinstance(schedulers, dict):
        return {name: _scheduled(schedule, interval) for name, schedule in schedulers.items()}
    return schedulers if isinstance(schedulers, Scheduled) else Scheduled(schedulers, interval)


def _fit(
    folder: Path | None, schedulers: Any, length: int, rate: float = 0.1, interval: str | None = "step", **settings: Any
) -> tuple[Any, dict[int, Any]]:
    """Trains; returns the trainer, and what the schedules set in each group by the step that was made with it."""
    used: dict[int, list[Any]] = {}

    def note(trainer: Any, model: Any, optimizer: Any) -> None:
        groups = optimizer.param_groups
        used[trainer.progress.step + 1] = [[float(group[key]) for key in ("lr", "momentum")] for group in groups]

    made = trainer(
        Line,
        optimizer=partial(_two_groups, rate=rate),
        schedulers=_scheduled(schedulers, interval),
        callbacks=[on(on_before_optimizer_step=note)],
        settings={"max_duration": length, **settings},
        checkpoint=None if folder is None else CheckpointerCallback(folder, save_interval=None, save_async=False),
    )
    made.fit(loader(), loader(4) if settings else None)
    return made, used


def _assert_goes_on_as_straight(
    folder: Path, now: Any, length: int, rate: float = 0.1, interval: str | None = "step", since: int = STEPS
) -> None:
    """From the checkpoint on, rates, momenta and at the end the schedules' states are those of a straight run."""
    resumed, rates = _fit(folder, now, length, rate, interval)
    assert resumed.loaded_step == since
    straight, expected = _fit(None, now, length, rate, interval)
    assert rates == {step: settings for step, settings in expected.items() if step > since}
    ends = [
        {name: (saved["state"], saved["made"]) for name, saved in end.schedulers.state_dict().items()}
        for end in (resumed, straight)
    ]
    assert same(*ends) == []


@pytest.mark.parametrize(
    ("interval", "change"),
    [
        ("step", "longer"),
        ("epoch", "all others"),
        pytest.param("step", "other lr", marks=pytest.mark.campaign),
        pytest.param("step", "other setting", marks=pytest.mark.campaign),
        pytest.param("epoch", "longer", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_schedule_goes_on_as_in_a_straight_run(tmp_path: Path, kind: str, change: str, interval: str) -> None:
    """Of every schedule of torch: rates and momenta of both groups, and all that the schedules hold at the end."""
    make, before, other = KINDS[kind]
    # Of three steps an epoch (of a loader of 10 samples in batches of 4), with as many epochs as steps otherwise.
    last, whole, short = (14, 14, STEPS) if interval == "step" else (12, 10, 3)
    _fit(tmp_path, make(short if change == "longer" else whole, before), STEPS, interval=interval)
    now = make(whole, other if change in ("other setting", "all others") else before)
    _assert_goes_on_as_straight(tmp_path, now, last, 0.3 if change in ("other lr", "all others") else 0.1, interval)


def test_schedules_of_several_intervals_step_again_in_their_order(tmp_path: Path) -> None:
    def both(gamma: float) -> Any:
        return {
            "absolute": Scheduled(lambda o: lr.LambdaLR(o, lambda step: 1 / (step + 1)), "step"),
            "by epoch": Scheduled(lambda o: lr.ExponentialLR(o, gamma), "epoch"),
        }

    _fit(tmp_path, both(0.9), 5)
    _assert_goes_on_as_straight(tmp_path, both(0.5), 12, since=5)


@pytest.mark.parametrize(("before", "now"), [("step", "epoch"), ("epoch", "step")])
def test_another_interval_takes_its_position_from_the_steps_or_epochs_made(
    tmp_path: Path, before: str, now: str
) -> None:
    make, setting, _ = KINDS["ExponentialLR"]
    _fit(tmp_path, make(0, setting), STEPS, interval=before)
    _assert_goes_on_as_straight(tmp_path, make(0, setting), 12, interval=now)


def test_an_interval_that_says_nothing_of_the_position_is_refused(tmp_path: Path) -> None:
    make, setting, _ = KINDS["ExponentialLR"]
    _fit(tmp_path, make(0, setting), STEPS, interval="evaluation", eval_interval=2)
    with pytest.raises(UserError, match="its interval was evaluation and is step now, which says nothing"):
        _fit(tmp_path, make(0, setting), 12, interval="step")


def test_a_schedule_that_ends_before_its_position_is_refused_with_nothing_changed(tmp_path: Path) -> None:
    make, setting, _ = KINDS["OneCycleLR"]
    _fit(tmp_path, make(14, setting), STEPS)
    with pytest.raises(UserError, match="scheduler: cannot make 6 steps: ValueError: Tried to step 3 times"):
        _fit(tmp_path, make(2, setting), 12)


def _plateau(factor: float) -> Any:
    return Scheduled(lambda o: lr.ReduceLROnPlateau(o, factor=factor, patience=0, threshold=10.0), "evaluation")


def test_a_plateau_keeps_its_rate_and_takes_the_new_setting_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rate depends on all evaluations so far."""
    _fit(tmp_path, _plateau(0.5), STEPS, eval_interval=2)
    caplog.clear()
    _, rates = _fit(tmp_path, _plateau(0.1), 9, eval_interval=2)
    assert [rates[step][0][0] for step in (7, 8, 9)] == pytest.approx([0.0125, 0.0125, 0.00125])
    text = "settings have changed; the learning rate goes from 0.0125, 0.003125 to 0.0125, 0.003125. It depends on more"
    assert text in caplog.text


def test_a_users_own_schedule_whose_setting_moved_is_refused(tmp_path: Path) -> None:
    class Own:
        def __init__(self, optimizer: Any, size: int) -> None:
            self.size = size

        def step(self) -> None:
            self.size *= 2

        def state_dict(self) -> dict[str, Any]:
            return {"size": self.size}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.size = state["size"]

    _fit(tmp_path, lambda o: Own(o, 2), 2)
    with pytest.raises(UserError, match=r"scheduler\.size: was 2 and is 3 now, but the run has moved it to 8"):
        _fit(tmp_path, lambda o: Own(o, 3), 4)


@pytest.mark.parametrize("change", ["settings", "length"])
def test_a_checkpoint_without_a_digest_of_settings_is_compared_by_the_state_as_made(
    tmp_path: Path, change: str
) -> None:
    def drop_digests(trainer: Any, state: dict[str, Any]) -> None:
        for saved in state["schedulers"].values():
            del saved["settings"], saved["interval"]

    make, setting, other = KINDS["CosineAnnealingLR"]
    trainer(
        schedulers=Scheduled(make(6 if change == "length" else 14, setting), "step"),
        callbacks=[on(postprocess_checkpoint=drop_digests)],
        checkpoint=CheckpointerCallback(tmp_path),
        optimizer=_two_groups,
    ).fit(loader())
    _assert_goes_on_as_straight(tmp_path, make(14, other if change == "settings" else setting), 14)


@pytest.mark.parametrize(("pace", "interval"), [(1, "step"), (3, "step"), (3, "epoch")])
def test_a_schedule_that_was_ahead_of_the_steps_of_the_run_is_named_once(
    tmp_path: Path, pace: int, interval: str, caplog: pytest.LogCaptureFixture
) -> None:
    def move_as_often(trainer: Any, state: dict[str, Any]) -> None:
        (saved,) = state["schedulers"].values()
        saved["state"] |= {"last_epoch": pace * saved["state"]["last_epoch"]}

    make, setting, _ = KINDS["CosineAnnealingLR"]
    trainer(
        schedulers=Scheduled(make(60, setting), interval),
        callbacks=[on(postprocess_checkpoint=move_as_often)],
        checkpoint=CheckpointerCallback(tmp_path),
        optimizer=_two_groups,
    ).fit(loader())
    caplog.set_level(logging.INFO)
    resumed, _ = _fit(tmp_path, make(60, setting), 14, interval=interval)
    lines = [record.getMessage() for record in caplog.records if "it moves once a step" in record.message]
    ahead = "schedule scheduler: it has moved 18 times in 6 steps of the run; from here on it moves once a step"
    assert lines == [ahead] * (pace > 1 and interval == "step")
    assert resumed.schedulers.live["scheduler"].last_epoch == (6 * pace + 8 if interval == "step" else 2 * pace + 2)
