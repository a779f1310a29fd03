"""MomentumTeacher: the teacher follows the student at each optimizer step, also after a resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_resumes_exactly, loader, on, trainer
from torch import Tensor, nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.momentum_teacher import MomentumTeacher
from trainer_cli.errors import ConfigError


class Pair(nn.Module):
    """A student with a part of its own, and the teacher of the rest."""

    def __init__(self, frozen: bool = True, width: int = 1) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(2, 1))
        self.teacher = copy.deepcopy(self.student) if width == 1 else nn.Sequential(nn.Linear(2, width))
        self.teacher.requires_grad_(not frozen)
        self.student.append(nn.Linear(1, 1))

    def forward(self, batch: Any) -> Any:
        return (self.student(batch[0]) - self.teacher(batch[0])).square().mean() + self.student(batch[0]).mean()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_teacher_follows_by_momentum_at_each_optimizer_step(accumulated: int) -> None:
    students: list[Tensor] = []

    def keep(made: Any, *arguments: Any) -> None:
        students.append(made.model.student[0].weight.detach().clone())

    made = trainer(
        Pair,
        callbacks=[MomentumTeacher(0.75), on(on_after_optimizer_step=keep)],
        settings={"max_duration": 3, "grad_accum_steps": accumulated},
    )
    expected = made.model.get_parameter("teacher.0.weight").detach().clone()
    made.fit(loader())
    assert len(students) == 3
    for student in students:
        expected = 0.75 * expected + 0.25 * student
    torch.testing.assert_close(made.model.get_parameter("teacher.0.weight").detach(), expected)


def test_a_teacher_of_another_fit_leaves_the_earlier_model_alone() -> None:
    teacher = MomentumTeacher(0.75)
    first, second = (trainer(Pair, callbacks=[teacher]) for _ in range(2))
    first.fit(loader())
    before = {name: value.clone() for name, value in first.model.get_submodule("teacher").state_dict().items()}
    # It would follow once more in each step.
    for parameter in first.model.get_submodule("student").parameters():
        parameter.data.fill_(9.0)
    second.fit(loader())
    assert all(
        torch.equal(value, before[name]) for name, value in first.model.get_submodule("teacher").state_dict().items()
    )


def test_a_resume_is_exact(tmp_path: Path) -> None:
    def fit(folder: Path, *callbacks: Any) -> Any:
        saver = CheckpointerCallback(folder, save_interval=2, save_async=False)
        made = trainer(Pair, callbacks=[MomentumTeacher(0.5), *callbacks], checkpoint=saver)
        made.fit(loader())
        return made

    assert_resumes_exactly(fit, tmp_path, 3)


@pytest.mark.parametrize(
    ("arguments", "model", "message"),
    [
        ({"momentum": 1.5}, {}, "momentum is 1.5"),
        ({"teacher": "teecher"}, {}, "no submodule 'teecher' with parameters.*teacher"),
        ({}, {"frozen": False}, "teacher.0.weight is trained by the optimizer too"),
        ({}, {"width": 2}, "teacher.0.weight has no parameter of its name and shape in student"),
        ({"teacher": "student.0"}, {}, "student.0.weight is trained by the optimizer too"),
    ],
    ids=["momentum", "name", "trained", "shape", "itself"],
)
def test_mistakes_are_explained(arguments: dict[str, Any], model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(lambda: Pair(**model), callbacks=[MomentumTeacher(**arguments)]).fit(loader())
