"""The random generators that data may draw from: seeded for each sample, and restored for the training."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch

# `torch.manual_seed` also visits every accelerator, which takes a hundred times as long.
_seed_torch = torch.default_generator.manual_seed


def seed_random(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generator with a seed of 64 bits. Numpy's takes the lower half."""
    _seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def kept_random_state() -> Generator[None, None, None]:
    """Restore python's, numpy's and torch's CPU generator at the end."""
    # The legacy form of numpy's state holds for Mersenne twisters alone.
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
