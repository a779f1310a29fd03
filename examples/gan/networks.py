"""Generator and discriminator as one model, so that one checkpoint holds both."""

import torch
from torch import Tensor, nn


def layers(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )  # fmt: skip


class Networks(nn.Module):
    """The configs name the parameters of both by `generator.*` and `discriminator.*`."""

    def __init__(self, noise: int = 4, width: int = 64) -> None:
        super().__init__()
        self.noise = noise
        self.generator = layers(noise, width, 2)
        self.discriminator = layers(2, width, 1)

    def generate(self, count: int) -> Tensor:
        """Points (count, 2)."""
        device = next(self.parameters()).device
        return self.generator(torch.randn(count, self.noise, device=device))

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """For evaluation: how far generated points are from the ring, and whether they are all around it."""
        points = self.generate(len(batch[0]))
        distance = (points.norm(dim=1) - 1).abs().mean()
        return {"loss": distance + points.mean(dim=0).norm(), "distance": distance}
