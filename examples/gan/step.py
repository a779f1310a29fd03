"""The training step: first the discriminator, then the generator."""

import torch
from torch import Tensor, nn

from trainer_cli import TrainStep


class GanStep(TrainStep):
    """Both with the non-saturating loss of Goodfellow et al. (2014); real labels are `smooth`."""

    def __init__(self, smooth: float = 0.9) -> None:
        self.loss = nn.BCEWithLogitsLoss()
        self.smooth = smooth

    def train_batch(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """Train both on real images (N, 1, 8, 8), and return what is logged."""
        real, _ = batch
        with self.autocast():
            fake = self.model.generate(len(real))
            on_real, on_fake = self.model.discriminator(real), self.model.discriminator(fake.detach())
            real_loss = self.loss(on_real, torch.full_like(on_real, self.smooth))
            d_loss = real_loss + self.loss(on_fake, torch.zeros_like(on_fake))
        self.backward(d_loss, "discriminator")
        self.optimizer_step("discriminator")

        with self.autocast():
            on_fake = self.model.discriminator(fake)
            g_loss = self.loss(on_fake, torch.ones_like(on_fake))
        self.backward(g_loss, "generator")
        self.optimizer_step("generator")
        return {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}
