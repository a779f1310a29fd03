"""A model and data of a project, in which a difference can be planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer_cli import Callback


class Net(nn.Module):
    """Two layers with a norm and dropout between them.

    Args:
        draws: draw a random number in each forward, and do not use it.
        late: from this forward on, the output is another.
    """

    calls: Tensor

    def __init__(
        self, dropout: float = 0.0, momentum: float = 0.1, gain: float = 1.0, draws: bool = False, late: int = 0
    ) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(4, 2)
        with torch.no_grad():
            self.last.weight.mul_(gain)
        self.draws, self.late = draws, late
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.draws:
            torch.rand(1)
        if self.training:
            self.calls += 1
        x = self.last(self.drop(self.norm(self.first(batch[0]))))
        if self.late and int(self.calls) >= self.late:
            x = x * 1.5
        return nn.functional.cross_entropy(x, batch[1])


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, sample: int | None, label: int | None, unseeded: bool) -> None:
        self.sample, self.label = sample, label
        self.generator = np.random.default_rng() if unseeded else None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([index / 40, index % 3, 1.0])
        if index == self.sample:
            x = x + 1e-6
        if self.generator is not None:
            x = x + float(self.generator.random())
        return x, torch.tensor(1 - index % 2 if index == self.label else index % 2)


class Data:
    """A dataset with one sample, or one label, changed; with noise that no seed decides; or in an order of its own."""

    def __init__(
        self,
        sample: int | None = None,
        label: int | None = None,
        unseeded: bool = False,
        order: int | None = None,
        shifted_val: bool = False,
    ) -> None:
        points = Points(sample, label, unseeded)
        self.train: Any = points
        if order is not None:
            self.train = DataLoader(points, 8, shuffle=True, generator=torch.Generator().manual_seed(order))
        self.val = Points(None, 3 if shifted_val else None, False)


class Shift(Callback):
    """Adds a number to the input of the model."""

    def __init__(self, by: float) -> None:
        self.by = by

    def on_before_forward(
        self, trainer: Any, model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        args[0] = (args[0][0] + self.by, args[0][1])
