"""Two half moons that reach into one another, and a classifier of their points."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset


def moons(count: int, noise: float) -> TensorDataset:
    """Points (count, 2) and on which moon each lies (count,)."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.arange(count) % 2
    angle = math.pi * (torch.rand(count, generator=generator) + labels)
    points = torch.stack([angle.cos() + labels, angle.sin() + labels / 2], dim=1)
    return TensorDataset(points + noise * torch.randn(count, 2, generator=generator), labels)


class Moons:
    """What `data` of the config makes."""

    def __init__(self, count: int = 600, noise: float = 0.2) -> None:
        self.train, self.val = moons(count, noise), moons(count // 2 + 1, noise)


class Classifier(nn.Module):
    """One hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Loss and accuracy of a batch of points (N, 2) and labels (N,)."""
        points, labels = batch
        scores = self.layers(points)
        accuracy = (scores.argmax(dim=1) == labels).float().mean()
        return {"loss": cross_entropy(scores, labels), "accuracy": accuracy}
