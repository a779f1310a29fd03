"""The sample indices of a user's DataLoader, from its sampler: no sample is loaded."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from trainer_cli.data.user_loader import UserLoader, generators_of


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
        # A copy, past the DataLoader's own __setattr__, which refuses to change these attributes.
        plain: Any = copy.copy(loader.loader)
        plain.__dict__.update(
            dataset=_Indices(), collate_fn=_keep, worker_init_fn=None, pin_memory=False, persistent_workers=False
        )
        self._loader = UserLoader(plain, seed=loader.seed)
        self._most = most
        self._continues = bool(generators_of(plain))
        self._epoch: int | None = None
        self._batches: list[list[Any]] = []

    def read(self, epoch: int) -> list[list[Any]]:
        """The indices of each batch of an epoch."""
        if epoch != self._epoch:
            first = epoch
            if self._continues:
                # From epoch 0, whose first states of the generators are kept, unless this is a later one.
                first = 0 if self._epoch is None or self._epoch > epoch else self._epoch + 1
            for number in range(first, epoch + 1):
                self._batches = self._walk(number)
            self._epoch = epoch
        return self._batches

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
