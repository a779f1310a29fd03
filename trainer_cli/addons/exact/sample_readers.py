"""The order of samples by a loader: by the keys of its dataset, or by the sampler of a DataLoader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

from trainer_cli.addons.exact.sample_view import name_of
from trainer_cli.addons.exact.samples import Document, Sample, has_name
from trainer_cli.addons.exact.walk_indices import IndexWalk, has_indices
from trainer_cli.addons.text import MixedDataset, PackedRows
from trainer_cli.data import Loader, generators_of


class KeyReader:
    """The order of a `Loader`, with the sources and documents of its samples.

    Args:
        is_few: whether the dataset is a subset that `data.overfit_batches` made.
    """

    def __init__(self, loader: Loader, *, is_few: bool) -> None:
        self._loader, self._is_few = loader, is_few

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sequence[Sample]]:
        """See `SampleReader`."""
        keys, _ = self._loader.source.order(epoch, first, end)
        dataset: Any = self._loader.source.dataset
        samples = [
            # Of a subset of ours, the index in the project's dataset.
            replace(locate(dataset.dataset, dataset.indices[key]), key=key) if self._is_few else locate(dataset, key)
            for key in keys
        ]
        return [[replace(sample, position=first + number) for number, sample in enumerate(samples)]]

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """See `SampleReader`."""
        (samples,) = self.read(epoch, 0, self._loader.length)
        return [number for number, sample in enumerate(samples) if has_name(sample, name)]


class WalkReader:
    """The order of a project's DataLoader.

    Args:
        counts_samples: whether positions count samples, and not batches.
    """

    def __init__(self, walk: IndexWalk, *, counts_samples: bool) -> None:
        self.walk, self._counts_samples = walk, counts_samples

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sequence[Sample]]:
        """See `SampleReader`."""
        batches = self.walk.read(epoch)
        if self._counts_samples:
            indices = list(chain.from_iterable(batches))[first:end]
            return [[Sample(index, first + number, key=index) for number, index in enumerate(indices)]]
        starts = list(accumulate(map(len, batches), initial=0))
        return [
            [Sample(index, starts[number] + offset, key=index) for offset, index in enumerate(batches[number])]
            for number in range(first, end)
        ]

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """See `SampleReader`."""
        batches = self.walk.read(epoch)
        entries = chain.from_iterable(batches) if self._counts_samples else batches
        index_lists = [[entry] if self._counts_samples else entry for entry in entries]
        return [number for number, indices in enumerate(index_lists) if name in map(str, indices)]


def names_in_batch(loader: Any, number: int) -> list[str] | None:
    """The names of the samples of the batch `number`, from 0, of an evaluation, row by row; None if the loader does not
    tell them."""
    if isinstance(loader, Loader):
        (samples,) = KeyReader(loader, is_few=False).read(0, *loader.positions_of(number))
        return [name_of(sample) for sample in samples]
    # A generator of the sampler has drawn this order already, and its state from before is unknown.
    if not has_indices(loader) or generators_of(loader.loader):
        return None
    return [str(index) for index in IndexWalk(loader, number + 1).read(0)[number]]


def locate(dataset: Any, key: Any, sources: tuple[str, ...] = ()) -> Sample:
    """A sample by the argument of the dataset's `[]`: its source in mixtures, and its documents in packed rows."""
    if isinstance(dataset, MixedDataset):
        number, inner_key = key
        inner = locate(dataset.datasets[number], inner_key, (*sources, dataset.names[number]))
        return replace(inner, key=key)
    source = "/".join(sources) or None
    if isinstance(dataset, PackedRows):
        documents = tuple(Document(*piece) for piece in dataset.pieces(key))
        return Sample(key, source=source, documents=documents, key=key)
    return Sample(key, source=source, key=key)
