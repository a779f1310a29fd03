"""Models and data of a project whose steps are computed again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


def point(number: int) -> tuple[Tensor, Tensor]:
    """A point of a line, with noise from each of the generators."""
    noise = torch.rand(2) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
    x = torch.tensor([number / 40, 1.0]) + noise
    return x, x.sum() * 3


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return point(index)


class Mapped:
    """A dataset."""

    def __init__(self) -> None:
        self.train, self.val = Points(38), Points(12)


class Loaded:
    """A DataLoader that shuffles, from one epoch to the next, by a generator of its own."""

    def __init__(self) -> None:
        self.train = DataLoader(Points(38), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
        self.val = Points(12)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that says where it stands, and is read by workers in turn."""

    def __init__(self, size: int) -> None:
        self.size, self.at, self.start = size, 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self.at, self.start = self.start, 0
        while self.at * workers + worker < self.size:
            number = self.at * workers + worker
            self.at += 1
            yield point(number)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.start = state["at"]


class Streamed:
    """A stream."""

    def __init__(self) -> None:
        self.train, self.val = Stream(38), Points(12)


class Normed(nn.Module):
    """A model with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        loss = ((self.layers(x).squeeze(1) - y) ** 2).mean()
        return {"loss": loss, "root": loss.sqrt()}
