"""Load batches of a map-style dataset in an order that can be resumed at any sample, with or without workers.

`Loader` determines the order and seeds each sample, so its resume is exact. The random state of the training is kept.
`SharedLoader` divides the batches of any loader among ranks. `EpochParts` passes the epoch on to `set_epoch`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset, default_collate

from trainer_cli.containers import values_of
from trainer_cli.data.order import ORDER_VERSION, sample_seed
from trainer_cli.data.position import STATE_VERSION, PositionedLoader, check_same
from trainer_cli.data.random_state import (
    is_random_state,
    is_random_state_without_torch,
    kept_random_state,
    random_state,
    seed_random,
    seed_torch,
)
from trainer_cli.data.sample_order import OrderInBlocks
from trainer_cli.errors import HELP, UserError
from trainer_cli.terminal import format_count
from trainer_cli.values import check_whole

if TYPE_CHECKING:
    from trainer_cli.data.workers import Workers

_INNER = ("dataset", "datasets", "sampler", "batch_sampler")
"""Attributes in which DataLoader, Subset, ConcatDataset, BatchSampler and others hold datasets and samplers."""
Batches = Generator[Any, None, None]
"""The batches of an epoch; its `close` ends what prepares them."""

COLLATING = "while collating"
_OWN_COLLATE = (
    f"{HELP} data.collate_fn=MODULE.FUNCTION makes a batch of a list of samples, for example by padding them to one "
    "length; in Python it is collate_fn of the loader."
)
LOADING = "while loading"
"""Beginning of the note that names the samples, or the batch, whose loading has failed."""
_MOST_ENTRIES = 100
"""Entries of a list or mapping in which loaders are looked for: a longer one holds samples."""


class EpochParts:
    """Call `set_epoch` of a loader or dataset, or of the loaders, samplers and datasets inside it.

    An object with `set_epoch` is expected to pass the epoch on to what it contains. Two loaders may share a dataset, as
    the two halves of a `random_split` do. `set` then calls it again after the other loader has changed its epoch.
    """

    def __init__(self, root: Any, seed: int) -> None:
        self.seed = seed
        self.parts = [target for target in parts_of(root) if _has_set_epoch(target)]
        self._epoch: int | None = None

    def __bool__(self) -> bool:
        return bool(self.parts)

    def set(self, epoch: int) -> None:
        """Call `set_epoch(epoch)` of all parts, unless they are at this epoch. The random generators are kept."""
        if epoch == self._epoch and all(_latest.get(id(target)) is self for target in self.parts):
            return
        with kept_random_state():
            for target in self.parts:
                # Seeded, so that what it draws depends on seed and epoch alone, and is the same in every worker.
                seed_random(sample_seed(self.seed, epoch, 0))
                target.set_epoch(epoch)
                _latest[id(target)] = self
        self._epoch = epoch


_latest: weakref.WeakValueDictionary[int, EpochParts] = weakref.WeakValueDictionary()
"""id of a part -> the owner that has set its epoch last. The owner keeps the part alive, so the id is not reused."""


def parts_of(root: Any) -> Iterator[Any]:
    """A loader or dataset, and the loaders, samplers and datasets inside it, each once; not those inside an object with
    `set_epoch`, which passes the epoch on itself.

    They are looked for in the usual attributes of torch's classes and of datasets, and in all attributes of other
    loaders, such as a class that zips two, that can be iterated or indexed, alone or in lists and mappings.
    """
    return _parts(root, set())


def _parts(value: Any, seen_ids: set[int]) -> Iterator[Any]:
    """Yield an object and the objects inside it, without those whose ids are in `seen_ids`; adds the ids there."""
    if id(value) in seen_ids:
        return
    seen_ids.add(id(value))
    if isinstance(value, list | tuple | Mapping):
        for entry in values_of(value) if len(value) <= _MOST_ENTRIES else ():
            yield from _parts(entry, seen_ids)
        return
    yield value
    if _has_set_epoch(value):
        return
    is_own_loader = not isinstance(value, DataLoader | Dataset | Sampler) and (
        hasattr(value, "__iter__") and not hasattr(value, "__getitem__")
    )
    # Only plain attributes, because a property may compute, or read files.
    for name, inner in list(getattr(value, "__dict__", {}).items()):
        if name in _INNER or (is_own_loader and _holds_samples(inner)):
            yield from _parts(inner, seen_ids)


def _holds_samples(value: Any) -> bool:
    """Whether a value may be a loader or dataset, or contain some: it can be iterated or indexed, and is not data."""
    return not isinstance(value, str | bytes | Tensor | nn.Module) and (
        hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    )


def _has_set_epoch(value: Any) -> bool:
    """Whether a loader, sampler or dataset has the method `set_epoch`."""
    return callable(getattr(value, "set_epoch", None))


@dataclass(frozen=True, slots=True)
class PaddingBatch:
    """A batch for a rank without samples. It is computed to keep the collectives in step, and does not count."""

    batch: Any


class SharedLoader:
    """Divide the batches of a loader among ranks: each rank iterates all, and takes one of every `world_size`.

    So all ranks have the same number of batches, and the order and position of the loader are those of one process. If
    the last batches of an epoch are fewer than the ranks, the remaining ranks have a `PaddingBatch`.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int) -> None:
        self.loader, self.rank, self.world_size = loader, rank, world_size
        batch_size = getattr(loader, "samples_per_batch", None)
        self.samples_per_batch: int | None = None if batch_size is None else batch_size * world_size
        """Number of samples by which a batch advances the position, over all ranks; None if they are not counted."""
        self.batch_samples: int | None = None
        """Number of samples in the last batch; None if the loader does not state it."""
        self.epoch_end: dict[int, int] = {}
        """Epoch -> number of its batches, where the last ones were fewer than the ranks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    @property
    def promise(self) -> str:
        """Sentences for the log: what each rank reads, and how exact a resume of the loader is."""
        promise = getattr(self.loader, "promise", "")
        return (
            f"Each of {self.world_size} ranks reads all batches, and trains on one in {self.world_size}. If the loader "
            f"or its dataset shares samples out among ranks itself, give it an attribute per_rank = True. {promise}"
        ).rstrip()

    def __len__(self) -> int:
        """Number of batches in an epoch of each rank. Raises TypeError if the loader has no length."""
        return -(-len(self.loader) // self.world_size)

    def batches_after(self, samples: int) -> int:
        """Number of batches of each rank after the first `samples` samples of an epoch."""
        return -(-int(self.loader.batches_after(samples)) // self.world_size)

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Batches:
        """Yield the batches of this rank after the first `batch` batches of each rank."""
        batches = self.loader.iterate(epoch, batch=batch * self.world_size, samples=samples)
        try:
            round_batches: list[Any] = []
            for count, next_batch in enumerate(batches, batch * self.world_size + 1):
                if len(round_batches) == self.rank:
                    self.batch_samples = self.loader.batch_samples
                round_batches.append(next_batch)
                if count % self.world_size == 0:
                    rank_batch = round_batches[self.rank]
                    # Before the yield, so that the batches of other ranks are freed.
                    round_batches.clear()
                    yield rank_batch
            if round_batches:
                self.epoch_end[epoch] = count
                yield round_batches[self.rank] if self.rank < len(round_batches) else PaddingBatch(round_batches[0])
        finally:
            # Not left to the garbage collector: workers must end when the epoch is left, also after an error.
            if (close := getattr(batches, "close", None)) is not None:
                close()

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """The position of the loader after the batches of all ranks."""
        batch = min(batch * self.world_size, self.epoch_end.get(epoch, batch * self.world_size))
        state: dict[str, Any] = self.loader.state_dict(epoch, samples=samples, batch=batch)
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Let the loader check a saved position, and keep it for `iterate`."""
        self.loader.check_state(state)

    def close(self) -> None:
        """End the workers of the loader."""
        if (close := getattr(self.loader, "close", None)) is not None:
            close()


