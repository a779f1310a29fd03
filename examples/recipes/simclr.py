"""Contrastive learning (SimCLR: Chen et al., 2020): each view of an image finds the other one in its batch."""

import torch
from byol import layers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize


class SimCLR(nn.Module):
    """Two views (N, 1, 8, 8). Under `parallel=ddp` each rank contrasts the views of its own samples."""

    def __init__(self, width: int = 64, temperature: float = 0.5) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), layers(64, width, width))
        self.temperature = temperature

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        codes = normalize(self.network(torch.cat(batch)))
        scores = (codes @ codes.T / self.temperature).fill_diagonal_(-torch.inf)
        count = len(batch[0])
        other = torch.arange(2 * count, device=codes.device).roll(count)
        found = (scores.argmax(dim=1) == other).float().mean()
        return {"loss": cross_entropy(scores, other), "found": found}
