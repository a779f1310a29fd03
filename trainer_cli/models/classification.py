"""The loss and the accuracy of a classifier."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def classification(logits: Tensor, labels: Tensor, *, training: bool) -> dict[str, Tensor]:
    """The outputs of a classifier: `loss`, and in evaluation `accuracy`, `logits` and `labels`.

    The loss is the mean cross-entropy of (N, classes) logits and (N) labels.
    """
    outputs = {"loss": functional.cross_entropy(logits, labels)}
    if not training:
        with torch.no_grad():
            outputs["accuracy"] = (logits.argmax(dim=1) == labels).float().mean()
        outputs |= {"logits": logits, "labels": labels}
    return outputs
