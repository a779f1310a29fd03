"""A small residual network (He et al., 2015)."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu


class Block(nn.Module):
    """Two convolutions, and the input added to their result; halves height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / 2, W / 2)."""
        y = relu(self.norms[0](self.first(x)))
        return relu(self.norms[1](self.second(y)) + self.shortcut(x))


class Network(nn.Module):
    """Blocks of growing width, the mean over the image, and a linear layer."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(*sizes) for sizes in pairwise([3, *widths])))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Loss and accuracy of a batch of images (N, 3, H, W) and labels (N,)."""
        images, labels = batch
        scores = self.head(self.blocks(images).mean(dim=(2, 3)))
        accuracy = (scores.argmax(dim=1) == labels).float().mean()
        return {"loss": cross_entropy(scores, labels), "accuracy": accuracy}
