"""A GAN of digits, whose training step has two optimizers."""

import torch
from torch import Tensor, nn

from trainer_cli import TrainStep


def layers(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs))


class GAN(nn.Module):
    """Generator and discriminator in one model, so that one checkpoint holds both."""

    def __init__(self, noise: int = 16, width: int = 64) -> None:
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(layers(noise, width, 64), nn.Sigmoid())
        self.discriminator = layers(64, width, 1)

    def forward(self, batch: list[Tensor]) -> Tensor:
        """For evaluation: how far mean and spread of each pixel are from those of real images."""
        real = batch[0].flatten(1)
        fake = self.generator(torch.randn(len(real), self.noise, device=real.device))
        return (fake.mean(0) - real.mean(0)).abs().mean() + (fake.std(0) - real.std(0)).abs().mean()


class Step(TrainStep):
    """First the discriminator, then the generator, with the non-saturating loss of Goodfellow et al. (2014)."""

    def train_batch(self, batch: list[Tensor]) -> dict[str, Tensor]:
        real, loss_of = batch[0].flatten(1), nn.functional.binary_cross_entropy_with_logits
        fake = self.model.generator(torch.randn(len(real), self.model.noise, device=self.device))
        on_real, on_fake = self.model.discriminator(real), self.model.discriminator(fake.detach())
        d_loss = loss_of(on_real, torch.ones_like(on_real)) + loss_of(on_fake, torch.zeros_like(on_fake))
        self.backward(d_loss, "discriminator")
        self.optimizer_step("discriminator")
        on_fake = self.model.discriminator(fake)
        g_loss = loss_of(on_fake, torch.ones_like(on_fake))
        self.backward(g_loss, "generator")
        self.optimizer_step("generator")
        return {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}
