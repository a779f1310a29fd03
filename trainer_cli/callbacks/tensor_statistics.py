"""Statistics of named tensors, computed on their device and read together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

STATISTICS = ("mean", "std", "min", "max", "norm")


class TensorStatistics:
    """Collects the statistics of tensors by name; the last of several of one name counts."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Compute the statistics of a tensor of numbers. Nothing is read from the device."""
        values = tensor.detach()
        if values.numel() == 0 or values.is_complex():
            return
        values = values.float()
        spread = values.std(correction=0)
        low, high = values.aminmax()
        self._found[name] = torch.stack([values.mean(), spread, low, high, torch.linalg.vector_norm(values)])

    def read(self, prefix: str, wanted: Iterable[str] = STATISTICS) -> dict[str, float]:
        """`PREFIX/NAME/STATISTIC` -> value, with one wait for the device. Forgets everything."""
        if not self._found:
            return {}
        rows = torch.stack(list(self._found.values())).tolist()
        metrics = {
            f"{prefix}/{name}/{statistic}": row[STATISTICS.index(statistic)]
            for name, row in zip(self._found, rows, strict=True)
            for statistic in wanted
        }
        self._found.clear()
        return metrics
