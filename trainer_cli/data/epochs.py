"""Pass the number of the epoch to every part of a loader that has `set_epoch`: datasets, samplers, and those inside."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from trainer_cli.data.order import sample_seed
from trainer_cli.data.randomness import seed_random

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
