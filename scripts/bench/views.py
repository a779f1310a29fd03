"""A dataset whose batches are views of tensors, so that a step of a loop costs nothing for its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

Batch = tuple[Tensor, Tensor]


class Views(ABC):
    """As many samples as `count`, in order; `collate` gets their indices."""

    deterministic = True

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: Sequence[int]) -> Sequence[int]:
        return indices

    def collate(self, indices: Sequence[int]) -> Batch:
        """The batch of consecutive samples."""
        return self.batch(slice(indices[0], indices[-1] + 1))

    @abstractmethod
    def batch(self, part: slice) -> Batch:
        """Views of these samples."""