BatchRange = tuple[int, int, int]
"""Request for a batch: (epoch, start, stop), with positions in the order of the epoch."""


class MapDataset(Protocol):
    """An object with a length, and samples by number.

    If samples draw from the generators of python or numpy, those of the first such batch are loaded twice, in each
    process: `__getitem__` should have no effect but its result.

    These attributes are optional:

    - `deterministic = True`: samples use no random numbers, so none are seeded, which takes a microsecond a sample. It
      holds for torch's TensorDataset by itself.
    - `fingerprint`: digest of the content, compared in a resume.
    - `__getitems__`: samples by a list of numbers, used unless it draws random numbers.
    - `collate`: makes a batch of a list of samples, if the loader has no `collate_fn`.
    - `sample_keys(seed, epoch, start, stop)`: an order of the dataset's own. Returns the arguments of `__getitem__` at
      these positions of the epoch. It must be a pure function.
    - `order_version`: name of that order, compared in a resume.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


class Loader(PositionedLoader):
    """Load batches of a map-style dataset.

    Samples, order and random numbers are a pure function of (seed, epoch). They are the same with any number of workers
    and ranks, and after a resume at any sample. `set_epoch` of the dataset, and of datasets inside it, is called before
    its samples of an epoch, in every worker.

    Before each `dataset[index]` the CPU generators of python, numpy and torch are seeded from (seed, epoch, index), or
    with an order of the dataset's own from (seed, epoch, position). `collate_fn` draws after the last sample. Without
    workers the states of the generators are restored after each batch.

    As long as the dataset and `collate_fn` do not draw from python's and numpy's generators, only torch's is seeded.
    The first batch that draws from them is loaded again with all three seeded, as are all later ones. So samples are
    the same as if all had been seeded from the beginning, unless they depend on `random.getstate()` or
    `numpy.random.get_state()` without a draw.

    The order does not depend on `world_size`. Of every `world_size * batch_size` samples each rank gets a batch, in the
    order of ranks, so all ranks have the same number of batches. Fewer samples at the end of an epoch are divided
    evenly, and a rank without a sample has a `PaddingBatch`. With `drop_last` they are left out.

    Args:
        persistent_workers: keep workers between epochs, each with a copy of the dataset from its start; None: yes.
        worker_timeout_s: limit of the wait for a batch from the workers; None: ten minutes.
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
        check_whole("data.batch_size", batch_size, 1)
        check_whole("data.num_workers", num_workers, 0)
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
        """Number of samples by which a batch advances the position, over all ranks."""
        self.batch_samples: int | None = None
        """Number of samples in the last batch."""
        self.length = len(dataset)
        self.fingerprint: str | None = getattr(dataset, "fingerprint", None)
        self.source = KeyedSource(dataset, seed, collate_fn, shuffle=shuffle, length=self.length)
        self._workers: Workers | None = None
        if num_workers:
            # Not above: without workers none of it is needed.
            from trainer_cli.data.workers import Workers

            self._workers = Workers(
                self.source,
                num_workers,
                # The seed after those of all samples, so that a worker's own draws repeat no sample's.
                seed=sample_seed(seed, 0, self.length),
                persistent=persistent_workers is not False,
                timeout_s=worker_timeout_s,
                pin_memory=pin_memory,
            )
        if self.batches_after(0) == 0:
            raise UserError(
                f"the data has {format_count(self.length, 'sample')}, not enough for one batch of "
                f"{self.samples_per_batch}",
                where="data",
                cure="Use a smaller batch_size." if self.length else None,
            )

    def __len__(self) -> int:
        """Number of batches in an epoch of each rank."""
        return self.batches_after(0)

    def batches_after(self, samples: int) -> int:
        """Number of batches of each rank after the first `samples` samples of an epoch."""
        full, remainder = divmod(max(0, self.length - samples), self.samples_per_batch)
        return full + (remainder > 0 and not self.drop_last)

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Batches:
        """Yield the batches of this rank after the first `samples` samples of all ranks. `batch` is not used.

        Closing the iterator ends its workers, unless they are persistent.
        """
        if samples < 0:
            raise ValueError(f"an epoch cannot be entered {format_count(-samples, 'sample')} before its start")
        if samples == 0:
            self.begin(epoch)
        ranges = self._ranges(epoch, samples)
        batches = self._load(ranges) if self._workers is None else self._workers.answers(ranges)
        return self._count(batches, samples)

    def begin(self, epoch: int) -> None:
        """Ask the dataset for its length in an epoch, after its `set_epoch`."""
        self.source.epochs.set(epoch)
        length = len(self.source.dataset)
        if length != self.length:
            self.length = length
            self.source.set_length(length)
            # The workers' copies of the dataset have the former length.
            self.close()

    def close(self) -> None:
        """End the persistent workers. A later `iterate` starts new ones."""
        if self._workers is not None:
            self._workers.close()

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """The position, and the data and order it belongs to."""
        if samples == 0:
            self.begin(epoch)
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
        """Raise UserError for a position in other data or another order. Batch size, workers and ranks may differ."""
        self.begin(state["epoch"])
        now = self.state_dict(state["epoch"], samples=state["sample_offset"])
        check_same(now, state, ("version", "order", "seed", "length", "fingerprint"))

    def _load(self, ranges: Iterator[BatchRange]) -> Batches:
        """Yield the batches without workers."""
        pin: Callable[[Any], Any] | None = None
        if self.pin_memory:
            from trainer_cli.data.workers import pinned as pin
        for batch_range in ranges:
            batch = self.source.fetch(batch_range)
            yield batch if pin is None else pin(batch)

    def _ranges(self, epoch: int, samples: int) -> Generator[BatchRange, None, None]:
        """Yield the positions of the samples of each batch of this rank, after the first `samples` of all ranks."""
        for number in range(self.batches_after(samples)):
            batch_start = samples + number * self.samples_per_batch
            start, stop = self._share(batch_start)
            # A rank without a sample loads the first one of all ranks, for its padding batch.
            yield (epoch, start, stop) if start < stop else (epoch, batch_start, batch_start + 1)

    def positions_of(self, number: int) -> tuple[int, int]:
        """The positions (first, end) in an epoch of the samples of this rank's batch `number`, counted from 0."""
        return self._share(number * self.samples_per_batch)

    def _share(self, start: int) -> tuple[int, int]:
        """The positions (first, end) of this rank in the samples of all ranks that begin at `start`."""
        count = min(self.samples_per_batch, self.length - start)
        # -(-a // b) rounds up, so that the first ranks have more if the samples cannot be divided evenly.
        first, end = (start - (-count * rank) // self.world_size for rank in (self.rank, self.rank + 1))
        return first, end

    def _count(self, batches: Batches, start: int) -> Batches:
        """Set `batch_samples` for each batch, and mark a batch without samples as padding."""
        try:
            for batch in batches:
                first, end = self._share(start)
                start += self.samples_per_batch
                # Set before the yield: the training reads it while it has this batch.
                self.batch_samples = end - first
                yield batch if end > first else PaddingBatch(batch)
        finally:
            batches.close()


class KeyedSource:
    """Make a batch of a dataset from positions in the order. Each worker has a copy."""

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
        self.collate = collate_fn or getattr(dataset, "collate", None) or default_collate
        self.deterministic = bool(getattr(dataset, "deterministic", False))
        # Not with a collate_fn of the user, which may draw: it must draw as after samples loaded one by one.
        is_torchs_collate = collate_fn is None and self.collate is default_collate
        self.deterministic = self.deterministic or (is_torchs_collate and _indexes_tensors(dataset))
        self.epochs = EpochParts(dataset, seed)
        self.draws = not self.deterministic or collate_fn is not None or bool(self.epochs)
        """Whether random numbers may be drawn."""
        self.seeds_all = False
        """Whether python's and numpy's generators are seeded too."""
        self.many = _getitems(dataset)
        self.own_order = getattr(dataset, "sample_keys", None)
        self._shuffle = shuffle
        self.set_length(length)
        default_order = ORDER_VERSION if shuffle else "sequential"
        self.order_name: str = default_order if self.own_order is None else getattr(dataset, "order_version", "own")

    def set_length(self, length: int) -> None:
        """Order this number of samples from now on."""
        # With an order of the dataset's own, seeds are those of positions.
        self._order = OrderInBlocks(self.seed, length, shuffle=self._shuffle and self.own_order is None)

    def fetch(self, batch_range: BatchRange) -> Any:
        """Make a batch. An error of the dataset keeps its type, and gets a note that names the sample.

        The random generators are then as before. Until python's or numpy's is drawn from, only torch's is seeded.
        """
        epoch, start, stop = batch_range
        if self.epochs:
            self.epochs.set(epoch)
        keys, seeds = self.order(epoch, start, stop)
        if not self.draws:
            return self._make(keys, seeds, epoch, seed_torch)
        with kept_random_state() as state_before:
            if not self.seeds_all:
                try:
                    batch = self._make(keys, seeds, epoch, seed_torch)
                except Exception:
                    # If it drew, the error may come from numbers that were not seeded.
                    if is_random_state_without_torch(state_before):
                        raise
                else:
                    if is_random_state_without_torch(state_before):
                        return batch
                # For good: what drew once may draw for any later sample.
                self.seeds_all = True
            return self._make(keys, seeds, epoch, seed_random)

    def order(self, epoch: int, start: int, stop: int) -> tuple[Sequence[Any], list[int]]:
        """The arguments of the dataset's `[]` at positions `start` to `stop` of an epoch, and the samples' seeds."""
        keys, seeds = self._order.read(epoch, start, stop)
        return (keys if self.own_order is None else self.own_order(self.seed, epoch, start, stop)), seeds

    def _make(self, keys: Sequence[Any], seeds: Sequence[int], epoch: int, seed: Callable[[int], Any]) -> Any:
        """Make a batch, with generators that `seed` seeds for each sample."""
        samples = None if self.many is None else self._load_together(keys, epoch)
        if samples is None:
            samples = self._load_each(keys, () if self.deterministic else seeds, epoch, seed)
        elif not self.deterministic:
            # collate_fn must draw the same numbers as after samples that were loaded one by one.
            seed(seeds[-1])
        if self.deterministic and self.draws:
            seed(seeds[0])
        try:
            return self.collate(samples)
        except Exception as error:
            error.add_note(f"{COLLATING} samples {list(keys)} of epoch {epoch}")
            if self.collate is default_collate:
                error.add_note(_OWN_COLLATE)
            raise

    def _load_together(self, keys: Sequence[Any], epoch: int) -> Any:
        """Load samples by `__getitems__` of the dataset. Returns None if that draws random numbers.

        Such samples, and all later ones of the dataset, are seeded and loaded one by one, so that they do not depend on
        the batch.
        """
        assert self.many is not None
        # Whether random numbers were drawn can be seen only from the states before and after.
        state_before = None if self.deterministic else random_state()
        try:
            # A list, which torch's own loader passes: a dataset may rely on its type.
            samples = self.many(list(keys))
        except Exception as error:
            error.add_note(f"{LOADING} samples {list(keys)} of epoch {epoch}")
            raise
        if state_before is not None and not is_random_state(state_before):
            # For good: a dataset that drew once may draw for any later sample.
            self.many = None
            return None
        return samples

    def _load_each(
        self, keys: Sequence[Any], seeds: Sequence[int], epoch: int, seed: Callable[[int], Any]
    ) -> list[Any]:
        """Load samples one by one, with generators that `seed` seeds for each; without `seeds` they are not seeded."""
        samples: list[Any] = []
        try:
            for number, key in enumerate(keys):
                # Seeded per sample, so that it is the same in any batch, worker and rank.
                if seeds:
                    seed(seeds[number])
                samples.append(self.dataset[key])
        except Exception as error:
            error.add_note(f"{LOADING} sample {keys[len(samples)]} of epoch {epoch}")
            raise
        return samples


def _indexes_tensors(dataset: Any) -> bool:
    """Whether samples are elements of plain tensors, by classes of torch that draw no random numbers."""
    while type(dataset) is Subset and type(dataset.indices) in (list, range):
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(type(tensor) is torch.Tensor for tensor in dataset.tensors)


def _getitems(dataset: Any) -> Callable[[list[Any]], Any] | None:
    """The `__getitems__` of a dataset, if it reads many samples at once."""
    # A Subset has the method always, but its dataset may not.
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return dataset.__getitems__ if callable(getattr(inner, "__getitems__", None)) else None
