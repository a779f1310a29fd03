"""One square in each noisy image is found: its box and its colour; judged by the mean average precision of the set."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, smooth_l1_loss
from torch.utils.data import Dataset

SIDE, CLASSES = 16, 3


class Squares(Dataset[dict[str, Tensor]]):
    """Images (3, 16, 16), boxes (4,) as left, top, right, bottom from 0 to 1, and labels."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        image = 0.3 * torch.rand(3, SIDE, SIDE, generator=generator)
        size = int(torch.randint(4, 9, (), generator=generator))
        left, top = torch.randint(0, SIDE - size, (2,), generator=generator).tolist()
        label = torch.randint(CLASSES, (), generator=generator)
        image[label, top : top + size, left : left + size] += 0.7
        return {"image": image, "box": torch.tensor([left, top, left + size, top + size]) / SIDE, "label": label}


class Data:
    def __init__(self, count: int = 2000) -> None:
        self.train, self.val = Squares(0, count), Squares(count, 200)


class Detector(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(width * SIDE, 64), nn.ReLU(),
        )  # fmt: skip
        self.box, self.label = nn.Linear(64, 4), nn.Linear(64, CLASSES)

    def detect(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes (N, 4) and scores (N, CLASSES)."""
        features = self.features(images)
        return self.box(features).sigmoid(), self.label(features)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        boxes, scores = self.detect(batch["image"])
        of_box, of_label = smooth_l1_loss(boxes, batch["box"], beta=0.1), cross_entropy(scores, batch["label"])
        found = torch.cat([boxes, scores.softmax(dim=1)], dim=1)
        truth = torch.cat([batch["box"], batch["label"][:, None]], dim=1)
        return {"loss": 10 * of_box + of_label, "box": of_box, "label": of_label, "found": found, "truth": truth}


class MeanAveragePrecision:
    """Of one detection and one object an image: a detection is right if its box covers more than half of the union."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.found, self.truth = [], []

    def update(self, found: Tensor, truth: Tensor) -> None:
        """(N, 4 + CLASSES) boxes and probabilities, and (N, 5) boxes and labels."""
        self.found.append(found)
        self.truth.append(truth)

    def compute(self) -> float:
        found, truth = torch.cat(self.found), torch.cat(self.truth)
        inner = torch.minimum(found[:, 2:4], truth[:, 2:4]) - torch.maximum(found[:, :2], truth[:, :2])
        shared = inner.clamp(min=0).prod(1)
        union = sum((boxes[:, 2:4] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (found, truth)) - shared
        labels, (scores, guesses) = truth[:, 4], found[:, 4:].max(dim=1)
        right = (guesses == labels) & (shared > union / 2)
        precisions = []
        for label in labels.unique():
            of_label = right[guesses == label][scores[guesses == label].argsort(descending=True)].double()
            precision = of_label.cumsum(0) / torch.arange(1, len(of_label) + 1)
            # The best precision at this recall or a higher one.
            precision = precision.flip(0).cummax(0).values.flip(0) if len(precision) else precision
            precisions.append(float((precision * of_label).sum() / (labels == label).sum()))
        return sum(precisions) / len(precisions)
