"""An encoder and a head, whose names the configs use in globs."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Classifier(nn.Module):
    """`encoder` makes features (N, width) of images; `head` scores the digits `first` to `first` + 4."""

    def __init__(self, first: int, width: int = 64) -> None:
        super().__init__()
        self.first = first
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, width), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(width, 5)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Loss and accuracy of a batch of images (N, 1, 8, 8) and digits (N,)."""
        images, digits = batch
        scores, labels = self.head(self.encoder(images)), digits - self.first
        accuracy = (scores.argmax(dim=1) == labels).float().mean()
        return {"loss": cross_entropy(scores, labels), "accuracy": accuracy}
