"""The modules and parameters that a training step holds, such as a loss with learned centers, as a part of the model.

So they are moved, counted, optimized, averaged over processes and saved as the model's own are. An export, and a model
that is loaded from a checkpoint, leave them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from trainer_cli.errors import UserError
from trainer_cli.layout import STEP_MODULES
from trainer_cli.trainer.setup import refuse_lazy

if TYPE_CHECKING:
    from trainer_cli.trainer.train_step import TrainStep

_BOUND = ("model", "_called")
"""Attributes of a step that an earlier trainer may have set to its model."""


class StepModules(nn.Module):
    """What a step holds, by the names of its attributes."""

    def train(self, mode: bool = True) -> Self:
        """Keep all modes: those of modules outside of the model are the user's, as in a plain loop."""
        return self


def adopt_modules(model: nn.Module, step: TrainStep) -> None:
    """Make the modules and parameters among the attributes of a step a part of the model, called `train_step`.

    Raises:
        UserError: parameters to train are in a list or another container, or the model has such an attribute already.
    """
    if isinstance(getattr(model, STEP_MODULES, None), StepModules):
        # Of an earlier trainer of the same model.
        delattr(model, STEP_MODULES)
    of_model = {*model.parameters(), *model.buffers()}
    held = StepModules()
    for name, value in _attributes(step).items():
        if isinstance(value, nn.Module):
            # One that contains the model would contain itself.
            if name not in _BOUND and _tensors(value) - of_model and model not in value.modules():
                held.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            held.register_parameter(name, None if value in of_model else value)
        elif isinstance(value, list | tuple | set | Mapping):
            _refuse_hidden(step, name, value.values() if isinstance(value, Mapping) else value, of_model)
    if not _tensors(held):
        return
    if hasattr(model, STEP_MODULES):
        raise UserError(
            f"the model has an attribute '{STEP_MODULES}', under which the modules of the step are saved",
            where="step",
            cure="Give that attribute another name.",
        )
    refuse_lazy(held)
    model.add_module(STEP_MODULES, held)


def _attributes(step: TrainStep) -> Mapping[str, Any]:
    if isinstance(step, nn.Module):
        return {**step._modules, **step._parameters}
    return vars(step)


def _tensors(module: nn.Module) -> set[Any]:
    return {*module.parameters(), *module.buffers()}


def _refuse_hidden(step: TrainStep, name: str, values: Iterable[Any], of_model: set[Any]) -> None:
    """Raise UserError for parameters to train in a container, of which torch does not know either."""
    for value in values:
        parameters = value.parameters() if isinstance(value, nn.Module) else [value]
        for parameter in parameters:
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter not in of_model:
                raise UserError(
                    f"{type(step).__name__}.{name} contains parameters that would be neither trained nor saved",
                    where="step",
                    cure="Use torch.nn.ModuleList, ModuleDict, ParameterList or ParameterDict, or freeze them.",
                )
