"""What the trainer asks of the way in which one model is trained, by one process or by several."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainer_cli.parallel.process_group import ProcessGroup


@runtime_checkable
class Strategy(Protocol):
    """How a model is placed, and what is computed over all processes that train it."""

    world_size: int
    """Processes that train this model."""
    group: ProcessGroup
    """These processes."""

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model on the device of this process, before its optimizers are made."""

    def trained(self, model: nn.Module) -> nn.Module:
        """What a training forward calls: the placed model, or a wrapper whose backward averages gradients."""

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Whether the next forward and backward averages gradients over the processes, or only adds to its own."""

    def check_averaged(self, model: nn.Module) -> None:
        """Check, after the last backward of several processes, that gradients are averaged.

        Raises:
            UserError: parameters without a gradient have kept others from it.
        """

    def evaluation(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around an evaluation: the model is the same on all processes, also where training leaves differences.
        Collective."""

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients down to this norm over all processes. Returns the norm before, without a wait for it."""
