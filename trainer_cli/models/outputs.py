"""What the shipped models return for a batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def classification(logits: Tensor, labels: Tensor, *, training: bool) -> dict[str, Tensor]:
    """Mean cross-entropy of (N, classes) logits as `loss`; outside training `accuracy`, `logits`, `labels` too."""
    outputs = {"loss": functional.cross_entropy(logits, labels)}
    if not training:
        with torch.no_grad():
            outputs["accuracy"] = (logits.argmax(dim=1) == labels).float().mean()
        outputs |= {"logits": logits, "labels": labels}
    return outputs
