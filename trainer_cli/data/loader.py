"""Batches in an order that can be resumed at any sample, from this process or from workers.

`Loader` owns the order and the random numbers of each sample, so its resume is exact. `ForeignLoader` makes
the best of a loader that the user brings. Both leave the random state of the training alone.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainer_cli.data.order import ORDER_VERSION, sample_indices, sample_seed
from trainer_cli.data.workers import blocked_signals, worker_batches
from trainer_cli.errors import UserError

STATE_VERSION = 1


class MapDataset(Protocol):
    """Anything with a length and samples by number.

    It may also have `deterministic = True` (its samples use no random numbers, so none are seeded),
    `fingerprint` (a digest of its content, checked at a resume) and `__getitems__` (samples by a list of
    numbers, used where it is deterministic).
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Loader:
    """Batches of a map-style dataset; which samples, in what order and with what randomness is a pure
    function of (seed, epoch), the same with any number of workers and from any sample on.

    Before each `dataset[index]` python's, numpy's and torch's CPU generators are seeded from (seed, epoch,
    index); `collate_fn` goes on with what the last sample left. In this process their states are put back
    after each batch.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int = 32,
        *,
        shuffle: bool,
        seed: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        limit_batches: int | float | None = None,
        pin_memory: bool = False,
    ) -> None:
        _check_counts(batch_size=batch_size, num_workers=num_workers)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self.length = len(dataset)
        self.fingerprint: str | None = getattr(dataset, "fingerprint", None)
        self.source = KeyedSource(dataset, seed, collate_fn)
        whole = self.length // batch_size if drop_last else -(-self.length // batch_size)
        if whole == 0:
            raise UserError(
                f"there are {self.length} samples, not enough for one batch of {batch_size}",
                where="data",
                cure="Use a smaller batch_size." if self.length else None,
            )
        self._batches = _limited(whole, limit_batches)

    def __len__(self) -> int:
        """Batches of an epoch, after `limit_batches`."""
        return self._batches

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Any, None, None]:
        """The batches of an epoch after its first `samples` samples. `batch` is not needed here.

        Closing the iterator ends its workers.
        """
        if samples < 0:
            raise ValueError(f"an epoch cannot be entered {-samples} samples before its start")
        if self.num_workers == 0:
            return self._here(epoch, samples)
        return worker_batches(
            self.source,
            ((epoch, indices) for indices in self._index_batches(epoch, samples)),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            seed=sample_seed(self.seed, epoch, self.length),
        )

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """Where the data stands, and of which data and order that is a position."""
        return {
            "version": STATE_VERSION,
            "order": ORDER_VERSION if self.shuffle else "sequential",
            "seed": self.seed,
            "epoch": epoch,
            "sample_offset": samples,
            "length": self.length,
            "fingerprint": self.fingerprint,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a position in other data or another order. The batch size may differ.

        Raises:
            UserError: naming everything that differs.
        """
        _check_same(self.state_dict(0), state, ("version", "order", "seed", "length", "fingerprint"))

    def _here(self, epoch: int, samples: int) -> Generator[Any, None, None]:
        for indices in self._index_batches(epoch, samples):
            if self.source.draws:
                with kept_random_state():
                    batch = self.source.fetch(epoch, indices)
            else:
                batch = self.source.fetch(epoch, indices)
            yield _pinned(batch) if self.pin_memory else batch

    def _index_batches(self, epoch: int, samples: int) -> Iterator[Sequence[int]]:
        end = min(self.length, self._batches * self.batch_size)
        for start in range(samples, end, self.batch_size):
            stop = min(start + self.batch_size, end)
            if self.drop_last and stop - start < self.batch_size:
                return
            if self.shuffle:
                yield sample_indices(self.seed, epoch, start, stop, self.length)
            else:
                yield range(start, stop)


