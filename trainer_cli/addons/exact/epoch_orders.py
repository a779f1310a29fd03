"""The order of the samples of a loader that is built: by the keys of its dataset, or by the sampler of a DataLoader."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from trainer_cli.addons.exact.samples import Document, Sample
from trainer_cli.data import Loader, UserLoader, generators_of
from trainer_cli.parts import FIND_ORIGIN


class KeyOrder:
    """The order of a `Loader`, with the sources and documents of its samples.

    Args:
        is_few: whether the dataset is a subset that `data.overfit_batches` made.
    """

    def __init__(self, loader: Loader, *, is_few: bool = False) -> None:
        self._loader, self._is_few = loader, is_few

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sample]:
        """See `EpochOrder`."""
        keys, _ = self._loader.source.order(epoch, first, end)
        dataset: Any = self._loader.source.dataset
        indices = keys
        if self._is_few:
            # Of a subset of ours, the indices in the project's dataset.
            dataset, indices = dataset.dataset, [dataset.indices[key] for key in keys]
        samples = zip(keys, _locate(dataset, indices), strict=True)
        return [replace(sample, key=key, position=position) for position, (key, sample) in enumerate(samples, first)]

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """See `EpochOrder`."""
        samples = self.read(epoch, 0, self._loader.length)
        return [position for position, sample in enumerate(samples) if name in (sample.name, str(sample.index))]

    def load(self, epoch: int, first: int, end: int) -> Sequence[Any]:
        """The samples at these positions, as the training loads them."""
        source = copy.copy(self._loader.source)
        source.collate = list
        samples: list[Any] = source.fetch((epoch, first, end))
        return samples


def _locate(dataset: Any, keys: Iterable[Any]) -> Iterator[Sample]:
    """The samples by arguments of the dataset's `[]`: their sources in mixtures, their documents in packed rows."""
    find_origin = FIND_ORIGIN.find()
    for key in keys:
        index, sources, pieces = (key, (), ()) if find_origin is None else find_origin(dataset, key)
        yield Sample(index, source="/".join(sources) or None, documents=tuple(Document(*piece) for piece in pieces))


class _Indices:
    """A dataset whose samples are their indices. A class of a module, because spawned workers pickle it."""

    def __getitem__(self, index: Any) -> Any:
        return index


def _keep(samples: Any) -> Any:
    return samples


def has_indices(loader: Any) -> bool:
    """Whether a loader draws the indices of samples in this process: a plain DataLoader over a map-style dataset."""
    if not isinstance(loader, UserLoader) or loader.stateful or type(loader.loader) is not DataLoader:
        return False
    return not isinstance(loader.loader.dataset, IterableDataset | MapDataPipe)


class WalkOrder:
    """The order of a project's DataLoader: no sample is loaded.

    The indices are drawn by a DataLoader with the same sampler, generators and number of workers, but a dataset of
    indices, so everything that decides the order is drawn as in a training. A torch generator of the sampler continues
    from epoch to epoch, so the epochs before are walked too.

    Args:
        loader: a loader with `has_indices`.
        most: number of batches of an epoch that the training takes.
        counts_samples: whether positions count samples, and not batches.
    """

    def __init__(self, loader: UserLoader, most: int, *, counts_samples: bool = True) -> None:
        self._original, self._most, self._counts_samples = loader, most, counts_samples
        self._loader = _copy_loader(loader, dataset=_Indices(), worker_init_fn=None)
        self._generators = generators_of(loader.loader)
        self._epoch: int | None = None
        self._batches: list[list[Any]] = []
        self._initial_states = self._begin_states = self._end_states = self._states()
        """States of the generators at the beginning of the run, and at the beginning and the end of the epoch."""

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sample]:
        """See `EpochOrder`."""
        batches = self.batches(epoch)
        if not self._counts_samples:
            starts = list(accumulate(map(len, batches), initial=0))
            first, end = starts[first], starts[end]
        indices = list(chain.from_iterable(batches))[first:end]
        return [Sample(index, position, key=index) for position, index in enumerate(indices, first)]

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """See `EpochOrder`."""
        batches = self.batches(epoch)
        if self._counts_samples:
            batches = [[index] for index in chain.from_iterable(batches)]
        return [position for position, indices in enumerate(batches) if name in map(str, indices)]

    def load(self, epoch: int, first: int, end: int) -> Sequence[Any]:
        """The samples of the batch at these positions of samples, as the training loads it.

        The DataLoader resumes there. Without workers no other sample is loaded.
        """
        starts = list(accumulate(map(len, self.batches(epoch)), initial=0))
        with self._generators_at(self._begin_states):
            # Made in these states: at epoch 0 it begins with those in which it was made.
            batches = _copy_loader(self._original).iterate(epoch, batch=starts.index(first), samples=first)
            try:
                samples: list[Any] = next(batches)
            finally:
                batches.close()
        return samples[: end - first]

    def batches(self, epoch: int) -> list[list[Any]]:
        """The indices of each batch of an epoch, in the order of the training."""
        if epoch != self._epoch:
            first = epoch
            if self._generators:
                first = 0 if self._epoch is None or self._epoch > epoch else self._epoch + 1
            for number in range(first, epoch + 1):
                self._begin_states = self._end_states if number else self._initial_states
                with self._generators_at(self._begin_states):
                    self._batches = self._walk(number)
                    self._end_states = self._states()
            self._epoch = epoch
        return self._batches

    @contextmanager
    def _generators_at(self, states: list[torch.Tensor]) -> Generator[None, None, None]:
        """Set the generators inside the block. Other copies of the loader share them."""
        before = self._states()
        self._set_states(states)
        try:
            yield
        finally:
            self._set_states(before)

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_states(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _walk(self, epoch: int) -> list[list[Any]]:
        batches: list[list[Any]] = []
        iterator = self._loader.iterate(epoch)
        try:
            for batch in islice(iterator, self._most):
                # Without a batch size an entry of the sampler is one sample, or a list of them.
                batches.append(list(batch) if isinstance(batch, list | tuple) else [batch])
        finally:
            iterator.close()
        return batches


def _copy_loader(loader: UserLoader, **changes: Any) -> UserLoader:
    """A loader of lists of samples, over a DataLoader with the same sampler and generators."""
    plain: Any = copy.copy(loader.loader)
    # Past the DataLoader's own __setattr__, which refuses to change these attributes.
    plain.__dict__.update(collate_fn=_keep, pin_memory=False, persistent_workers=False, **changes)
    return UserLoader(plain, seed=loader.seed)


def names_in_batch(loader: Any, number: int) -> list[str] | None:
    """The names of the samples of the batch `number`, from 0, of an evaluation, row by row; None if the loader does not
    tell them."""
    if isinstance(loader, Loader):
        return [sample.name for sample in KeyOrder(loader).read(0, *loader.positions_of(number))]
    # A generator of the sampler has drawn this order already, and its state from before is unknown.
    if not has_indices(loader) or generators_of(loader.loader):
        return None
    return [str(index) for index in WalkOrder(loader, number + 1).batches(0)[number]]
