"""The sample indices of a user's DataLoader, from its sampler: no sample is loaded."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from trainer_cli.data import UserLoader, generators_of


class _Indices:
    """A dataset whose samples are their indices. A class of a module, because spawned workers pickle it."""

    def __getitem__(self, index: Any) -> Any:
        return index


def _keep(samples: Any) -> Any:
    return samples


def _copy_loader(loader: UserLoader, **changes: Any) -> UserLoader:
    """A loader of lists of samples, over a DataLoader with the same sampler and generators."""
    plain: Any = copy.copy(loader.loader)
    # Past the DataLoader's own __setattr__, which refuses to change these attributes.
    plain.__dict__.update(collate_fn=_keep, pin_memory=False, persistent_workers=False, **changes)
    return UserLoader(plain, seed=loader.seed)


def has_indices(loader: Any) -> bool:
    """Whether a loader draws the indices of samples in this process: a plain DataLoader over a map-style dataset."""
    if not isinstance(loader, UserLoader) or loader.stateful or type(loader.loader) is not DataLoader:
        return False
    return not isinstance(loader.loader.dataset, IterableDataset | MapDataPipe)


class IndexWalk:
    """The indices of each batch of an epoch, in the order of the training.

    They are drawn by a DataLoader with the same sampler, generators and number of workers, but a dataset of indices, so
    everything that decides the order is drawn as in a training. A torch generator of the sampler continues from epoch
    to epoch, so the epochs before are walked too.

    Args:
        loader: a loader with `has_indices`.
        most: number of batches of an epoch that the training takes.
    """

    def __init__(self, loader: UserLoader, most: int) -> None:
        self._original = loader
        self._loader = _copy_loader(loader, dataset=_Indices(), worker_init_fn=None)
        self._most = most
        self._generators = generators_of(loader.loader)
        self._epoch: int | None = None
        self._batches: list[list[Any]] = []
        self._initial_states = self._begin_states = self._end_states = self._states()
        """States of the generators at the beginning of the run, and at the beginning and the end of the epoch."""

    def read(self, epoch: int) -> list[list[Any]]:
        """The indices of each batch of an epoch."""
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

    def load(self, epoch: int, first: int, end: int) -> list[Any]:
        """The samples of the batch at positions `first` to `end` of the samples of an epoch, as the training loads it.

        The DataLoader resumes there. Without workers no other sample is loaded.
        """
        starts = list(accumulate(map(len, self.read(epoch)), initial=0))
        with self._generators_at(self._begin_states):
            # Made in these states: at epoch 0 it begins with those in which it was made.
            batches = _copy_loader(self._original).iterate(epoch, batch=starts.index(first), samples=first)
            try:
                samples: list[Any] = next(batches)
            finally:
                batches.close()
        return samples[: end - first]

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
            for batch in iterator:
                # Without a batch size an entry of the sampler is one sample, or a list of them.
                batches.append(list(batch) if isinstance(batch, list | tuple) else [batch])
                if len(batches) == self._most:
                    break
        finally:
            iterator.close()
        return batches
