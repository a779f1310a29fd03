"""The random generators that data may draw from: seeded for each sample, and put back for the training.

Both happen for every sample or batch, so both avoid what is slow: `torch.manual_seed` costs fifty times as much as the
generator's own; python's `seed` twice as much as numpy's, though both are Mersenne twisters; and to get and set the
state of either, thirty times as much as a copy of its memory.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
_seed_torch = torch.default_generator.manual_seed
_seed_numpy = np.random.seed
_numpy: Any = np.random
_spare = np.random.MT19937(0)
_seed_spare: Callable[[int], None] = np.random.RandomState(_spare).seed
_KEY_BYTES = 624 * 4
_STATE_BYTES = _KEY_BYTES + 4


def seed_random(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generator with a seed of 64 bits.

    Numpy's gets the lower half and python's the upper one, in the same manner: numpy's.
    """
    _seed_torch(seed)
    _seed_spare(seed >> 32)
    both = _python_and_spare()
    if both is not None:
        python, spare = both
        python.key[:] = spare.key
        python.place[0] = spare.place[0]
        _PYTHON.gauss_next = None
    else:
        state: Any = _spare.state["state"]
        random.setstate((3, (*state["key"].tolist(), int(state["pos"])), None))
    _seed_numpy(seed & 0xFFFFFFFF)


@contextmanager
def kept_random_state() -> Generator[None, None, None]:
    """Put python's, numpy's and torch's CPU generator back as they were. Within, they are not what they were."""
    of_torch, put_back_python, put_back_numpy = torch.get_rng_state(), _kept_python(), _kept_numpy()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        put_back_python()
        put_back_numpy()


def _kept_python() -> Callable[[], None]:
    """Save the state of python's generator and return what puts it back."""
    python = _python_twister()
    if python is None:
        whole = random.getstate()
        return lambda: random.setstate(whole)
    state, normal = bytes(python.state), _PYTHON.gauss_next

    def put_back() -> None:
        python.state[:] = state
        _PYTHON.gauss_next = normal

    return put_back


def _kept_numpy() -> Callable[[], None]:
    """Save the state of numpy's generator and return what puts it back."""
    generator: Any = _numpy.get_bit_generator()
    numpy = _numpy_twister(generator)
    if numpy is None:
        whole = np.random.get_state(legacy=False)
        return lambda: np.random.set_state(whole)
    state = bytes(numpy.state)
    # A second normal number, which is part of the state too, is in store if the next one costs nothing.
    normal = np.random.standard_normal()
    stored = numpy.state == state

    def put_back() -> None:
        if _numpy.get_bit_generator() is not generator:
            _numpy.set_bit_generator(generator)
        if stored:
            key, place = np.frombuffer(state[:_KEY_BYTES], np.uint32), int.from_bytes(state[_KEY_BYTES:], sys.byteorder)
            np.random.set_state(("MT19937", key, place, 1, normal))
        else:
            _seed_numpy(0)  # empties the store
            numpy.state[:] = state

    return put_back


@dataclass(frozen=True, slots=True)
class _Twister:
    """Where a Mersenne twister lies in memory: its key of 624 words, and a number, the place in it."""

    state: memoryview
    key: memoryview
    place: memoryview

    @classmethod
    def at(cls, address: int, *, place_first: bool) -> _Twister:
        state = memoryview((ctypes.c_ubyte * _STATE_BYTES).from_address(address)).cast("B")
        key, place = (state[4:], state[:4]) if place_first else (state[:-4], state[-4:])
        return cls(state, key, place.cast("I"))

    def holds(self, key: np.ndarray, place: int) -> bool:
        return self.key == key.tobytes() and self.place[0] == place


@cache
def _python_and_spare() -> tuple[_Twister, _Twister] | None:
    python, spare = _python_twister(), _numpy_twister(_spare)
    return None if python is None or spare is None else (python, spare)


@cache
def _python_twister() -> _Twister | None:
    """Python's generator, where its memory is what we take it for."""
    if sys.implementation.name != "cpython":
        return None
    begins = object.__basicsize__
    if _random.Random.__basicsize__ < begins + _STATE_BYTES:
        return None
    found = _Twister.at(id(_PYTHON) + begins, place_first=True)
    _, (*key, place), _ = random.getstate()
    return found if found.holds(np.array(key, np.uint32), place) else None


@lru_cache(maxsize=2)
def _numpy_twister(generator: Any) -> _Twister | None:
    """One of numpy's generators, where its memory is what we take it for."""
    if type(generator) is not np.random.MT19937:
        return None
    found = _Twister.at(generator.ctypes.state_address, place_first=False)
    state: Any = generator.state["state"]
    return found if found.holds(state["key"], int(state["pos"])) else None
