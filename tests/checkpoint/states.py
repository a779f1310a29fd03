"""A small state with every kind of value, ways to compare such states, and a training of a larger one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def same(one: Any, other: Any) -> bool:
    """True where two states are equal in types, values, bits and structure; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (one == other and repr(one) == repr(other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def small_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, generator=generator)
    return {
        "model": {"weight": weight, "tied": weight, "bias": torch.randn(4, generator=generator).bfloat16()},
        "optimizer": {"state": {"weight": {"step": torch.tensor(float(seed)), "betas": (0.9, 0.99)}}},
        "progress": {"step": seed, "loss": math.nan, "seen": {1: "a", (2, None): b"\x00\xff"}},
        "rng": np.arange(seed, seed + 10, dtype=np.uint32),
    }


WIDE = 1 << 15
PIECE = 1 << 16
"""In bytes: half of the smallest tensor of that width."""


class Training:
    """Two weights and a buffer; `step` changes all of them, as an optimizer does the weights."""

    def __init__(self) -> None:
        self.weights = [torch.nn.Parameter(torch.randn(WIDE)), torch.nn.Parameter(torch.randn(WIDE, 2))]
        self.moment = torch.randn(WIDE)
        self.buffer, self.bias = torch.randn(WIDE), torch.nn.Parameter(torch.randn(3))

    @property
    def late(self) -> list[torch.Tensor]:
        return [*self.weights, self.moment, self.bias]

    def state(self) -> dict[str, Any]:
        named = {"a": self.weights[0].detach(), "b": self.weights[1].detach(), "bias": self.bias.detach()}
        return {"model": {**named, "buffer": self.buffer}, "optimizer": {"moment": self.moment}}

    def step(self) -> None:
        with torch.no_grad():
            for one in self.late:
                one.add_(1)
