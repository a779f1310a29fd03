"""Digests of a few samples of each dataset, by which a resume notices that the data has changed.

A sample is a function of (seed, epoch, index), so the same sample has the same digest in every process. Integers, texts
and shapes are digested exactly. Of floating-point numbers and images two means are kept: another processor may compute
the last digits of a resized image in another way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from trainer_cli.core.order import sample_seed
from trainer_cli.data.loader import Loader, SharedLoader
from trainer_cli.data.position import kept_random_state, seed_random
from trainer_cli.data.user_loader import UserLoader

SAMPLES = 8
LIMIT_S = 2.0
"""How long reading samples may take. Those that are not read by then have no digest."""
_TOLERANCE = 1e-3
_MOST_NODES = 10_000
_MOST_NUMBERS, _MOST_PLACES = 2**18, 2**12
"""Of each array: so many numbers count, and the places of so many. The mean of more numbers, each times a factor of its
place, would hardly depend on their places."""
_DEEPEST = 16

FINGERPRINT = "fingerprint"
Digests = dict[str, str]
"""Index of a sample -> its digest; or `fingerprint` -> that of the dataset."""
Found = tuple[str, Digests | None]
"""Name of a loader, and digests of its samples; None takes back those found before."""
Samples = Iterator[tuple[int, list[Any]]]
"""Index of a sample, and what each reading of it gave."""
Reads = Mapping[str, Callable[[], Samples]]
"""Name of a loader -> what reads a few samples of its dataset."""


def sample_digests(loaders: Mapping[str, Any], *, draws: int = 2, limit_s: float = LIMIT_S) -> dict[str, Digests]:
    """Digests of a few samples of each map-style dataset, by the name of its loader.

    An entry is left out of an iterable dataset, of one with a `fingerprint`, of one that gives each rank samples of its
    own, of one that is too slow, and of one of which a sample differs when it is read `draws` times.

    On Linux a forked process reads the samples: so no file that a dataset opens, no number that it draws and no thread
    that it starts is found in this process, or in the workers that it forks later.

    Args:
        limit_s: of all datasets; each may take an equal part of it.
    """
    reads = {name: partial(read, draws) for name, loader in loaders.items() if (read := _reader(loader)) is not None}
    if not reads:
        return {}
    found: dict[str, Digests] = {}
    for name, digests in (_forked if sys.platform == "linux" else _here)(reads, limit_s):
        found[name] = {} if digests is None else found.get(name, {}) | digests
    return {name: digests for name, digests in found.items() if digests}


def other_samples(now: Mapping[str, Mapping[str, str]], before: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The first sample of each dataset that differs, as `sample 3 of train`. Samples that only one has are not
    compared."""
    found = []
    for name, digests in before.items():
        shared = sorted(set(digests) & set(now.get(name, ())), key=lambda index: (len(index), index))
        differing = next((index for index in shared if not _is_same(now[name][index], digests[index])), None)
        if differing is not None:
            found.append(f"{'' if differing == FINGERPRINT else 'sample '}{differing} of {name}")
    return found


def length_of(loader: Any) -> int | None:
    """The number of samples of a loader's dataset; None if it is not known."""
    if isinstance(loader, SharedLoader):
        return length_of(loader.loader)
    if isinstance(loader, Loader):
        return loader.length
    try:
        return len(loader.loader.dataset)
    except (AttributeError, TypeError):
        return None


def _reader(loader: Any) -> Callable[[int], Samples] | None:
    """What reads a few samples; None if the loader has no samples by number, or need not be compared."""
    if isinstance(loader, SharedLoader):
        return _reader(loader.loader)
    if isinstance(loader, Loader):
        source = loader.source
        if loader.fingerprint is not None:
            return None
        own_order = source.own_order is not None
        return partial(_samples, source.dataset, loader.length, loader.seed, source.keys if own_order else None)
    if not isinstance(loader, UserLoader) or not isinstance(loader.loader, DataLoader) or loader.per_rank:
        return None
    dataset: Any = loader.loader.dataset
    by_number = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not by_number or getattr(dataset, "fingerprint", None) is not None:
        return None
    return partial(_samples, dataset, len(dataset), loader.seed, None)


