"""One process on one device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from trainer_cli.errors import UserError
from trainer_cli.parallel.process_group import ALONE, ProcessGroup


class Single:
    """The model as it is, moved to the device."""

    world_size = 1
    group: ProcessGroup = ALONE

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model.to(device)

    def trained(self, model: nn.Module) -> nn.Module:
        return model

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """There are no other gradients."""

    def check_averaged(self, model: nn.Module) -> None:
        """There are no other gradients."""

    def evaluation(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)


def on_local_device(device: torch.device, group: ProcessGroup) -> torch.device:
    """The device of this rank: of several GPUs, that of its number on its machine.

    Raises:
        UserError: this machine has fewer GPUs than processes.
    """
    if device.type != "cuda":
        return device
    if group.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {group.local_rank} has no GPU: this machine has {torch.cuda.device_count()}",
            cure="Start as many processes on each machine as it has GPUs.",
        )
    return torch.device("cuda", group.local_rank)
