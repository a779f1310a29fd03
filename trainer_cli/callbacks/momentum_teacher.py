"""A part of the model that follows another part by momentum: the teacher of BYOL, DINO, MoCo or Mean Teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.dtensor import local_of
from trainer_cli.errors import ConfigError
from trainer_cli.patterns import did_you_mean
from trainer_cli.state import clean_name, unwrap
from trainer_cli.torch_compat import foreach_lerp_
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer, TrainingLoop


class MomentumTeacher(Callback):
    """After each optimizer step sets `teacher = momentum * teacher + (1 - momentum) * student`, parameter by parameter.

    Both are submodules of the model, so that its checkpoints have them and a resume is exact. The model makes the
    teacher, usually by `copy.deepcopy(self.student).requires_grad_(False)`. Buffers, such as the statistics of batch
    norm, are left to the teacher's own forward.

    Args:
        momentum: how much of the teacher stays at each step.
        teacher, student: names of the submodules; the student may have further parameters.
    """

    def __init__(self, momentum: float = 0.99, teacher: str = "teacher", student: str = "student") -> None:
        if not 0 <= momentum <= 1:
            raise ConfigError(f"momentum is {momentum}, but it must be between 0 and 1", location="momentum")
        self.momentum, self.teacher, self.student = float(momentum), teacher, student
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        """This rank's parts of the teacher's parameters, and of the student's of the same names."""

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Pair the parameters of teacher and student by name."""
        students = _parameters_of(trainer.model, "student", self.student)
        self._pairs = ([], [])
        for name, parameter in _parameters_of(trainer.model, "teacher", self.teacher).items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"MomentumTeacher: {self.teacher}.{name} is trained by the optimizer too",
                    location="teacher",
                    hint=f"Call requires_grad_(False) of it in the model, or set freeze=[{self.teacher}.*].",
                )
            student = students.get(name)
            # The shapes of this rank's parts, which are interpolated: other shapes might broadcast.
            if student is None or local_of(student).shape != local_of(parameter).shape:
                raise ConfigError(
                    f"MomentumTeacher: {self.teacher}.{name} has no parameter of its name and shape in {self.student}",
                    location="student",
                )
            self._pairs[0].append(local_of(parameter))
            self._pairs[1].append(local_of(student))

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        """Move the teacher towards the student by a part of the way."""
        if trainer.is_step_complete:
            with torch.no_grad():
                foreach_lerp_(*self._pairs, 1.0 - self.momentum)


def _parameters_of(model: nn.Module, argument: str, name: str) -> dict[str, nn.Parameter]:
    """The parameters of a submodule, by their names within it.

    Args:
        argument: the argument of the callback that names the submodule, for the error.
    """
    modules = {clean_name(path): module for path, module in unwrap(model).named_modules() if path}
    parameters = {}
    if name in modules:
        parameters = {clean_name(key): parameter for key, parameter in modules[name].named_parameters()}
    if not parameters:
        raise ConfigError(
            f"MomentumTeacher: the model has no submodule '{name}' with parameters",
            location=argument,
            hint=did_you_mean(name, modules).strip() or f"Available: {', '.join([*modules][:8])}.",
        )
    return parameters
