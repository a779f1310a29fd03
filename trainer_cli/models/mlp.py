"""A multi-layer perceptron for classification."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from trainer_cli.models.classification import classification


class MLP(nn.Module):
    """Linear layers with ReLU and dropout between them.

    A batch is (inputs (N, ...) of `inputs` numbers each, labels (N)).
    """

    def __init__(
        self, inputs: int = 64, hidden: Sequence[int] = (64,), classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, classes))

    def tensor_parallel_plan(self, tensor_size: int) -> dict[str, str]:
        """Divide the first layer of each pair by its outputs, and the second by its inputs."""
        # So only the outputs of the second layer have to be summed over the processes.
        names = [f"layers.{number}" for number, layer in enumerate(self.layers) if isinstance(layer, nn.Linear)]
        pairs = zip(names[::2], names[1::2], strict=False)
        return {name: style for pair in pairs for name, style in zip(pair, ("colwise", "rowwise"), strict=True)}

    def logits(self, inputs: Tensor) -> Tensor:
        """The (N, classes) scores."""
        scores: Tensor = self.layers(inputs)
        return scores

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The loss, and in evaluation the accuracy."""
        inputs, labels = batch
        return classification(self.logits(inputs), labels, training=self.training)
