"""Compute digests of a few samples of each dataset, by which a resume detects that the data has changed.

A sample is a function of (seed, epoch, index), so it has the same digest in every process. Integers, strings and shapes
are digested exactly. Floating-point numbers and images are represented by two means, because another processor may
compute other last digits of a resized image.
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

from trainer_cli.data.loader import Loader, SharedLoader
from trainer_cli.data.order import sample_seed
from trainer_cli.data.random_state import kept_random_state, seed_random
from trainer_cli.data.user_loader import UserLoader

SAMPLES = 8
LIMIT_S = 2.0
"""Time limit for reading samples. Samples that are not read by then have no digest."""
_TOLERANCE = 1e-3
_MAX_VALUES = 10_000
_MAX_NUMBERS, _MAX_PLACES = 2**18, 2**12
"""Maximal count of numbers of an array in the first mean, and in the second, which also depends on their positions. A
mean of more numbers, each times a factor of its position, would hardly depend on their positions."""
_MAX_DEPTH = 16

_FINGERPRINT = "fingerprint"
Digests = dict[str, str]
"""Index of a sample -> its digest; or `fingerprint` -> that of the dataset."""
LoaderDigests = tuple[str, Digests | None]
"""(name of a loader, digests of its samples). None withdraws its earlier digests."""
Samples = Iterator[tuple[int, list[Any]]]
"""(index of a sample, the sample as read each time)."""
Readers = Mapping[str, Callable[[], Samples]]
"""Name of a loader -> function that reads a few samples of its dataset."""


def sample_digests(loaders: Mapping[str, Any], *, draws: int = 2, limit_s: float = LIMIT_S) -> dict[str, Digests]:
    """Digests of a few samples of each map-style dataset, by the name of its loader.

    A dataset with a `fingerprint` has that alone; the training data, called `train`, has no entry then, because the
    state of its loader has it. Nor is there one for an iterable dataset, for one with different samples on each rank,
    for one that is too slow, and for one with a sample that differs when it is read `draws` times.

    On Linux a forked process reads the samples. So files that a dataset opens, random numbers that it draws and threads
    that it starts do not affect this process, or workers that it forks later.

    Args:
        limit_s: time limit for all datasets together; each may take an equal share.
    """
    readers = {}
    for name, loader in loaders.items():
        if (read := _reader(loader)) is not None:
            readers[name] = partial(read, draws)
    results: dict[str, Digests] = {}
    read_all = _read_in_fork if sys.platform == "linux" else _read_here
    for name, digests in read_all(readers, limit_s) if readers else ():
        results[name] = {} if digests is None else results.get(name, {}) | digests
    for name, loader in loaders.items():
        if name != "train" and isinstance(text := getattr(loader, "fingerprint", None), str):
            results[name] = {_FINGERPRINT: text}
    return {name: digests for name, digests in results.items() if digests}


def other_samples(present: Mapping[str, Mapping[str, str]], saved: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The first differing sample of each dataset, as `sample 3 of train`. Only common samples are compared."""
    differences = []
    for name, digests in saved.items():
        # By length first: the indices are texts of numbers.
        shared = sorted(set(digests) & set(present.get(name, ())), key=lambda index: (len(index), index))
        differing = next((index for index in shared if not _is_same(present[name][index], digests[index])), None)
        if differing is not None:
            differences.append(f"{'' if differing == _FINGERPRINT else 'sample '}{differing} of {name}")
    return differences


def _reader(loader: Any) -> Callable[[int], Samples] | None:
    """A function of `draws` that reads a few samples; None if samples have no numbers, or need not be compared."""
    if isinstance(loader, SharedLoader):
        return _reader(loader.loader)
    if isinstance(loader, Loader):
        source = loader.source
        if loader.fingerprint is not None:
            return None
        keys = None if source.own_order is None else partial(source.own_order, source.seed)
        return partial(_read_samples, source.dataset, loader.length, loader.seed, keys)
    if not isinstance(loader, UserLoader) or not isinstance(loader.loader, DataLoader) or loader.per_rank:
        return None
    dataset: Any = loader.loader.dataset
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    has_fingerprint = getattr(dataset, "fingerprint", None) is not None
    if isinstance(dataset, IterableDataset) or not is_indexed or has_fingerprint:
        return None
    return partial(_read_samples, dataset, len(dataset), loader.seed, None)