class KeyedSource:
    """Makes one batch of a dataset from its key, the same wherever it runs. Workers get a copy."""

    def __init__(self, dataset: MapDataset, seed: int, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate_fn or default_collate
        self.deterministic = bool(getattr(dataset, "deterministic", False))
        self.draws = not self.deterministic or collate_fn is not None
        self.many = getattr(dataset, "__getitems__", None) if self.deterministic else None

    def __getitem__(self, key: tuple[int, Sequence[int]]) -> Any:
        return self.fetch(*key)

    def fetch(self, epoch: int, indices: Sequence[int]) -> Any:
        """The batch of these samples. An error of the dataset keeps its type and says which sample it was."""
        if self.many is not None:
            try:
                samples = self.many(indices)
            except Exception as error:
                error.add_note(f"while loading samples {list(indices)} of epoch {epoch}")
                raise
        else:
            samples = []
            for index in indices:
                if not self.deterministic:
                    seed_random(sample_seed(self.seed, epoch, index))
                try:
                    samples.append(self.dataset[index])
                except Exception as error:
                    error.add_note(f"while loading sample {index} of epoch {epoch}")
                    raise
        if self.deterministic and self.draws:
            seed_random(sample_seed(self.seed, epoch, indices[0]))
        try:
            return self.collate(samples)
        except Exception as error:
            error.add_note(f"while collating samples {list(indices)} of epoch {epoch}")
            raise


class ForeignLoader:
    """A loader that the user made: a DataLoader, or anything that can be iterated once an epoch.

    Before `iter()` and before each batch the random generators are seeded from (seed, epoch, batch), and put
    back afterwards. A resume replays and drops the batches already seen, unless the loader can save and load
    its own position with `state_dict` and `load_state_dict`.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int, limit_batches: int | float | None = None) -> None:
        if isinstance(loader, Iterator):
            raise UserError(
                f"{_name(loader)} can be iterated only once, but every epoch and resume starts it again",
                where="data",
                cure="Give an object whose __iter__ starts anew, such as a DataLoader or a list.",
            )
        self.loader = loader
        self.seed = seed
        self.limit_batches = limit_batches
        self.fingerprint: str | None = getattr(loader, "fingerprint", None)
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._position: tuple[int, int, Any] | None = None
        if isinstance(limit_batches, float):
            try:
                len(self)
            except TypeError:
                raise UserError(
                    f"a fraction of {_name(loader)} cannot be told, since it has no length",
                    where="loop.limit_train_batches",
                    cure="Give a number of batches.",
                ) from None
        else:
            _limited(1, limit_batches)

    @property
    def promise(self) -> str:
        """What its resume can promise, in a sentence."""
        if self.stateful:
            return (
                f"{_name(self.loader)} saves and loads its own position, so a resume goes on where "
                "it says it stood; it is exact if the loader's own state is."
            )
        return (
            f"{_name(self.loader)} has no position of its own, so a resume replays the batches of the "
            "epoch that were already seen and drops them; it is exact if the loader gives the same batches each "
            "time it is started with the same random seeds, and has no memory of earlier epochs."
        )

    def __len__(self) -> int:
        """Batches of an epoch. TypeError where the loader cannot tell."""
        return _limited(len(cast(Any, self.loader)), self.limit_batches)

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Any, None, None]:
        """The batches of an epoch after its first `batch` batches. `samples` is not needed here."""
        if batch < 0:
            raise ValueError(f"an epoch cannot be entered {-batch} batches before its start")
        position, self._position = self._position, None
        skip = batch
        if position is not None and position[:2] == (epoch, batch):
            cast(Any, self.loader).load_state_dict(position[2])
            skip = 0
        return self._batches(epoch, batch - skip, skip)

    def _batches(self, epoch: int, first: int, skip: int) -> Generator[Any, None, None]:
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        limit = self.limit_batches
        end = len(self) if isinstance(limit, float) else limit
        # Workers born here keep these signals blocked: they are for this process.
        with kept_random_state(), blocked_signals(signal.SIGINT, signal.SIGUSR1):
            seed_random(sample_seed(self.seed, epoch, 0))
            iterator = iter(self.loader)
        number = first
        while end is None or number < end:
            with kept_random_state():
                seed_random(sample_seed(self.seed, epoch, number + 1))
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            number += 1
            if number > first + skip:
                yield batch

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """Where the data stands; with the loader's own state if it has one."""
        return {
            "version": STATE_VERSION,
            "order": "stateful" if self.stateful else "replay",
            "seed": self.seed,
            "epoch": epoch,
            "batch": batch,
            "fingerprint": self.fingerprint,
            "loader": cast(Any, self.loader).state_dict() if self.stateful else None,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a position in other data; of a loader with its own state, keep it for the next `iterate`.

        Raises:
            UserError: naming everything that differs.
        """
        _check_same(self.state_dict(0), state, ("version", "order", "seed", "fingerprint"))
        if self.stateful:
            self._position = (state["epoch"], state["batch"], state["loader"])


def as_loader(
    data: Any,
    *,
    shuffle: bool,
    seed: int,
    batch_size: int | None = None,
    num_workers: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    limit_batches: int | float | None = None,
    pin_memory: bool = False,
    where: str = "data",
) -> Loader | ForeignLoader:
    """The right loader for what the user's data object holds.

    A dataset becomes a `Loader` (batches of 32 unless said otherwise), an IterableDataset a DataLoader in a
    `ForeignLoader`, any other iterable a `ForeignLoader` as it is.

    Raises:
        UserError: for an object that is neither, and for settings that a ready-made loader cannot heed.
    """
    if isinstance(data, Loader | ForeignLoader):
        return data
    if isinstance(data, IterableDataset):
        _check_counts(batch_size=batch_size or 32, num_workers=num_workers or 0)
        loader: Iterable[Any] = DataLoader(
            data,
            batch_size or 32,
            num_workers=num_workers or 0,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=pin_memory,
        )
        return ForeignLoader(loader, seed=seed, limit_batches=limit_batches)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, DataLoader):
        return Loader(
            data,
            32 if batch_size is None else batch_size,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers or 0,
            collate_fn=collate_fn,
            drop_last=drop_last,
            limit_batches=limit_batches,
            pin_memory=pin_memory,
        )
    if not hasattr(data, "__iter__"):
        raise UserError(
            f"{_name(data)} is neither a dataset nor a loader",
            where=where,
            cure="A dataset has __len__ and __getitem__, a loader __iter__.",
        )
    settings = {"batch_size": batch_size, "num_workers": num_workers, "collate_fn": collate_fn}
    if unheeded := [name for name, value in settings.items() if value is not None]:
        raise UserError(
            f"{_name(data)} makes its own batches, so {' and '.join(unheeded)} would have no effect",
            where=where,
            cure="Remove it, or give the dataset instead of a loader.",
        )
    return ForeignLoader(data, seed=seed, limit_batches=limit_batches)


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


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]


def _check_counts(*, batch_size: int, num_workers: int) -> None:
    for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(
                f"data.{name} is {value!r}, but it must be a whole number of at least {least}",
                where=f"data.{name}",
            )


def _limited(batches: int, limit: int | float | None) -> int:
    """The number of batches left by a limit: a number, or (a float) the fraction of all, at least one."""
    if limit is None:
        return batches
    if isinstance(limit, float) and 0 < limit <= 1:
        return max(1, int(batches * limit))
    if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1:
        return min(batches, limit)
    raise UserError(
        f"limit_batches is {limit!r}, but it is a number of batches (at least 1) or a fraction (above 0, at most 1.0)",
        where="loop.limit_train_batches",
    )


def _check_same(ours: Mapping[str, Any], saved: Mapping[str, Any], names: Sequence[str]) -> None:
    differing = [
        f"{name} was {saved.get(name)!r} and is {ours[name]!r}" for name in names if saved.get(name) != ours[name]
    ]
    if differing:
        raise UserError(
            f"the training data is not what the checkpoint was made with: {'; '.join(differing)}",
            where="data",
            cure="Resume with the same data, or start a new run from these weights with ckpt=.",
        )


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
