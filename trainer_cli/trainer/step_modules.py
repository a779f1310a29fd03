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
    model_tensors = _tensors(model)
    step_modules = StepModules()
    for name, value in _attributes(step).items():
        if isinstance(value, nn.Module):
            has_new_tensors = bool(_tensors(value) - model_tensors)
            # One that contains the model would contain itself.
            contains_model = model in value.modules()
            if name not in _BOUND and has_new_tensors and not contains_model:
                step_modules.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            step_modules.register_parameter(name, None if value in model_tensors else value)
        elif isinstance(value, list | tuple | set | Mapping):
            entries = value.values() if isinstance(value, Mapping) else value
            _refuse_hidden(step, name, entries, model_tensors)
    if not _tensors(step_modules):
        return
    if hasattr(model, STEP_MODULES):
        raise UserError(
            f"the model has an attribute '{STEP_MODULES}', under which the modules of the step are saved",
            where="step",
            cure="Give that attribute another name.",
        )
    refuse_lazy(step_modules)
    model.add_module(STEP_MODULES, step_modules)


def _attributes(step: TrainStep) -> Mapping[str, Any]:
    """The attributes of a step; of one that is a module, its modules and parameters, which torch keeps apart."""
    if isinstance(step, nn.Module):
        return {**step._modules, **step._parameters}
    return vars(step)


def _tensors(module: nn.Module) -> set[Any]:
    return {*module.parameters(), *module.buffers()}


def _refuse_hidden(step: TrainStep, name: str, values: Iterable[Any], model_tensors: set[Any]) -> None:
    """Raise UserError for parameters to train in a container, which torch does not register either.

    Args:
        name: the attribute of the step that is the container.
    """
    for value in values:
        parameters = value.parameters() if isinstance(value, nn.Module) else [value]
        for parameter in parameters:
            is_trained = isinstance(parameter, nn.Parameter) and parameter.requires_grad
            if is_trained and parameter not in model_tensors:
                raise UserError(
                    f"{type(step).__name__}.{name} contains parameters that would be neither trained nor saved",
                    where="step",
                    cure="Use torch.nn.ModuleList, ModuleDict, ParameterList or ParameterDict, or freeze them.",
                )
