"""A callback that records what a hand-written loop needs to make the same steps, and what they led to."""

import copy
from typing import Any

import torch
from torch import nn

from trainer_cli import Callback, Trainer


class Record(Callback):
    """Writes to `file`: state and random state at the first step, each batch and its loss, and the state at the end."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.start: dict[str, Any] | None = None
        self.batches: list[Any] = []
        self.losses: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        if self.start is None:
            self.start = copy.deepcopy(model.state_dict())
            self.random = torch.get_rng_state()
        self.batches.append(copy.deepcopy(batch))

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
        self.losses.append(loss.detach())

    def on_train_end(self, trainer: Trainer, model: nn.Module, loop: Any, loop_idx: int) -> None:
        model = copy.deepcopy(model).train()
        model.load_state_dict(self.start)
        torch.save(
            {"model": model, "random": self.random, "batches": self.batches, "losses": self.losses,
             "end": trainer.model.state_dict()},
            self.file,
        )  # fmt: skip
