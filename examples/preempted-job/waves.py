"""Noisy waves, and a recurrent network that predicts how each goes on."""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Waves(Dataset[Tensor]):
    """Sequences (length, 1) of a random frequency and phase. torch is seeded for each sample."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        frequency, phase = torch.rand(2)
        time = torch.arange(self.length, dtype=torch.float32)
        wave = torch.sin(0.2 * (1 + frequency) * time + 2 * math.pi * phase)
        return (wave + 0.05 * torch.randn(self.length))[:, None]


class Data:
    """What `data` of the config makes."""

    def __init__(self, count: int = 4000, length: int = 40) -> None:
        self.train, self.val = Waves(count, length), Waves(count // 10, length)


class Network(nn.Module):
    """A GRU and a linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.recurrent = nn.GRU(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, waves: Tensor) -> Tensor:
        """The mean squared error of the next value, at each place of waves (N, length, 1)."""
        states, _ = self.recurrent(waves[:, :-1])
        return (self.out(states) - waves[:, 1:]).square().mean()
