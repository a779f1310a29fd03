"""A vision transformer (Dosovitskiy et al., 2021) with mixup (Zhang et al., 2018) that is switched off at the end."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer_cli import Callback, Trainer


class ViT(nn.Module):
    """Images (N, 1, 8, 8) in patches of 2 by 2. In training each image is mixed with another one of the batch."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 2, mixup: float = 0.8) -> None:
        super().__init__()
        self.mixup = mixup
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 17, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True, bias=False
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def scores(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(
            self.layers(torch.cat([self.first.expand(len(images), -1, -1), patches], 1) + self.places)[:, 0]
        )

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        if not self.training:
            scores = self.scores(images)
            return {"loss": cross_entropy(scores, labels), "accuracy": (scores.argmax(1) == labels).float().mean()}
        if self.mixup == 0:
            return {"loss": cross_entropy(self.scores(images), labels, label_smoothing=0.1)}
        share = torch.distributions.Beta(self.mixup, self.mixup).sample().item()
        scores = self.scores(share * images + (1 - share) * images.flip(0))
        losses = (cross_entropy(scores, of, label_smoothing=0.1) for of in (labels, labels.flip(0)))
        return {"loss": share * next(losses) + (1 - share) * next(losses)}


class MixupUntil(Callback):
    """Trains without mixup from an epoch on. It depends on the epoch alone, so a resumed run does the same."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.progress.epoch >= self.epoch:
            trainer.model.mixup = 0.0
