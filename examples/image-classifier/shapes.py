"""Images of circles, squares and triangles, drawn from their index."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

SIDE = 24
NAMES = ("circle", "square", "triangle")


def draw(index: int) -> tuple[Tensor, int]:
    """An image (3, 32, 32) from 0 to 1, and which of NAMES it shows."""
    generator = torch.Generator().manual_seed(index)
    label = index % len(NAMES)
    x0, y0, size = torch.rand(3, generator=generator) * torch.tensor([8, 8, 5]) + torch.tensor([12, 12, 5])
    colour = torch.rand(3, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(32.0) - y0, torch.arange(32.0) - x0, indexing="ij")
    inside = (
        x.square() + y.square() < size.square(),
        (x.abs() < size) & (y.abs() < size),
        (y > -size) & (y < size) & (x.abs() < (y + size) / 2),
    )[label]
    background = 0.5 * torch.rand(3, 32, 32, generator=generator)
    return torch.where(inside, colour, background), label


class Shapes(Dataset[tuple[Tensor, int]]):
    """Images (3, SIDE, SIDE): random crops for the training, the middle for evaluation."""

    def __init__(self, first: int, count: int, *, crops: bool) -> None:
        self.images = [draw(first + index) for index in range(count)]
        self.crops = crops

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # torch is seeded for each sample, so these numbers are the same after a resume and with any number of workers.
        image, label = self.images[index]
        left, top = torch.randint(0, 32 - SIDE, (2,)).tolist() if self.crops else (4, 4)
        return image[:, top : top + SIDE, left : left + SIDE], label


class Data:
    """What `data` of the config makes."""

    classes = len(NAMES)

    def __init__(self, count: int = 1500) -> None:
        self.train = Shapes(0, count, crops=True)
        self.val = Shapes(count, 300, crops=False)
