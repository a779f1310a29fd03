"""The order of the samples of a loader that is built: by the keys of its dataset, or by the sampler of a DataLoader."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

from trainer_cli.addons.exact.samples import Document, Sample
from trainer_cli.addons.exact.walk_indices import IndexWalk, has_indices
from trainer_cli.data import Loader, generators_of
from trainer_cli.parts import FIND_ORIGIN


class KeyOrder:
    """The order of a `Loader`, with the sources and documents of its samples.

    Args:
        is_few: whether the dataset is a subset that `data.overfit_batches` made.
    """

    def __init__(self, loader: Loader, *, is_few: bool) -> None:
        self._loader, self._is_few = loader, is_few

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sample]:
        """See `EpochOrder`."""
        keys, _ = self._loader.source.order(epoch, first, end)
        dataset: Any = self._loader.source.dataset
        indices = keys
        if self._is_few:
            # Of a subset of ours, the indices in the project's dataset.
            dataset, indices = dataset.dataset, [dataset.indices[key] for key in keys]
        samples = locate(dataset, indices)
        return [
            replace(sample, key=key, position=position)
            for position, (key, sample) in enumerate(zip(keys, samples, strict=True), first)
        ]

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """See `EpochOrder`."""
        samples = self.read(epoch, 0, self._loader.length)
        return [number for number, sample in enumerate(samples) if name in (sample.name, str(sample.index))]

    def load(self, epoch: int, first: int, end: int) -> Sequence[Any]:
        """See `EpochOrder`."""
        source = copy.copy(self._loader.source)
        source.collate = list
        samples: list[Any] = source.fetch((epoch, first, end))
        return samples


class WalkOrder:
    """The order of a project's DataLoader.

    Args:
        counts_samples: whether positions count samples, and not batches.
    """

    def __init__(self, walk: IndexWalk, *, counts_samples: bool) -> None:
        self._walk, self._counts_samples = walk, counts_samples
        self.load = walk.load

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sample]:
        """See `EpochOrder`."""
        batches = self._walk.read(epoch)
        if not self._counts_samples:
            starts = list(accumulate(map(len, batches), initial=0))
            first, end = starts[first], starts[end]
        indices = list(chain.from_iterable(batches))[first:end]
        return [Sample(index, position, key=index) for position, index in enumerate(indices, first)]

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """See `EpochOrder`."""
        batches = self._walk.read(epoch)
        if self._counts_samples:
            batches = [[index] for index in chain.from_iterable(batches)]
        return [number for number, indices in enumerate(batches) if name in map(str, indices)]


def names_in_batch(loader: Any, number: int) -> list[str] | None:
    """The names of the samples of the batch `number`, from 0, of an evaluation, row by row; None if the loader does not
    tell them."""
    if isinstance(loader, Loader):
        return [sample.name for sample in KeyOrder(loader, is_few=False).read(0, *loader.positions_of(number))]
    # A generator of the sampler has drawn this order already, and its state from before is unknown.
    if not has_indices(loader) or generators_of(loader.loader):
        return None
    return [str(index) for index in IndexWalk(loader, number + 1).read(0)[number]]


def locate(dataset: Any, keys: Iterable[Any]) -> Iterator[Sample]:
    """The samples by arguments of the dataset's `[]`: their sources in mixtures, their documents in packed rows."""
    find_origin = FIND_ORIGIN.find()
    for key in keys:
        index, sources, pieces = (key, (), ()) if find_origin is None else find_origin(dataset, key)
        yield Sample(index, source="/".join(sources) or None, documents=tuple(Document(*piece) for piece in pieces))
