"""Batches of a map-style dataset in an order that can be resumed at any sample, with or without workers.

`Loader` decides the order and seeds each sample, so its resume is exact; it does not change the random state of the
training.

Pass the number of the epoch to every part of a loader that has `set_epoch`: datasets, samplers, and those inside.

Share the batches of one loader among ranks, without a batch lost or seen twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import Subset, default_collate

from trainer_cli.core.order import ORDER_VERSION, sample_indices, sample_seed, sample_seeds
from trainer_cli.data.position import (
    STATE_VERSION,
    check_counts,
    check_same,
    is_random_state,
    kept_random_state,
    random_state,
    seed_random,
)
from trainer_cli.data.workers import Workers, pinned
from trainer_cli.errors import UserError

_INNER = ("dataset", "datasets", "sampler", "batch_sampler")
"""Attributes in which DataLoader, Subset, ConcatDataset, BatchSampler and their like hold others."""


class EpochParts:
    """The parts of a loader or dataset that have `set_epoch`.

    Inside a part that has it nothing is looked for: the part passes it on itself. Two owners may have parts in common,
    as the two halves of a `random_split` have; `set` then calls again what the other owner has changed.
    """

    def __init__(self, root: Any, seed: int) -> None:
        self.seed = seed
        self.parts = list(_parts(root, set()))
        self._epoch: int | None = None

    def __bool__(self) -> bool:
        return bool(self.parts)

    def set(self, epoch: int) -> None:
        """Call `set_epoch(epoch)` of all parts, unless they are at this epoch. Changes the random generators."""
        if epoch == self._epoch and all(_latest.get(id(part)) is self for part in self.parts):
            return
        for part in self.parts:
            # What it draws is a function of seed and epoch, in every worker.
            seed_random(sample_seed(self.seed, epoch, 0))
            part.set_epoch(epoch)
            _latest[id(part)] = self
        self._epoch = epoch


_latest: weakref.WeakValueDictionary[int, EpochParts] = weakref.WeakValueDictionary()
"""By identity of a part: who has set its epoch last, and holds the part as long."""


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if callable(getattr(value, "set_epoch", None)):
        yield value
        return
    # Plain attributes alone: a property may compute, or read files.
    attributes = getattr(value, "__dict__", {})
    for name in _INNER:
        inner = attributes.get(name)
        if isinstance(inner, Mapping):
            inner = list(inner.values())
        for entry in inner if isinstance(inner, list | tuple) else [] if inner is None else [inner]:
            yield from _parts(entry, seen)


@dataclass(frozen=True, slots=True)
class PaddingBatch:
    """The batch of a rank for which no samples are left: it is computed as every rank computes one, but counts
    nothing."""

    batch: Any


class SharedLoader:
    """Every rank iterates the same loader, and takes of each `world_size` batches in turn that of its rank.

    So the ranks have equally many batches, and the loader's order and position are those of one process. Where batches
    are left over at the end of an epoch, the other ranks have a `PaddingBatch`.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int) -> None:
        self.loader, self.rank, self.world_size = loader, rank, world_size
        per_batch = getattr(loader, "samples_per_batch", None)
        self.samples_per_batch: int | None = None if per_batch is None else per_batch * world_size
        """Samples of all ranks by which a batch advances the position; None if the loader does not count samples."""
        self.batch_samples: int | None = None
        """Samples of the batch that `iterate` gave last; None if the loader does not say."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    @property
    def promise(self) -> str:
        """What each rank reads, and how exact the loader's resume is, for the log."""
        own = getattr(self.loader, "promise", "")
        return (
            f"Each of {self.world_size} ranks reads all batches, and trains on one in {self.world_size}. If the loader "
            f"or its dataset shares samples out among ranks itself, give it an attribute per_rank = True. {own}"
        ).rstrip()

    def __len__(self) -> int:
        """Batches of an epoch, on each rank; TypeError where the loader has no length."""
        return -(-len(self.loader) // self.world_size)

    def batches_after(self, samples: int) -> int:
        """Batches that are left of an epoch, on each rank, after its first `samples` samples."""
        left: int = self.loader.batches_after(samples)
        return -(-left // self.world_size)

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Any, None, None]:
        """This rank's batches of an epoch after the first `batch` of each rank."""
        batches = self.loader.iterate(epoch, batch=batch * self.world_size, samples=samples)
        try:
            turn: list[Any] = []
            for batch in batches:
                if len(turn) == self.rank:
                    self.batch_samples = self.loader.batch_samples
                turn.append(batch)
                if len(turn) == self.world_size:
                    own = turn[self.rank]
                    turn.clear()
                    yield own
            if turn:
                yield turn[self.rank] if self.rank < len(turn) else PaddingBatch(turn[0])
        finally:
            if (close := getattr(batches, "close", None)) is not None:
                close()

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """The loader's position, after the batches of all ranks."""
        state: dict[str, Any] = self.loader.state_dict(epoch, samples=samples, batch=batch * self.world_size)
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a position that does not fit the loader; one that has a position keeps it."""
        self.loader.check_state(state)

    def close(self) -> None:
        """End the loader's workers."""
        if (close := getattr(self.loader, "close", None)) is not None:
            close()


Part = tuple[int, int, int]
"""A batch to be made: epoch, and its positions in the order, start and stop."""


class MapDataset(Protocol):
    """Anything with a length and samples by number.

    It may also have `deterministic = True` (its samples use no random numbers, so none are seeded),
    `fingerprint` (a digest of its content, checked at a resume), `__getitems__` (samples by a list of
    numbers, used unless it draws random numbers), `collate` (makes a batch of a list of samples, where the loader
    is given no `collate_fn`), and an order of its own: `sample_keys(seed, epoch, start, stop)`, the arguments of
    `__getitem__` at these positions of the epoch. It must be a pure function; `order_version` names it.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


class Loader:
    """Batches of a map-style dataset; which samples, in what order and with what randomness is a pure
    function of (seed, epoch), the same with any number of workers and ranks, and from any sample on.

    `set_epoch` of the dataset, and of datasets inside it, is called before its samples of an epoch, in every worker.

    Before each `dataset[index]` python's, numpy's and torch's CPU generators are seeded from (seed, epoch,
    index), or with an order of the dataset's own from (seed, epoch, position); `collate_fn` draws after the last
    sample. Without workers their states are restored after each batch.

    On `world_size` ranks the order is the same. `world_size * batch_size` samples of it at a time are
    cut into a batch for each rank, in the order of ranks, so every rank has equally many batches. Fewer at the
    end of an epoch are cut as evenly, where they are fewer than the ranks, a rank without a sample has a
    `PaddingBatch`. With `drop_last` both are left out.

    Args:
        persistent_workers: keep workers between epochs, each with a copy of the dataset from their start. Not given:
            yes.
        worker_timeout_s: how long to wait for a batch from the workers. Not given: ten minutes.
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
        pin_memory: bool = False,
        persistent_workers: bool | None = None,
        worker_timeout_s: float | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_counts(batch_size=batch_size, num_workers=num_workers)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self.rank, self.world_size = rank, world_size
        self.samples_per_batch = batch_size * world_size
        """Samples of all ranks by which a batch advances the position."""
        self.batch_samples: int | None = None
        """Samples of the batch that `iterate` gave last."""
        self.length = len(dataset)
        self.fingerprint: str | None = getattr(dataset, "fingerprint", None)
        self.source = KeyedSource(dataset, seed, collate_fn, shuffle=shuffle, length=self.length)
        self.workers = Workers(
            self.source,
            num_workers,
            seed=sample_seed(seed, 0, self.length),
            persistent=persistent_workers is not False,
            timeout_s=worker_timeout_s,
            pin_memory=pin_memory,
        )
        if self.batches_after(0) == 0:
            raise UserError(
                f"there are {self.length} samples, not enough for one batch of {self.samples_per_batch}",
                where="data",
                cure="Use a smaller batch_size." if self.length else None,
            )

    def __len__(self) -> int:
        """Batches of an epoch, on each rank."""
        return self.batches_after(0)

    def batches_after(self, samples: int) -> int:
        """Batches that are left of an epoch, on each rank, after its first `samples` samples."""
        left = max(0, self.length - samples)
        whole, over = divmod(left, self.samples_per_batch)
        return whole + (over > 0 and not self.drop_last)

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Any, None, None]:
        """This rank's batches of an epoch after the first `samples` samples of all. `batch` is not needed here.

        Closing the iterator ends its workers, unless they are persistent.
        """
        if samples < 0:
            raise ValueError(f"an epoch cannot be entered {-samples} samples before its start")
        parts = self._parts(epoch, samples)
        batches = self._here(parts) if self.num_workers == 0 else self.workers.answers(parts)
        return self._counted(batches, samples)

    def close(self) -> None:
        """End the persistent workers. A later `iterate` starts new ones."""
        self.workers.close()

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """The position, and the data and order that it belongs to."""
        return {
            "version": STATE_VERSION,
            "order": self.source.order_name,
            "seed": self.seed,
            "epoch": epoch,
            "sample_offset": samples,
            "length": self.length,
            "fingerprint": self.fingerprint,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a position in other data or another order. Batch size, workers and ranks may differ.

        Raises:
            UserError: naming everything that differs.
        """
        check_same(self.state_dict(0), state, ("version", "order", "seed", "length", "fingerprint"))

    def _here(self, parts: Iterator[Part]) -> Generator[Any, None, None]:
        for part in parts:
            if self.source.draws:
                with kept_random_state():
                    batch = self.source.fetch(part)
            else:
                batch = self.source.fetch(part)
            yield pinned(batch) if self.pin_memory else batch

    def _parts(self, epoch: int, samples: int) -> Generator[Part, None, None]:
        for turn in range(self.batches_after(samples)):
            start = samples + turn * self.samples_per_batch
            first, end = self._share(start)
            yield (epoch, first, end) if first < end else (epoch, start, start + 1)

    def _share(self, start: int) -> tuple[int, int]:
        """This rank's positions of the batch of all ranks that begins at `start`; the first ranks have more."""
        count = min(self.samples_per_batch, self.length - start)
        first, end = (start - (-count * rank) // self.world_size for rank in (self.rank, self.rank + 1))
        return first, end

    def _counted(self, batches: Generator[Any, None, None], start: int) -> Generator[Any, None, None]:
        """The batches, each with its number of samples in `batch_samples`; marked if no sample is left for this
        rank."""
        try:
            for batch in batches:
                first, end = self._share(start)
                start += self.samples_per_batch
                self.batch_samples = end - first
                yield batch if end > first else PaddingBatch(batch)
        finally:
            batches.close()


class KeyedSource:
    """Makes a batch of a dataset from its positions in the order. Each worker has a copy."""

    def __init__(
        self,
        dataset: MapDataset,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        shuffle: bool,
        length: int,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self.length = length
        self.collate = collate_fn or getattr(dataset, "collate", None) or default_collate
        self.deterministic = bool(getattr(dataset, "deterministic", False))
        self.epochs = EpochParts(dataset, seed)
        self.draws = not self.deterministic or collate_fn is not None or bool(self.epochs)
        self.many = _getitems(dataset)
        self.own_order = getattr(dataset, "sample_keys", None)
        usual = ORDER_VERSION if shuffle else "sequential"
        self.order_name: str = usual if self.own_order is None else getattr(dataset, "order_version", "own")

    def keys(self, epoch: int, start: int, stop: int) -> Sequence[Any]:
        """The keys for `dataset[…]` at these positions of an epoch."""
        if self.own_order is not None:
            own: Sequence[Any] = self.own_order(self.seed, epoch, start, stop)
            return own
        return sample_indices(self.seed, epoch, start, stop, self.length) if self.shuffle else range(start, stop)

    def fetch(self, part: Part) -> Any:
        """The batch at this part of the order. An error of the dataset keeps its type and says which sample it was."""
        epoch, start, stop = part
        if self.epochs:
            self.epochs.set(epoch)
        keys = self.keys(epoch, start, stop)
        numbers = keys if self.own_order is None else range(start, stop)
        samples = None if self.many is None else self._at_once(keys, epoch)
        if samples is None:
            seeds = () if self.deterministic else sample_seeds(self.seed, epoch, numbers)
            samples = self._one_by_one(keys, seeds, epoch)
        elif not self.deterministic:
            # As after the last sample alone, for what collate_fn draws.
            seed_random(sample_seed(self.seed, epoch, numbers[-1]))
        if self.deterministic and self.draws:
            seed_random(sample_seed(self.seed, epoch, start if self.own_order is not None else keys[0]))
        try:
            return self.collate(samples)
        except Exception as error:
            error.add_note(f"while collating samples {list(keys)} of epoch {epoch}")
            raise

    def _at_once(self, keys: Sequence[Any], epoch: int) -> Any:
        """The samples by the dataset's `__getitems__`; None if it draws random numbers.

        Such samples are seeded one by one, so that they do not depend on the batch. A dataset that has drawn once is
        read so from then on.
        """
        assert self.many is not None
        before = None if self.deterministic else random_state()
        try:
            samples = self.many(list(keys))
        except Exception as error:
            error.add_note(f"while loading samples {list(keys)} of epoch {epoch}")
            raise
        if before is not None and not is_random_state(before):
            self.many = None
            return None
        return samples

    def _one_by_one(self, keys: Sequence[Any], seeds: Sequence[int], epoch: int) -> list[Any]:
        samples: list[Any] = []
        try:
            for number, key in enumerate(keys):
                if seeds:
                    seed_random(seeds[number])
                samples.append(self.dataset[key])
        except Exception as error:
            error.add_note(f"while loading sample {keys[len(samples)]} of epoch {epoch}")
            raise
        return samples


def _getitems(dataset: Any) -> Callable[[list[Any]], Any] | None:
    """The dataset's `__getitems__`, if it reads many samples at once: a Subset's own only passes the call on."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return dataset.__getitems__ if callable(getattr(inner, "__getitems__", None)) else None
