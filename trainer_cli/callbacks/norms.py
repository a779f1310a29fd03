"""Norms: log the norms of gradients and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer_cli.checkpoint.model_state import parameter_names
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.torch_compat import foreach_norm, whole

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer.trainer import Trainer


class Norms(Callback):
    """Logs 2-norms on log steps, of all trained parameters: `train/norm/gradients` before clipping, and
    `train/norm/weights` after the step. With `per_layer` also `train/norm/gradients/MODULE` and
    `train/norm/weights/MODULE`, of each module's own.

    Steps that are not logged cost nothing, if `loop.log_interval` is in steps or epochs.
    """

    def __init__(self, gradients: bool = True, weights: bool = False, per_layer: bool = False) -> None:
        self.gradients, self.weights, self.per_layer = gradients, weights, per_layer
        self._found: dict[str, tuple[list[nn.Parameter], list[Tensor]]] = {}
        """For each optimizer: its parameters with gradients, and the norms of these."""

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        if trainer.progress.step + 1 < trainer.loop.next_log_step or not self.gradients:
            return
        own = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        self._found[str(id(optimizer))] = own, foreach_norm([one.grad for one in own])

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        names = parameter_names(trainer.model)
        wanted: list[tuple[str, str, Tensor]] = []
        for parameters, norms in self._found.values():
            wanted += [("gradients", names.get(one, ""), norm) for one, norm in zip(parameters, norms, strict=True)]
        self._found.clear()
        if self.weights:
            trained = [one for one in names if one.requires_grad]
            norms = foreach_norm([one.detach() for one in trained])
            wanted += [("weights", names[one], norm) for one, norm in zip(trained, norms, strict=True)]
        if not wanted:
            return
        # One wait for the device.
        values = torch.stack([whole(norm).float() for _, _, norm in wanted]).tolist()
        squares: dict[str, float] = {}
        for (kind, name, _), value in zip(wanted, values, strict=True):
            layer = name.rpartition(".")[0]
            for key in (f"train/norm/{kind}", *([f"train/norm/{kind}/{layer}"] if self.per_layer and layer else [])):
                squares[key] = squares.get(key, 0.0) + value * value
        trainer.log_metrics({key: math.sqrt(square) for key, square in squares.items()})
