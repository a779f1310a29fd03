"""Trainings on a DataLoader of torch, as a user has it; each number of a sample is a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_cli import Callback, Trainer, TrainingLoop


class Numbers(Dataset[Tensor]):
    """Samples of `width` equal numbers, each sample its own."""

    def __init__(self, length: int = 10, width: int = 4) -> None:
        self.length, self.width = length, width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.width,), (index + 1) / self.length)


class Stream(IterableDataset[Tensor]):
    """The same samples without a length: `length` of them, or without end."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        index = 0
        while index != self.length:
            yield torch.full((4,), 1 / (index + 1))
            index += 1


class Sum(nn.Module):
    """Learns the sum of a sample's numbers. Each number is a token."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(width, 1)

    def forward(self, batch: Tensor) -> Any:
        loss = (self.linear(batch).squeeze(-1) - batch.sum(-1)).square().mean()
        return {"loss": loss, "tokens": batch.numel()}


class Watcher(Callback):
    """Notes each evaluation as (step, loader, batches), and the learning rate of each step."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[int, str, int]] = []
        self.rates: list[float] = []

    def on_validate_end(self, trainer: Trainer, model: Any, loop: Any) -> None:
        self.evaluations.append((trainer.progress.step, loop.name, loop.batch_idx + 1))

    def on_before_optimizer_step(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))


def batches(length: int = 10, batch_size: int = 2, width: int = 4) -> DataLoader[Tensor]:
    """A DataLoader as a user of torch has it."""
    return DataLoader(Numbers(length, width), batch_size=batch_size)


def make_trainer(max_duration: int | str = "1ep", *callbacks: Callback, **settings: Any) -> Trainer:
    """A trainer of SGD; the settings are the loop's where it has one of this name, and else the trainer's."""
    loop: dict[str, Any] = {"eval_interval": None, "log_interval": None, "max_duration": max_duration}
    loop |= {name: settings.pop(name) for name in list(settings) if name in _OF_LOOP}
    model = settings.pop("model", Sum)
    optimizer = settings.pop("optimizer", lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    seed = None if isinstance(model, nn.Module) else 0
    settings = {"device": "cpu", "seed": seed, **settings}
    return Trainer(model=model, optimizer=optimizer, loop=TrainingLoop(**loop), callbacks=callbacks, **settings)


_OF_LOOP = ("eval_interval", "eval_steps", "log_interval", "limit_train_batches", "microbatch", "hard_stop")


def weights(model: nn.Module) -> Mapping[str, Tensor]:
    """A copy of the weights."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same_weights(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same names and, bit for bit, the same tensors."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
