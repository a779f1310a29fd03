"""A table of numbers and categories, with few positives; judged by the area under the ROC curve of the whole set."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

CATEGORIES = (7, 12, 30)


class Rows:
    """What `data` of the config makes: rows drawn from a rule with noise; about one in six is positive."""

    def __init__(self, count: int = 6000) -> None:
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(count, 8, generator=generator)
        categories = torch.stack([torch.randint(size, (count,), generator=generator) for size in CATEGORIES], 1)
        rule = numbers[:, 0] * numbers[:, 1] + numbers[:, 2] + (categories[:, 0] % 3 == 0) - 2
        labels = (rule + torch.randn(count, generator=generator) > 0).float()
        parts = (slice(0, count * 5 // 6), slice(count * 5 // 6, count))
        self.train, self.val = (TensorDataset(numbers[part], categories[part], labels[part]) for part in parts)


class Network(nn.Module):
    """Numbers (N, 8) and categories (N, 3) -> logits (N)."""

    def __init__(self, width: int = 64, embedding: int = 4, positive: float = 5.0) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, embedding) for size in CATEGORIES)
        self.layers = nn.Sequential(
            nn.Linear(8 + embedding * len(CATEGORIES), width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1)
        )
        self.register_buffer("positive", torch.tensor(positive), persistent=False)

    def scores(self, numbers: Tensor, categories: Tensor) -> Tensor:
        embedded = [layer(column) for layer, column in zip(self.embeddings, categories.T, strict=True)]
        return self.layers(torch.cat([numbers, *embedded], dim=1)).squeeze(1)

    def forward(self, numbers: Tensor, categories: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.scores(numbers, categories)
        loss = binary_cross_entropy_with_logits(logits, labels, pos_weight=self.positive)
        return {"loss": loss, "logits": logits, "labels": labels.long()}
