"""Points on a ring."""

import math

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


def ring(count: int, noise: float = 0.05) -> Tensor:
    """Points (count, 2) at a distance of about 1 from the middle."""
    generator = torch.Generator().manual_seed(count)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    points = torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + noise * torch.randn(count, 2, generator=generator)


class Ring:
    """What `data` of the config makes."""

    def __init__(self, count: int = 4096) -> None:
        self.train, self.val = TensorDataset(ring(count)), TensorDataset(ring(1000))