def _samples(
    dataset: Any, length: int, seed: int, keys: Callable[[int, int, int], Sequence[Any]] | None, draws: int
) -> Samples:
    """Samples of epoch 0, spread over the dataset."""
    for index in sorted({number * (length - 1) // (SAMPLES - 1) for number in range(SAMPLES)} if length else ()):
        key = index if keys is None else keys(0, index, index + 1)[0]
        samples = []
        for _ in range(draws):
            seed_random(sample_seed(seed, 0, index))
            samples.append(dataset[key])
        yield index, samples


def _here(reads: Reads, limit_s: float) -> Iterator[Found]:
    with kept_random_state():
        yield from _digests_of(reads, limit_s)


def _forked(reads: Reads, limit_s: float) -> Iterator[Found]:
    context: Any = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(reads, sender, limit_s), daemon=True)
    with warnings.catch_warnings():
        # Of a fork with threads: the process calls datasets alone, as a worker does.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    until = time.monotonic() + limit_s
    with receiver, suppress(EOFError):
        while receiver.poll(max(0.0, until - time.monotonic())):
            yield receiver.recv()
    process.kill()
    process.join()
    process.close()


def _send(reads: Reads, sender: Any, limit_s: float) -> None:
    """Send the digests, in the forked process."""
    # It ends soon, also if the parent is killed meanwhile, whose locks it holds.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(limit_s) + 1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    # The threads of the parent's OpenMP are not there.
    torch.set_num_threads(1)
    try:
        for digests in _digests_of(reads, limit_s):
            sender.send(digests)
    finally:
        os._exit(0)


def _digests_of(reads: Reads, limit_s: float) -> Iterator[Found]:
    """The digest of each sample; None takes back those of a dataset of which a sample differs when it is read again. An
    error of a dataset ends its samples: the training reports it."""
    for name, read in reads.items():
        until = time.monotonic() + limit_s / len(reads)
        with suppress(Exception):
            for index, samples in read():
                digest, *again = map(digest_of, samples)
                if not all(_is_same(digest, other) for other in again):
                    yield name, None
                    break
                yield name, {str(index): digest}
                if time.monotonic() > until:
                    break


def digest_of(sample: Any) -> str:
    """The digest of a sample: what is exact of it, and the means of each array of numbers that are not."""
    exact = hashlib.sha256()
    means: list[str] = []
    _feed(sample, exact.update, means, [_MOST_NODES], 0)
    return " ".join([exact.hexdigest()[:16], *means])


def _feed(value: Any, update: Callable[[bytes], object], means: list[str], left: list[int], depth: int) -> None:
    """Add a value to the digest. What is not known counts by its class alone, as its text may hold an address."""
    left[0] -= 1
    if left[0] < 0 or depth > _DEEPEST:
        return
    update(f"<{type(value).__name__}>".encode())

    def feed(part: Any) -> None:
        _feed(part, update, means, left, depth + 1)

    if isinstance(value, Enum):
        update(value.name.encode())
    elif value is None or isinstance(value, bool | int | bytes | bytearray):
        update(repr(value).encode() if not isinstance(value, bytes | bytearray) else bytes(value))
    elif isinstance(value, str):
        # The folder of a file may be another on another machine.
        update(os.path.basename(value).encode(errors="replace") if os.path.isabs(value) else value.encode())
    elif isinstance(value, os.PathLike):
        update(os.path.basename(os.fspath(value)).encode(errors="replace"))
    elif isinstance(value, float | complex):
        _feed_array(np.asarray(value), update, means)
    elif isinstance(value, torch.Tensor):
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        if value.layout is torch.strided and not value.is_meta:
            plain = value.detach().cpu().resolve_conj().resolve_neg()
            wide = plain.float() if plain.dtype.is_floating_point and plain.dtype.itemsize < 4 else plain
            _feed_array(wide.numpy(), update, means)
    elif isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array_interface__"):
        _feed_array(np.asarray(value), update, means)
    elif isinstance(value, Mapping):
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            update(str(key).encode())
            feed(item)
    elif isinstance(value, set | frozenset):
        update(repr(sorted(map(digest_of, value))).encode())
    elif isinstance(value, Sequence):
        update(str(len(value)).encode())
        for item in value:
            feed(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            feed(getattr(value, field.name))


def _feed_array(array: NDArray[Any], update: Callable[[bytes], object], means: list[str]) -> None:
    update(f"{array.dtype.str} {array.shape}".encode())
    flat = array.reshape(-1)
    flat = flat[:: max(1, len(flat) // _MOST_NUMBERS)]
    kind = flat.dtype.kind
    if kind == "O":
        update(str([type(item).__name__ for item in flat[:100]]).encode())
    elif kind in "fc" or (flat.dtype == np.uint8 and array.ndim > 1):
        plain = np.abs(flat) if kind == "c" else flat
        numbers = plain.astype(np.float64)
        finite = np.isfinite(numbers)
        update(np.packbits(finite).tobytes() if not finite.all() else b"finite")
        numbers = np.where(finite, numbers, 0.0)
        few = numbers[:: max(1, len(numbers) // _MOST_PLACES)]
        factors = np.arange(len(few), dtype=np.uint64) * 2654435761 % 65536 / 32768 - 1
        means += [f"{mean:.6e}" for mean in ((np.abs(numbers).mean(), (few * factors).mean()) if len(few) else (0, 0))]
    else:
        update(np.ascontiguousarray(flat).tobytes())


def _is_same(one: str, other: str) -> bool:
    """Whether digests are equal, the means in them but for the last digits."""
    if one == other:
        return True
    (exact, *means), (other_exact, *other_means) = one.split(" "), other.split(" ")
    if exact != other_exact or len(means) != len(other_means):
        return False
    try:
        numbers, other_numbers = [*map(float, means)], [*map(float, other_means)]
    except ValueError:
        return False
    pairs = zip(numbers[::2], numbers[1::2], other_numbers[::2], other_numbers[1::2], strict=True)
    # A sign says much, and both means are smaller than the numbers: so the first one is the measure.
    return all(
        max(abs(size - other_size), abs(place - other_place)) <= _TOLERANCE * max(size, other_size)
        for size, place, other_size, other_place in pairs
    )
