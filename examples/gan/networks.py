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

    def __init__(self, noise: int = 16, width: int = 128) -> None:
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(layers(noise, width, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)))
        self.discriminator = nn.Sequential(nn.Flatten(), layers(64, width, 1))

    def generate(self, count: int) -> Tensor:
        """Images (count, 1, 8, 8)."""
        device = next(self.parameters()).device
        return self.generator(torch.randn(count, self.noise, device=device))

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """For evaluation: how far mean and spread of each pixel are from those of real images."""
        real, fake = batch[0], self.generate(len(batch[0]))
        distance = (fake.mean(0) - real.mean(0)).abs().mean() + (fake.std(0) - real.std(0)).abs().mean()
        return {"loss": distance, "distance": distance}
