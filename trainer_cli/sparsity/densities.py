"""How many weights of each parameter are kept, and when masks change: arithmetic without tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def erdos_renyi_kernel(shapes: Shapes, sparsity: float) -> dict[str, float]:
    """The sparsity of each parameter, so that all together have `sparsity`, by the Erdős-Rényi-Kernel rule of RigL
    (Evci et al., 2020, arXiv:1911.11134): the density is proportional to the sum of a parameter's sizes over their
    product, and at most 1.
    """
    raw = {name: sum(shape) / math.prod(shape) for name, shape in shapes.items()}
    wanted = (1 - sparsity) * sum(map(math.prod, shapes.values()))
    dense: set[str] = set()
    while True:
        kept = wanted - sum(math.prod(shapes[name]) for name in dense)
        scaled = sum(raw[name] * math.prod(shapes[name]) for name in shapes if name not in dense)
        scale = kept / scaled if scaled else 0.0
        full = {name for name in shapes if name not in dense and raw[name] * scale > 1}
        if not full:
            break
        dense |= full
    return {name: 0.0 if name in dense else 1 - raw[name] * scale for name in shapes}


def cubic(step: int, start: int, stop: int, initial: float, final: float) -> float:
    """The sparsity at a step of gradual magnitude pruning: it rises from `initial` at `start` to `final` at `stop`,
    fast first (Zhu & Gupta, 2017, arXiv:1710.01878, equation 1).
    """
    if step >= stop:
        return final
    left = 1 - max(0, step - start) / (stop - start)
    return final + (initial - final) * left**3


def cosine(step: int, stop: int) -> float:
    """The part of its drop fraction that RigL uses at a step: from 1, along a cosine, to 0 at `stop`."""
    return (1 + math.cos(math.pi * min(step, stop) / stop)) / 2


def kept(size: int, sparsity: float) -> int:
    """How many of `size` weights are kept; at least one."""
    return max(1, size - round(size * sparsity))
