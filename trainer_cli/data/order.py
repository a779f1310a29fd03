"""The order of samples and the seed of each one, as pure functions of (seed, epoch, index).

There is no state: any position of any epoch costs the same, so a resume at any sample is exact and immediate, with any
number of workers or ranks. The order is a keyed permutation: a Feistel network over a grid just larger than the length,
applied until the result lies within the length (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
Seeds are a SplitMix64 stream keyed by (seed, epoch).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from math import isqrt

from trainer_cli.terminal import format_count

ORDER_VERSION = "feistel-1"
"""Changes when the same (seed, epoch, position, length) would give another index or seed."""

_ROUNDS = 4
# Below this length the halves are so short that it takes twice the rounds to mix them.
_SMALL = 1024
_64_BITS = 0xFFFFFFFFFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def sample_indices(seed: int, epoch: int, start: int, stop: int, length: int) -> list[int]:
    """The indices at positions `start` to `stop` of the shuffled order; over a whole epoch each appears once.

    Raises:
        IndexError: a position is not within the length.
    """
    if not 0 <= start <= stop <= length:
        raise IndexError(f"positions {start} to {stop} do not lie within {format_count(length, 'sample')}")
    rows, columns = grid_of(length)
    keys = round_keys(seed, epoch, length)
    indices = []
    for position in range(start, stop):
        index = position
        # The grid has cells beyond the length. A permutation repeated from such a cell always comes back inside.
        while True:
            column, row = divmod(index, rows)
            # Written out, not in a function: this is called for every sample.
            for row_key, column_key in keys:
                mixed = ((column + row_key) * MIX_1) & _64_BITS
                row = (row + (((mixed ^ (mixed >> 32)) * MIX_2 & _64_BITS) >> 24)) % rows
                mixed = ((row + column_key) * MIX_1) & _64_BITS
                column = (column + (((mixed ^ (mixed >> 32)) * MIX_2 & _64_BITS) >> 24)) % columns
            index = column * rows + row
            if index < length:
                break
        indices.append(index)
    return indices


def sample_position(seed: int, epoch: int, index: int, length: int) -> int:
    """The position of an index in the shuffled order: the inverse of `sample_indices`.

    Raises:
        IndexError: the index is not within the length.
    """
    if not 0 <= index < length:
        raise IndexError(f"{index} is not one of {format_count(length, 'sample')}")
    rows, columns = grid_of(length)
    keys = round_keys(seed, epoch, length)
    position = index
    while True:
        column, row = divmod(position, rows)
        for row_key, column_key in reversed(keys):
            column = (column - _mixed(row + column_key)) % columns
            row = (row - _mixed(column + row_key)) % rows
        position = column * rows + row
        if position < length:
            return position


def _mixed(value: int) -> int:
    """The function of a round, with its key added to the value; written out in `sample_indices`."""
    mixed = (value * MIX_1) & _64_BITS
    return ((mixed ^ (mixed >> 32)) * MIX_2 & _64_BITS) >> 24


def grid_of(length: int) -> tuple[int, int]:
    """The (rows, columns) of the grid over which `length` samples are permuted."""
    rows = isqrt(max(length - 1, 0)) + 1
    # Fewer than `rows` cells of the grid lie beyond the length, so a repetition is rare.
    return rows, -(-length // rows)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """The 64-bit seed of one sample's random numbers: within an epoch no two samples share one."""
    return sample_seeds(seed, epoch, (index,))[0]


def sample_seeds(seed: int, epoch: int, indices: Iterable[int]) -> list[int]:
    """The seeds of these samples, in their order."""
    key = sample_key(seed, epoch)
    seeds = []
    for index in indices:
        mixed = (key + index * GOLDEN) & _64_BITS
        mixed = ((mixed ^ (mixed >> 30)) * MIX_1) & _64_BITS
        mixed = ((mixed ^ (mixed >> 27)) * MIX_2) & _64_BITS
        seeds.append(mixed ^ (mixed >> 31))
    return seeds


# Cached: loaders ask for each batch, and several of them alternate.
@lru_cache(maxsize=16)
def round_keys(seed: int, epoch: int, length: int) -> tuple[tuple[int, int], ...]:
    """The keys (for rows, for columns) of each round of the permutation."""
    rounds = _ROUNDS if length >= _SMALL else 2 * _ROUNDS
    words = _words(b"order left", seed, epoch), _words(b"order right", seed, epoch)
    return tuple(zip(*words, strict=True))[:rounds]


@lru_cache(maxsize=16)
def sample_key(seed: int, epoch: int) -> int:
    """The key of the seeds of an epoch."""
    return _words(b"sample", seed, epoch)[0]


def _words(purpose: bytes, seed: int, epoch: int) -> tuple[int, ...]:
    """Eight independent 64-bit keys. Seeds and epochs count modulo 2**64."""
    message = struct.pack("<QQ", seed & _64_BITS, epoch & _64_BITS)
    # `person` keeps the keys of order and seeds apart for one (seed, epoch).
    return struct.unpack("<8Q", blake2b(message, person=purpose).digest())
