"""The random generators that data may draw from: seeded for each sample, and put back for the training."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


def seed_random(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generator. `torch.manual_seed` costs fifty times as much."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def kept_random_state() -> Generator[None, None, None]:
    """Put python's, numpy's and torch's CPU generator back as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
