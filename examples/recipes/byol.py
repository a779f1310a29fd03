"""Bootstrap your own latent (Grill et al., 2020): a network predicts what its slow copy sees in another view."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import Dataset

from trainer_cli import Digits


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Two views of each image: moved by up to one pixel, and noisy."""

    def __init__(self, images: Dataset[tuple[Tensor, Tensor]]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index][0]
        return self.view(image), self.view(image)

    @staticmethod
    def view(image: Tensor) -> Tensor:
        """Torch is seeded for each sample: the views are the same after a resume."""
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return image.roll((down, right), (-2, -1)) + 0.1 * torch.randn_like(image)


class Data:
    def __init__(self) -> None:
        digits = Digits(augment=False)
        self.train, self.val = Views(digits.train), Views(digits.val)


def layers(*sizes: int) -> nn.Sequential:
    first, hidden, last = sizes
    return nn.Sequential(
        nn.Linear(first, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, last)
    )


class BYOL(nn.Module):
    """Two views (N, 1, 8, 8); the teacher is a part of the model, so a checkpoint holds it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.student, self.predictor = (
            nn.Sequential(nn.Flatten(), layers(64, width, width)),
            layers(width, width, width),
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, batch: list[Tensor]) -> Tensor:
        one, other = batch
        with torch.no_grad():
            of_one, of_other = self.teacher(one), self.teacher(other)
        similar = cosine_similarity(self.predictor(self.student(one)), of_other)
        return (4 - 2 * similar - 2 * cosine_similarity(self.predictor(self.student(other)), of_one)).mean()
