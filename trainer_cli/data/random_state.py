"""Seed, save, compare and restore the generators that data may draw from: python's, numpy's and torch's CPU generator.

Python and numpy return a state as objects, which takes 10 and 30 µs. So their states are compared as memory, and read
again only after that has changed.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

seed_torch = torch.default_generator.manual_seed
"""Seed torch's CPU generator. torch.manual_seed also seeds every accelerator, which takes a hundred times as long."""
KnownState = tuple[Any, Any]
"""A state of python's or numpy's generator: its memory when it was read, and the state as an object."""
_python: Any = random._inst
"""The generator of the functions of `random`."""
_numpy: Any = np.random.mtrand._rand
"""The generator of the functions of `numpy.random`."""
_get_twister: Any = np.random.__dict__["get_bit_generator"]
_HEADER_BYTES = object.__basicsize__
_TWISTER_BYTES = 625 * 4
"""Size of the state of MT19937: 624 words, and the number of those that were used."""


def seed_random(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generator with a seed of 64 bits. Numpy's takes the lower half."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


class RandomState(NamedTuple):
    """The states of torch's CPU generator, and of python's and numpy's."""

    torch: torch.Tensor
    python: KnownState
    numpy: KnownState


def random_state() -> RandomState:
    """The current states of the generators."""
    return RandomState(torch.default_generator.get_state(), _PYTHON.state(), _NUMPY.state())


def is_random_state(state: RandomState) -> bool:
    """Whether the generators are in this state, so that no number was drawn since."""
    torch_state = torch.default_generator.get_state()
    return is_random_state_without_torch(state) and _bytes_of(torch_state) == _bytes_of(state.torch)


def is_random_state_without_torch(state: RandomState) -> bool:
    """Whether python's and numpy's generator are in this state."""
    return _PYTHON.is_at(state.python) and _NUMPY.is_at(state.numpy)


def restore_random_state(state: RandomState) -> None:
    """Set the generators to this state."""
    torch.default_generator.set_state(state.torch)
    _PYTHON.restore(state.python)
    _NUMPY.restore(state.numpy)


@contextmanager
def kept_random_state() -> Generator[RandomState, None, None]:
    """Restore the CPU generators of python, numpy and torch after the block. Yields their states before it."""
    state = random_state()
    try:
        yield state
    finally:
        restore_random_state(state)


class _SlowState:
    """The state of a generator whose `read` and `write` take long.

    Args:
        memory: returns a value that differs whenever the state does; None: there is no such value.
    """

    def __init__(self, memory: Callable[[], Any], read: Callable[[], Any], write: Callable[[KnownState], None]) -> None:
        self._memory, self._read, self._write = memory, read, write
        self._last: KnownState = (None, None)

    def state(self) -> KnownState:
        """The current (memory, state)."""
        memory = self._memory()
        if memory is None or memory != self._last[0]:
            self._last = memory, self._read()
        return self._last

    def is_at(self, saved: KnownState) -> bool:
        """Whether the generator is in this state."""
        memory = self._memory()
        return _is_equal(self._read(), saved[1]) if memory is None else bool(memory == saved[0])

    def restore(self, saved: KnownState) -> None:
        """Set the generator to this state, unless it is in it."""
        if not self.is_at(saved):
            self._write(saved)


def _fields_of(instance: Any) -> Any:
    """A view of the memory of an object of an extension type, without its reference count. `raw` copies it."""
    size = type(instance).__basicsize__ - _HEADER_BYTES
    return (ctypes.c_char * size).from_address(id(instance) + _HEADER_BYTES)


def _words_of(twister: Any) -> Any:
    """A view of the state of an MT19937."""
    return (ctypes.c_char * _TWISTER_BYTES).from_address(twister.ctypes.state_address)


# Read through views that exist: to make one takes as long as to copy the memory.
_python_fields, _numpy_fields = _fields_of(_python), _fields_of(_numpy)
_numpy_words: KnownState = (None, None)
"""Numpy's current MT19937, and the view of its state."""


def _python_memory() -> Any:
    """A value that differs whenever the state of python's generator does; None if it is not known how."""
    # random.gauss keeps every second number in this attribute, and draws none when it returns that.
    return (_python_fields.raw, _python.gauss_next) if _has_known_memory() else None


def _numpy_memory() -> Any:
    """A value that differs whenever the state of numpy's generator does; None for another kind of generator."""
    global _numpy_words
    twister = _get_twister()
    if twister is not _numpy_words[0]:
        # The user may have set a generator of another kind.
        if type(twister) is not np.random.MT19937 or not _has_known_memory():
            return None
        _numpy_words = twister, _words_of(twister)
    # The second of each pair of normal numbers is kept in the object, and the words in its generator.
    return _numpy_fields.raw, _numpy_words[1].raw


def _write_python(saved: KnownState) -> None:
    """Set python's generator to a saved (memory, state)."""
    _, state = saved
    random.setstate(state)


def _write_numpy(saved: KnownState) -> None:
    """Set numpy's generator to a saved (memory, state)."""
    memory, state = saved
    if memory is not None and memory[0] == _numpy_fields.raw:
        # The same generator, of which only the words differ. set_state takes 35 µs.
        twister: Any = _get_twister()
        with twister.lock:
            ctypes.memmove(twister.ctypes.state_address, memory[1], _TWISTER_BYTES)
    else:
        np.random.set_state(state)


_PYTHON = _SlowState(_python_memory, random.getstate, _write_python)
# Not the legacy form of the state, which exists for Mersenne twisters alone.
_NUMPY = _SlowState(_numpy_memory, partial(np.random.get_state, legacy=False), _write_numpy)


@cache
def _has_known_memory() -> bool:
    """Whether states can be compared as memory: every kind of draw changes it, in generators made for this test."""
    if sys.implementation.name != "cpython":
        return False
    python, numpy = random.Random(0), np.random.RandomState(0)
    python_fields, numpy_fields, words = _fields_of(python), _fields_of(numpy), _words_of(numpy._bit_generator)

    def fill(draw: Callable[[], Any]) -> Callable[[], Any]:
        """A function that draws the words of a whole state."""
        # As many draws as there are words, so that the count of used ones is as before.
        return lambda: [draw() for _ in range(624)]

    python_draws = [lambda: python.getrandbits(32), fill(lambda: python.getrandbits(32))]
    numpy_draws = [lambda: numpy.bytes(4), fill(lambda: numpy.bytes(4))]
    return (
        all(_changes(python_fields, draw) for draw in python_draws)
        and all(_changes(words, draw) for draw in numpy_draws)
        # The first call draws a pair, and the second returns its other half.
        and all(_changes(numpy_fields, numpy.standard_normal) for _ in range(2))
    )


def _changes(memory: Any, draw: Callable[[], Any]) -> bool:
    """Whether a draw changes the memory of a generator, which is the same in two readings before it."""
    before = memory.raw
    is_stable = memory.raw == before
    draw()
    return is_stable and bool(memory.raw != before)


def _bytes_of(state: torch.Tensor) -> bytes:
    """The bytes of a tensor, whose comparison takes a quarter of the time of torch.equal."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _is_equal(state: Any, other: Any) -> bool:
    """Whether two states are equal. States of numpy are mappings with arrays, whose keys depend on the generator."""
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in state.items())
    return bool(np.array_equal(state, other)) if isinstance(state, np.ndarray) else bool(state == other)