def _read_samples(
    dataset: Any, length: int, seed: int, keys: Callable[[int, int, int], Sequence[Any]] | None, draws: int
) -> Samples:
    """Read samples of epoch 0, spread evenly over the dataset."""
    for index in sorted({number * (length - 1) // (SAMPLES - 1) for number in range(SAMPLES)} if length else ()):
        key = index if keys is None else keys(0, index, index + 1)[0]
        samples = []
        for _ in range(draws):
            seed_random(sample_seed(seed, 0, index))
            samples.append(dataset[key])
        yield index, samples


def _read_here(readers: Readers, limit_s: float) -> Iterator[LoaderDigests]:
    """Yield the digests, read in this process."""
    with kept_random_state():
        yield from _digests_of(readers, limit_s)


def _read_in_fork(readers: Readers, limit_s: float) -> Iterator[LoaderDigests]:
    """Yield the digests, read in a forked process, which is killed at the end of the time limit."""
    context: Any = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(readers, sender, limit_s), daemon=True)
    with warnings.catch_warnings():
        # Python warns of a fork with threads. This process only calls datasets, as a worker does.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    # Otherwise the receiver would never see the end, because this process has the pipe open.
    sender.close()
    until = time.monotonic() + limit_s
    with receiver, suppress(EOFError):
        while receiver.poll(max(0.0, until - time.monotonic())):
            yield receiver.recv()
    # Killed, not ended: it may be stuck in a dataset.
    process.kill()
    process.join()
    process.close()


def _send(readers: Readers, sender: Any, limit_s: float) -> None:
    """Send the digests. Runs in the forked process."""
    # It ends soon even if the parent is killed, because it has inherited the parent's file locks.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(limit_s) + 1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    # What a dataset prints here would be printed again by the training.
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    # The threads of the parent's OpenMP do not exist after a fork.
    torch.set_num_threads(1)
    try:
        for digests in _digests_of(readers, limit_s):
            sender.send(digests)
    finally:
        # Not sys.exit, which would run the handlers of the parent, such as the end of its workers.
        os._exit(0)


def _digests_of(readers: Readers, limit_s: float) -> Iterator[LoaderDigests]:
    """Yield the digest of each sample. None withdraws those of a dataset with a sample that differs when read again."""
    for name, read in readers.items():
        until = time.monotonic() + limit_s / len(readers)
        # An error of a dataset ends its samples. The training will report it.
        with suppress(Exception):
            for index, samples in read():
                digest, *repeated = map(digest_of, samples)
                if not all(_is_same(digest, other) for other in repeated):
                    yield name, None
                    break
                yield name, {str(index): digest}
                if time.monotonic() > until:
                    break


def digest_of(sample: Any) -> str:
    """The digest of a sample: a hash of its exact values, and two means of each array of floating-point numbers."""
    exact = hashlib.sha256()
    means: list[str] = []
    _feed(sample, exact.update, means, [_MAX_VALUES], 0)
    return " ".join([exact.hexdigest()[:16], *means])


def _feed(value: Any, update: Callable[[bytes], object], means: list[str], budget: list[int], depth: int) -> None:
    """Add a value to the digest. An unknown object counts by its class alone, because its text may hold an address.

    Args:
        update: adds bytes to the hash of exact values.
        means: gets the means of arrays of floating-point numbers.
        budget: number of values that may still be added, in a list of one, which is counted down.
        depth: number of containers around the value.
    """
    budget[0] -= 1
    if budget[0] < 0 or depth > _MAX_DEPTH:
        return
    update(f"<{type(value).__name__}>".encode())

    def feed(inner: Any) -> None:
        _feed(inner, update, means, budget, depth + 1)

    if isinstance(value, Enum):
        update(value.name.encode())
    elif value is None or isinstance(value, bool | int | bytes | bytearray):
        update(repr(value).encode() if not isinstance(value, bytes | bytearray) else bytes(value))
    elif isinstance(value, str):
        # The folder of a file may differ between machines.
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
        # Sorted by text, because keys of different types cannot be compared.
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            update(str(key).encode())
            feed(item)
    elif isinstance(value, set | frozenset):
        # By digests: the order of a set of strings differs from process to process.
        update(repr(sorted(map(digest_of, value))).encode())
    elif isinstance(value, Sequence):
        update(str(len(value)).encode())
        for item in value:
            feed(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            feed(getattr(value, field.name))


def _feed_array(array: NDArray[Any], update: Callable[[bytes], object], means: list[str]) -> None:
    """Add an array to the digest: floating-point numbers and images by two means, others exactly; see `_feed`."""
    update(f"{array.dtype.str} {array.shape}".encode())
    flat = array.reshape(-1)
    flat = flat[:: max(1, len(flat) // _MAX_NUMBERS)]
    kind = flat.dtype.kind
    if kind == "O":
        update(str([type(item).__name__ for item in flat[:100]]).encode())
    # Bytes in two or more dimensions are taken for an image.
    elif kind in "fc" or (flat.dtype == np.uint8 and array.ndim > 1):
        plain = np.abs(flat) if kind == "c" else flat
        # In 64 bits, so that the means do not depend on how a machine sums smaller floats.
        numbers = plain.astype(np.float64)
        finite = np.isfinite(numbers)
        update(np.packbits(finite).tobytes() if not finite.all() else b"finite")
        numbers = np.where(finite, numbers, 0.0)
        few = numbers[:: max(1, len(numbers) // _MAX_PLACES)]
        # A fixed factor of each position, from -1 to 1, so that the second mean depends on the order.
        factors = np.arange(len(few), dtype=np.uint64) * 2654435761 % 65536 / 32768 - 1
        both_means = (np.abs(numbers).mean(), (few * factors).mean()) if len(few) else (0, 0)
        means += [f"{mean:.6e}" for mean in both_means]
    else:
        update(np.ascontiguousarray(flat).tobytes())


def _is_same(first: str, second: str) -> bool:
    """Whether digests are equal, apart from the last digits of their means."""
    if first == second:
        return True
    (exact, *means), (other_exact, *other_means) = first.split(" "), second.split(" ")
    if exact != other_exact or len(means) != len(other_means):
        return False
    try:
        numbers, other_numbers = [*map(float, means)], [*map(float, other_means)]
    except ValueError:
        return False
    pairs = zip(numbers[::2], numbers[1::2], other_numbers[::2], other_numbers[1::2], strict=True)
    # Relative to the mean of absolute values: the other mean may be near 0, because it has factors of both signs.
    return all(
        max(abs(size - other_size), abs(position - other_position)) <= _TOLERANCE * max(size, other_size)
        for size, position, other_size, other_position in pairs
    )
