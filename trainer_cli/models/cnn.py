"""A small convolutional network that classifies images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from trainer_cli.models.classification import classification


class CNN(nn.Module):
    """3x3 convolutions with batch norm and ReLU, averaging over the image, dropout and a linear layer.

    A 2x2 max-pooling follows each convolution except the first.

    A batch is (images (N, inputs, height, width), labels (N)).
    """

    def __init__(
        self, inputs: int = 1, channels: Sequence[int] = (16, 32, 64), classes: int = 10, dropout: float = 0.1
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for depth, width in enumerate(channels):
            # No bias, because the norm that follows has one.
            layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            if depth > 0:
                layers.append(nn.MaxPool2d(2))
            inputs = width
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(inputs, classes))

    def logits(self, images: Tensor) -> Tensor:
        """The (N, classes) scores."""
        scores: Tensor = self.head(self.features(images))
        return scores

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The loss, and in evaluation the accuracy."""
        images, labels = batch
        return classification(self.logits(images), labels, training=self.training)
