"""Make a DataLoader again, with a sampler that can be walked, and batches that can be fetched again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainer_cli.data.position import length_of
from trainer_cli.data.random_state import RandomState, is_random_state_without_torch, seed_random
from trainer_cli.data.workers import WorkerProcesses, unchanged

_TORCHS_SAMPLERS = (
    SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler,
)  # fmt: skip


class _CountingCollate:
    """A collate_fn that returns (number of samples or None, batch). A class, because spawned workers pickle it."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, counts: bool) -> None:
        self.collate_fn, self.counts = collate_fn, counts

    def __call__(self, samples: Any) -> tuple[int | None, Any]:
        # `__getitems__` of the dataset may return columns instead of samples.
        count = len(samples) if self.counts and isinstance(samples, list | tuple) else None
        return count, self.collate_fn(samples)


class Fetcher:
    """Makes the batches of a DataLoader without workers. It is the dataset of another one, whose samples are batches.

    Until the dataset or its collate_fn draws from python's or numpy's generator, these are not seeded. The first batch
    that draws from them is created again.
    """

    seed = 0
    """The seed of the next batch."""
    before: RandomState
    """The states in which python's and numpy's generator are if nothing draws from them."""

    def __init__(self, loader: Any) -> None:
        self.dataset = loader.dataset
        self._is_batched = loader.batch_sampler is not None
        self._collate = _CountingCollate(loader.collate_fn, counts=self._is_batched)
        self.seeds_all = False

    def __getitem__(self, index: Any) -> tuple[int | None, Any]:
        if self.seeds_all:
            return self._make(index)
        torch_state = torch.default_generator.get_state()
        try:
            batch = self._make(index)
        except Exception:
            # If it drew, the error may come from numbers that were not seeded.
            if is_random_state_without_torch(self.before):
                raise
        else:
            if is_random_state_without_torch(self.before):
                return batch
        # For good: what drew once may draw for any later batch.
        self.seeds_all = True
        seed_random(self.seed)
        # Torch's was seeded before the sampler, which may have drawn from it.
        torch.default_generator.set_state(torch_state)
        return self._make(index)

    def _make(self, index: Any) -> tuple[int | None, Any]:
        """Load and collate the samples of a batch; `index`: their indices, or the index of one sample."""
        if not self._is_batched:
            return self._collate(self.dataset[index])
        # As torch does: many samples at once if the dataset can.
        read_many = getattr(self.dataset, "__getitems__", None)
        return self._collate(read_many(index) if read_many else [self.dataset[number] for number in index])


class WalkedSampler:
    """A sampler that skips its first `skip` entries.

    Args:
        in_batches: whether a BatchSampler draws from it, which starts it with its first batch, and not before.
    """

    def __init__(self, sampler: Any, *, in_batches: bool = False) -> None:
        self.sampler = sampler
        self.in_batches = in_batches
        self.skip = 0
        self.before: Callable[[int], None] = lambda number: None
        """Called with the number of each skipped entry before its draw, and then with `skip`, to seed the sampler."""

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if self.skip and self.in_batches:
            # A sampler may draw its order here already, in the state in which the first batch is drawn.
            self.before(0)
        # Not in the generator, so that the sampler's first draw comes before the seed of the workers.
        iterator = iter(self.sampler)
        return self._walk(iterator) if self.skip else iterator

    def _walk(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Draw and drop the entries to skip, each after `before`, and yield the others."""
        for number in range(self.skip):
            if number or not self.in_batches:
                self.before(number)
            next(iterator, None)
        self.before(self.skip)
        yield from iterator


def draws_from_torch_alone(loader: Any) -> bool:
    """Whether a loader is a DataLoader with samplers of torch, which draw from no generator of python or numpy."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset | MapDataPipe):
        return False
    inner = getattr(loader.batch_sampler, "sampler", None)
    has_torchs_batches = type(loader.batch_sampler) in (BatchSampler, type(None))
    has_torchs_inner = inner is None or type(inner) in _TORCHS_SAMPLERS
    return has_torchs_batches and has_torchs_inner and type(loader.sampler) in _TORCHS_SAMPLERS


def rebuild_loader(
    loader: Any, processes: WorkerProcesses, fetcher: Fetcher | None, *, persistent: bool
) -> tuple[Any, WalkedSampler | None]:
    """Make a DataLoader with the same settings, a sampler that can be walked, and workers that exit on request.

    Args:
        fetcher: makes the batches of a loader without workers; None: the DataLoader does.
        persistent: whether it has persistent workers. `loader.persistent_workers` is ignored.
    """
    settings: dict[str, Any] = {}
    walked = None
    batching = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if isinstance(loader.dataset, IterableDataset):
        settings |= batching
    elif loader.batch_size is not None and length_of(loader.sampler) is not None:
        walked = settings["sampler"] = WalkedSampler(loader.sampler, in_batches=True)
        settings |= batching
    elif loader.batch_sampler is not None:
        walked = settings["batch_sampler"] = WalkedSampler(loader.batch_sampler)
    else:
        walked = settings["sampler"] = WalkedSampler(loader.sampler)
        settings["batch_size"] = None
    if loader.num_workers:
        settings |= {
            "timeout": loader.timeout,
            "worker_init_fn": processes.init_fn(loader.worker_init_fn),
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": persistent,
            "in_order": loader.in_order,
        }
    if fetcher is not None:
        if (batch_sampler := settings.pop("batch_sampler", None)) is None and loader.batch_size is not None:
            batch_sampler = BatchSampler(settings["sampler"], loader.batch_size, loader.drop_last)
        rebuilt: Any = DataLoader(
            cast(Any, fetcher),
            batch_size=None,
            sampler=settings["sampler"] if batch_sampler is None else batch_sampler,
            collate_fn=unchanged,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
        )
        return rebuilt, walked
    rebuilt = DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=_CountingCollate(loader.collate_fn, counts=loader.batch_sampler is not None),
        pin_memory=loader.pin_memory,
        generator=loader.generator,
        **settings,
    )
    return rebuilt, walked
