"""Whether an optimizer can use its fused kernel, which is then the default.

Its results differ in the last bits from those of a step of many kernels. So the choice follows from the config, the
model and the type of the device alone, and a resume makes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW

_KERNELS: Mapping[Any, frozenset[str]] = {
    Adam: frozenset({"cpu", "cuda", "mps"}),
    AdamW: frozenset({"cpu", "cuda", "mps"}),
    SGD: frozenset({"cpu", "cuda", "mps"}),
    Adagrad: frozenset({"cpu"}),
}
"""Optimizers with a fused kernel -> its devices."""
_SHARDED = frozenset({Adam, AdamW})
"""Optimizers whose fused kernel takes sharded parameters."""
_WAYS = ("fused", "foreach", "capturable", "differentiable")
"""Settings that choose the implementation of a step; fused is no default if one is set."""


def can_be_fused(
    optimizer: Any, settings: Mapping[str, Any], groups: Iterable[Mapping[str, Any]], model: nn.Module
) -> bool:
    """Whether this optimizer class has a fused kernel for all these parameters, and no implementation is configured.

    Args:
        settings: the arguments it is made with; `groups`: its parameter groups, with their own settings.
    """
    groups = list(groups)
    if optimizer not in _KERNELS or any(given.get(way) is not None for given in (settings, *groups) for way in _WAYS):
        return False
    if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse for part in model.modules()):
        return False
    sharded = optimizer in _SHARDED
    return all(
        _fits(parameter, _KERNELS[optimizer], sharded=sharded) for group in groups for parameter in group["params"]
    )


def _fits(parameter: Tensor, devices: frozenset[str], *, sharded: bool) -> bool:
    """Whether a parameter is a plain tensor, or a sharded one where that may be, on a device with the kernel."""
    floats = {torch.float32} if parameter.device.type == "mps" else {torch.float32, torch.bfloat16, torch.float64}
    # Not by its class, whose module takes half a second to import.
    plain = type(parameter) in (Tensor, nn.Parameter) or (sharded and type(parameter).__name__ == "DTensor")
    return plain and parameter.device.type in devices and parameter.dtype in floats
