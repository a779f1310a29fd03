"""One process on one device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainer_cli.parallel.process_group import ALONE, ProcessGroup


class Single:
    """The model as it is, moved to the device."""

    world_size = 1
    group: ProcessGroup = ALONE

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model.to(device)

    def clip_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
