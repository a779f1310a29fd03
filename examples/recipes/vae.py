"""A variational autoencoder (Kingma and Welling, 2014) of digits."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


class VAE(nn.Module):
    """Images (N, 1, 8, 8) -> logits (N, 64), mean and logarithmic variance (N, latent) of the code."""

    def __init__(self, width: int = 64, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, 64))

    def reconstruct(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(images)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        images = batch[0]
        logits, mean, log_variance = self.reconstruct(images)
        reconstruction = binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="none").sum(1).mean()
        divergence = 0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).sum(1).mean()
        return {"loss": reconstruction + divergence, "reconstruction": reconstruction, "divergence": divergence}
