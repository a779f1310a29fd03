"""The random generators that data may draw from: seeded for each sample, and put back for the training.

Both happen for every sample or batch, so both avoid what is slow: `torch.manual_seed` costs fifty times as much
as the generator's own, and numpy's `get_state` and `set_state` thirty times as much as a copy of the memory.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

_PYTHON: random.Random = random.seed.__self__  # type: ignore[attr-defined]
_seed_python: Callable[[int], None] = super(random.Random, _PYTHON).seed
_seed_torch = torch.default_generator.manual_seed
_seed_numpy = np.random.seed
_numpy: Any = np.random
_KEY_BYTES = 624 * 4
_STATE_BYTES = _KEY_BYTES + 4


def seed_random(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generator with a seed of 64 bits."""
    _seed_torch(seed)
    _seed_python(seed)
    _PYTHON.gauss_next = None  # type: ignore[attr-defined]
    _seed_numpy(seed & 0xFFFFFFFF)


@contextmanager
def kept_random_state() -> Generator[None, None, None]:
    """Put python's, numpy's and torch's CPU generator back as they were. Within, they are not what they were."""
    of_torch, of_python, put_back_numpy = torch.get_rng_state(), random.getstate(), _kept_numpy()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        put_back_numpy()


def _kept_numpy() -> Callable[[], None]:
    """Save the state of numpy's generator and return what puts it back."""
    generator: Any = _numpy.get_bit_generator()
    if not _lies_in_memory(generator):
        whole = np.random.get_state(legacy=False)
        return lambda: np.random.set_state(whole)
    address: int = generator.ctypes.state_address
    state = ctypes.string_at(address, _STATE_BYTES)
    # A second normal number, which is part of the state too, is in store if the next one costs nothing.
    normal = np.random.standard_normal()
    stored = ctypes.string_at(address, _STATE_BYTES) == state

    def put_back() -> None:
        if _numpy.get_bit_generator() is not generator:
            _numpy.set_bit_generator(generator)
        if stored:
            key, position = np.frombuffer(state[:_KEY_BYTES], np.uint32), int.from_bytes(state[_KEY_BYTES:], "little")
            np.random.set_state(("MT19937", key, position, 1, normal))
        else:
            _seed_numpy(0)  # empties the store
            ctypes.memmove(address, state, _STATE_BYTES)

    return put_back


@lru_cache(maxsize=1)
def _lies_in_memory(generator: Any) -> bool:
    """True where the generator's memory is what we take it for: the key and the position of a Mersenne twister."""
    if type(generator) is not np.random.MT19937:
        return False
    state: Any = generator.state["state"]
    memory = ctypes.string_at(generator.ctypes.state_address, _STATE_BYTES)
    same: bool = memory == state["key"].tobytes() + int(state["pos"]).to_bytes(4, "little")
    return same
