"""A denoising diffusion model (Ho et al., 2020) of digits, with a moving average of its weights."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

STEPS = 100


class DDPM(nn.Module):
    """Predicts the noise in images (N, 1, 8, 8) from -1 to 1."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.before, self.after = nn.Linear(64, width), nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 64)
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.1, STEPS), 0)
        self.register_buffer("kept", kept, persistent=False)

    def noise_in(self, noisy: Tensor, step: Tensor) -> Tensor:
        """(N, 64) images after `step` (N,) steps of noise -> (N, 64) noise."""
        return self.out(self.after(self.before(noisy) + self.time(step)))

    def forward(self, batch: list[Tensor]) -> Tensor:
        images = batch[0].flatten(1) * 2 - 1
        step = torch.randint(STEPS, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        kept = self.kept[step, None]
        return mse_loss(self.noise_in(kept.sqrt() * images + (1 - kept).sqrt() * noise, step), noise)
