"""Whether weights are numbers: looked for while they are written, piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.memory import Memory

_CHUNK = 1 << 18
"""Elements of which others are made at a time: as many as fit the processor's caches."""


class Finite:
    """Is shown what is written, in its order, and looks for NaN and infinity in some tensors of it.

    Args:
        tensors: of each the type, where it begins and its size, in their order.
    """

    def __init__(self, tensors: Iterable[tuple[torch.dtype, int, int]]) -> None:
        self.so_far = True
        """Whether there was none."""
        self._coming = deque(tensors)

    def __call__(self, memory: Memory, start: int, end: int) -> None:
        while self.so_far and self._coming and self._coming[0][1] < end:
            dtype, offset, size_bytes = self._coming[0]
            last = offset + size_bytes
            raw = memory.tensor[max(offset, start) : min(last, end)]
            self.so_far = _are_finite(raw.view(dtype))
            if last > end:
                break
            self._coming.popleft()


def _are_finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point() and not values.is_complex():
        return True
    if values.dtype in (torch.float32, torch.float64):
        # Of numpy, which takes no second thread away from the training; in one call, without the interpreter's lock.
        with np.errstate(all="ignore"):
            if np.isfinite(values.numpy().sum()):
                return True
    return all(_is_finite(values[start : start + _CHUNK]) for start in range(0, values.numel(), _CHUNK))


def _is_finite(chunk: torch.Tensor) -> bool:
    """One pass where all is well, since a sum of numbers with NaN or infinity is none of them finite."""
    wide = chunk.float() if chunk.itemsize < 4 else chunk
    return bool(torch.isfinite(wide.sum())) or bool(torch.isfinite(wide).all())
