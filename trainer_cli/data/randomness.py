"""The random generators that data may draw from: seeded for each sample, and restored for the training."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# `torch.manual_seed` also visits every accelerator, which takes a hundred times as long.
_seed_torch = torch.default_generator.manual_seed


def seed_random(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generator with a seed of 64 bits. Numpy's takes the lower half."""
    _seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


RandomState = tuple[torch.Tensor, Any, Any]


def random_state() -> RandomState:
    """The states of torch's CPU generator, python's and numpy's."""
    # The legacy form of numpy's state holds for Mersenne twisters alone.
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)


def is_random_state(state: RandomState) -> bool:
    """Whether the generators are in this state: nothing was drawn since."""
    of_torch, of_python, of_numpy = random_state()
    return torch.equal(of_torch, state[0]) and of_python == state[1] and _is_equal(of_numpy, state[2])


def _is_equal(state: Any, other: Any) -> bool:
    """Whether two states of numpy are equal: arrays and numbers in mappings, other ones for each bit generator."""
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in state.items())
    return bool(np.array_equal(state, other))


@contextmanager
def kept_random_state() -> Generator[None, None, None]:
    """Restore python's, numpy's and torch's CPU generator at the end."""
    states = random_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
