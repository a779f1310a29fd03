"""A metric of torchmetrics that counts the samples of an evaluation."""

from __future__ import annotations

import torch
import torchmetrics
from torch import Tensor


class Seen(torchmetrics.Metric):  # type: ignore[misc]
    """The sum over all ranks: a sample that two ranks have counted is in it twice."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.count += len(targets)

    def compute(self) -> Tensor:
        return self.count
