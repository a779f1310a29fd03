"""States that a training changes on the way: buffers made late, groups added late, a schedule of frozen weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Points
from torch import Tensor, nn

from trainer_cli import EMA, SWA, Callback, CheckpointerCallback, Trainer, TrainingLoop, UserError, find_learning_rate

CREATED = 3
"""The forward of the training that creates the buffer."""


class Late(nn.Module):
    """Creates a buffer in a later forward, replaces it in each one, and lets it grow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", None)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if self.training:
            self.count += 1
            if self.count >= CREATED:
                self.seen = x.mean(0) if self.seen is None else self.seen * 0.9 + x.mean(0)
            if self.count == CREATED + 2:
                self.seen = torch.cat([self.seen, self.seen])[:2] if len(self.seen) != 2 else self.seen.clone()
        shift = 0 if self.seen is None else self.seen.mean()
        return (self.linear(x).squeeze(-1) - y + shift).square().mean()


def trainer(folder: Path, steps: int, average: Callback) -> Trainer:
    return Trainer(
        model=Late,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        loop=TrainingLoop(max_duration=steps),
        checkpoint=CheckpointerCallback(folder, save_interval=1, newer="trash", save_async=False),
        callbacks={"average": average},
        device="cpu",
        seed=0,
    )


def everything(made: Trainer) -> dict[str, Tensor]:
    averages = made.callbacks["average"].state_dict()["average"]
    return {**made.model.state_dict(), **{f"average {name}": value for name, value in averages.items()}}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


AVERAGES = {
    "swa before": lambda: SWA(1, every=1),
    "swa after": lambda: SWA(5, every=1),
    "ema": lambda: EMA(0.5),
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_a_resume_is_exact_around_a_buffer_that_is_made_late(average: str, stop: int, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 8, AVERAGES[average]())
    whole.fit(Points(16))
    trainer(tmp_path / "parts", stop, AVERAGES[average]()).fit(Points(16))
    resumed = trainer(tmp_path / "parts", 8, AVERAGES[average]())
    resumed.fit(Points(16))
    assert_same(everything(whole), everything(resumed))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_a_trainer_goes_back_to_before_a_buffer_was_made(average: str, step: int, tmp_path: Path) -> None:
    made = trainer(tmp_path / "a", 8, AVERAGES[average]())
    made.fit(Points(16))
    first = {name: value.clone() for name, value in everything(made).items()}
    made.fit(Points(16), ckpt_path=tmp_path / f"a/step{step}")
    assert_same(first, everything(made))


def test_a_buffer_that_the_model_always_had_must_be_in_the_checkpoint(tmp_path: Path) -> None:
    made = trainer(tmp_path / "a", 1, EMA())
    made.fit(Points(16))

    class Other(Late):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(2)

    other = Trainer(model=Other, optimizer=lambda model: torch.optim.Adam(model.parameters()), device="cpu")
    with pytest.raises(UserError, match="seen: missing"):
        other.load_checkpoint(tmp_path / "a/step1")


class Adds(Callback):
    """Adds a group with a parameter, at the end of a step or at the beginning of a fit."""

    def __init__(self, hook: str, *, of_model: bool) -> None:
        self.hook, self.of_model = hook, of_model

    def add(self, made: Trainer) -> None:
        assert made.optimizer is not None
        if self.of_model:
            made.model.register_parameter("extra", nn.Parameter(torch.ones(2)))
        parameter = made.model.get_parameter("extra") if self.of_model else nn.Parameter(torch.ones(2))
        made.optimizer.add_param_group({"params": [parameter]})

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if self.hook == "on_train_start" and trainer.progress.step == 0:
            self.add(trainer)

    def on_train_step_end(self, trainer: Trainer, *_: Any) -> None:
        if self.hook == "on_train_step_end" and trainer.progress.step == 1:
            self.add(trainer)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_step_end"])
def test_a_group_with_a_parameter_that_no_checkpoint_has_is_refused(hook: str, tmp_path: Path) -> None:
    made = trainer(tmp_path / hook, 3, Adds(hook, of_model=False))
    with pytest.raises(UserError, match=r"optimizer: a parameter of shape \(2,\) does not belong to the model"):
        made.fit(Points(16))


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_step_end"])
def test_a_group_with_a_parameter_that_was_added_to_the_model_is_trained(hook: str, tmp_path: Path) -> None:
    assert trainer(tmp_path / hook, 3, Adds(hook, of_model=True)).fit(Points(16)).step == 3


class Sees(nn.Module):
    """Remembers which parameters were trained in its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.trained: set[tuple[bool, bool]] = set()

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        self.trained.add((self.body.weight.requires_grad, self.norm.training))
        return (self.head(self.norm(self.body(x))).squeeze(-1) - y).square().mean()


def test_a_range_test_freezes_what_is_frozen_at_the_beginning() -> None:
    made = Trainer(
        model=Sees,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        freeze={"{body,norm}.*": "2ep"},
        device="cpu",
        seed=0,
    )
    find_learning_rate(made, Points(16), steps=20)
    assert made.model.trained == {(False, False)}
    assert made.model.body.weight.requires_grad


def test_two_trainers_made_first_train_as_each_alone(tmp_path: Path) -> None:
    def weights(made: Trainer) -> Tensor:
        made.fit(Points(16))
        return made.model.linear.weight.detach().clone()

    alone = [weights(trainer(tmp_path / f"alone{number}", 4, EMA())) for number in range(2)]
    both = [trainer(tmp_path / f"both{number}", 4, EMA()) for number in range(2)]
    for value, made in zip(alone, both, strict=True):
        assert torch.equal(value, weights(made))


def test_a_notebook_logger_outside_of_a_notebook_warns_and_trains(caplog: pytest.LogCaptureFixture) -> None:
    from trainer_cli.loggers.notebook import NotebookLogger

    made = Trainer(
        model=Late,
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        loop=TrainingLoop(max_duration=2),
        loggers=[NotebookLogger()],
        device="cpu",
    )
    with caplog.at_level(logging.WARNING):
        assert made.fit(Points(16)).step == 2
    assert "NotebookLogger shows nothing outside of a notebook: use ConsoleLogger" in caplog.messages
