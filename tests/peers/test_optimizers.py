"""Optimizer steps, schedules, rates, and searches for a learning rate and a batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_parts import data_loader
from small_runs import Counts, Descent, Net, Rows, Script, fit, make_trainer, rows, two_optimizers
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, SequentialLR

from trainer_cli import (
    Callback,
    Precision,
    Scheduled,
    Trainer,
    TrainStep,
    UserError,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupStableDecay,
)


def find_batch_size(*arguments: Any, **more: Any) -> Any:
    return pytest.importorskip("trainer_cli.addons.auto.find").find_batch_size(*arguments, **more)


def find_learning_rate(*arguments: Any, **more: Any) -> Any:
    return pytest.importorskip("trainer_cli.addons.auto.find").find_learning_rate(*arguments, **more)


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


@pytest.mark.parametrize(
    ("batches", "accumulate", "steps", "backwards"),
    [
        *[(count, 1, count, count) for count in (1, 2, 3)],
        (6, 2, 3, 6),
        (6, 3, 2, 6),
        (5, 2, 3, 5),
        *[(count, 1, count, count) for count in (4, 5)],
    ],
)
def test_batches_backwards_and_steps_are_counted(batches: int, accumulate: int, steps: int, backwards: int) -> None:
    counts = Counts()
    loop = {"max_duration": "1ep", "grad_accum_steps": accumulate}
    fit(batches=batches, loop=loop, callbacks=[counts])
    assert (counts.steps, counts.backwards, counts.zeros) == (steps, backwards, steps)


@pytest.mark.parametrize(("accumulate", "batches"), [(1, 1), (1, 4), (2, 4), (3, 4), (3, 1)])
def test_weights_change_with_a_groups_last_batch_alone(accumulate: int, batches: int) -> None:
    weights: list[tuple[int, torch.Tensor]] = []

    class See(Callback):
        def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            weights.append((trainer.progress.step, model.layer.weight.detach().clone()))

    fit(batches=batches, loop={"max_duration": "2ep", "grad_accum_steps": accumulate}, callbacks=[See()])
    for (step, before), (next_step, after) in pairwise(weights):
        assert torch.equal(before, after) is (step == next_step)


@pytest.mark.parametrize(
    ("accumulate", "expected"),
    [
        (1, ["forward", "backward", "step", "zero_grad"] * 5),
        (3, ["forward", "backward"] * 3 + ["step", "zero_grad"] + ["forward", "backward"] * 2 + ["step", "zero_grad"]),
    ],
)
def test_the_order_of_a_step(accumulate: int, expected: Sequence[str]) -> None:
    calls: list[str] = []

    class Told(Descent):
        def step(self, closure: Any = None) -> Any:
            calls.append("step")
            return super().step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("zero_grad")
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = None

    class Order(Callback):
        def on_train_start(self, *_: Any) -> None:
            calls.clear()

        def on_before_forward(self, *_: Any) -> None:
            calls.append("forward")

        def on_after_backward(self, *_: Any) -> None:
            calls.append("backward")

    fit(
        batches=5, loop={"max_duration": "1ep", "grad_accum_steps": accumulate}, val=0, callbacks=[Order()],
        optimizer=lambda model: Told(model.parameters(), lr=0.1),
    )  # fmt: skip
    assert calls == expected


@pytest.mark.parametrize(
    ("settings", "accumulate"),
    [({"clip_norm": 0.05}, 1), ({"clip_norm": 0.05}, 2), ({"clip_value": 1e-10}, 1), ({"clip_value": 1e-3}, 2)],
)
def test_gradients_are_clipped(settings: Mapping[str, Any], accumulate: int) -> None:
    counts = Counts()
    loop = {"max_duration": 2, "grad_accum_steps": accumulate}
    fit(precision=Precision(**settings), callbacks=[counts], loop=loop)
    for gradient in counts.clipped:
        if "clip_norm" in settings:
            assert float(gradient.norm()) == pytest.approx(settings["clip_norm"], rel=1e-4)
        else:
            assert float(gradient.abs().max()) == pytest.approx(settings["clip_value"], rel=1e-4)


class Alternating(TrainStep):
    """Two optimizers: the first steps each batch, the second each second one."""

    def train_batch(self, batch: Any) -> Any:
        outputs = self.forward(batch)
        self.backward(outputs["loss"], "first")
        self.optimizer_step("first")
        if self.step_idx % 2 == 1:
            again = self.forward(batch)
            self.backward(again["loss"], "second")
            self.optimizer_step("second")
        return outputs


def test_a_step_of_the_users_steps_optimizers_as_it_likes() -> None:
    run = fit(
        optimizer=two_optimizers(), step=Alternating(), loop={"log_interval": 1},
        schedulers=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count),
    )  # fmt: skip
    first, second = (cast("Any", optimizer) for optimizer in run.trainer.optimizers.values())
    assert (first.count, second.count, run.trainer.progress.step) == (4, 2, 4)
    assert first.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)
    assert second.param_groups[0]["lr"] == pytest.approx(0.2 * 0.5**2)
    assert list(run.log.values("train/loss")) == [1, 2, 3, 4]


def test_one_loss_steps_all_optimizers() -> None:
    run = fit(optimizer=two_optimizers())
    assert [cast("Any", optimizer).count for optimizer in run.trainer.optimizers.values()] == [4, 4]


def test_a_step_that_makes_no_backward_is_an_error() -> None:
    class Nothing(TrainStep):
        def train_batch(self, batch: Any) -> Any:
            return self.forward(batch)

    with pytest.raises(UserError, match="has stepped no optimizer"):
        fit(step=Nothing())


def trainer_state(trainer: Trainer) -> list[torch.Tensor]:
    return [value.detach().clone() for value in trainer.model.state_dict().values()]


def test_a_search_finds_a_rate_and_leaves_the_trainer_as_it_was() -> None:
    trainer, plain = make_trainer(loop={"max_duration": 3}), make_trainer(loop={"max_duration": 3})
    before = trainer_state(trainer)
    found, again = (find_learning_rate(trainer, rows(8), min_lr=1e-5, max_lr=1.0, steps=40) for _ in range(2))
    assert found == again
    assert all(1e-5 <= rate <= 1.0 for rate in found.rates)
    assert found.rates == sorted(found.rates)
    assert found.suggestion in found.rates
    assert len(found.rates) == len(found.losses) <= 40
    assert trainer.optimizer is not None
    assert (trainer.progress.step, trainer.optimizer.param_groups[0]["lr"]) == (0, 0.1)
    assert not trainer.optimizer.state_dict()["state"]
    assert all(map(torch.equal, before, trainer_state(trainer)))
    for each in (trainer, plain):
        each.fit(rows(8))
    assert all(map(torch.equal, trainer_state(trainer), trainer_state(plain)))


@pytest.mark.parametrize("case", ["not finite", "few points", "range", "error"])
def test_a_search_that_finds_no_rate(folder: Path, case: str) -> None:
    class Broken(Net):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch)["loss"] * math.nan

    class Failing(Net):
        def forward(self, batch: Any) -> Any:
            raise RuntimeError("Trouble")

    if case == "not finite":
        found = find_learning_rate(make_trainer(model=Broken), rows(8), steps=20)
        assert (found.suggestion, found.rates) == (None, [])
    elif case == "few points":
        assert find_learning_rate(make_trainer(), rows(8), steps=5).suggestion is None
    elif case == "range":
        with pytest.raises(UserError, match="which is not a range"):
            find_learning_rate(make_trainer(), rows(8), min_lr=1.0, max_lr=0.1)
    else:
        with pytest.raises(RuntimeError, match="Trouble"):
            find_learning_rate(make_trainer(model=Failing), rows(8))
        assert not list(folder.iterdir())


def test_all_rates_rise_together() -> None:
    """With several groups all rates rise, in their ratio."""
    trainer = make_trainer(optimizer=two_optimizers())
    assert find_learning_rate(trainer, rows(8), steps=30).suggestion is not None
    assert [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers.values()] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("fits", "start", "most", "samples", "expected"),
    [(9, 2, 64, 64, 8), (99, 2, 16, 64, 16), (99, 2, 99, 12, 8), (2, 2, 64, 64, 2), (1, 2, 64, 64, None)],
)
def test_a_search_finds_a_batch_size(fits: int, start: int, most: int, samples: int, expected: int | None) -> None:
    class Bounded(Net):
        def forward(self, batch: Any) -> Any:
            if len(batch[0]) > fits:
                raise torch.OutOfMemoryError("full")
            return super().forward(batch)

    trainer = make_trainer(model=Bounded)
    before = trainer_state(trainer)
    if expected is None:
        with pytest.raises(UserError, match="no batch of"):
            find_batch_size(trainer, Rows(samples), start=start, max_size=most)
    else:
        assert find_batch_size(trainer, Rows(samples), start=start, max_size=most) == expected
    assert all(map(torch.equal, before, trainer_state(trainer)))
    assert trainer.progress.step == 0


def test_a_loader_whose_batches_are_made_already() -> None:
    with pytest.raises(UserError, match="map-style dataset"):
        find_batch_size(make_trainer(), data_loader([1, 2, 3]))


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
