"""Mix sources of training data in fixed proportions, in an order that can be resumed at any position.

Positions count over all epochs. Each block of `BLOCK` of them holds the same number of samples of each source, by the
largest remainder of its weight; within the block a keyed permutation arranges them. Each source is read without
replacement, in a new order each time it ends, independently of the epochs of the training. So the sample at a position
is a pure function of (seed, position), and every position takes the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from trainer_cli.data import ORDER_VERSION, MapDataset, sample_indices, sample_seed
from trainer_cli.errors import UserError
from trainer_cli.layout import class_name
from trainer_cli.values import check_whole

BLOCK = 1000
"""Number of positions over which proportions are exact: weights count in thousandths of their sum."""

# An epoch that no training reaches, so that the seeds of orders differ from those of samples.
_ORDER_EPOCH = 1 << 40


class Mixture:
    """Draw `train` from sources by weight. `val` holds the validation data of each source.

    Other attributes, such as `vocab_size`, are those of the sources, if all of them agree.

    Args:
        sources: name -> data object with `train`, a dataset with a length, and optionally `val`.
        weights: name -> share of the training samples. Shares need not add up to one.
        epoch_samples: number of samples in an epoch; null: as many as all sources have together.
    """

    def __init__(
        self, sources: Mapping[str, Any], weights: Mapping[str, float], epoch_samples: int | None = None
    ) -> None:
        if not isinstance(sources, Mapping) or not isinstance(weights, Mapping) or not sources:
            raise UserError("data.sources and data.weights must be mappings with a name for each source", where="data")
        if lacking := sorted(set(map(str, sources)) ^ set(map(str, weights))):
            raise UserError(
                f"data.sources has {', '.join(sources)}, but data.weights has {', '.join(weights)}",
                where="data.weights",
                cure=f"Give both or neither of {', '.join(lacking)}.",
            )
        self.sources = dict(sources)
        datasets = {name: _get_train(name, source) for name, source in sources.items()}
        self.train = MixedDataset(datasets, [weights[name] for name in sources], epoch_samples)
        self.val: dict[str, Any] = {}
        for name, source in sources.items():
            val = getattr(source, "val", None)
            if isinstance(val, Mapping):
                self.val.update({f"{name}_{inner}": dataset for inner, dataset in val.items()})
            elif val is not None:
                self.val[str(name)] = val

    def __getattr__(self, name: str) -> Any:
        """An attribute of the sources that all of them have, with the same value."""
        # Without this, a copy or unpickling, which has no `sources` yet, would recurse without end.
        if name.startswith("_") or name == "sources":
            raise AttributeError(name)
        values = [getattr(source, name) for source in self.sources.values()]
        if any(value != values[0] for value in values):
            raise AttributeError(f"the sources differ in '{name}': {', '.join(map(str, values))}")
        return values[0]


class MixedDataset:
    """Samples of some datasets, in the proportions of their weights. A key is (index of the dataset, key in it)."""

    order_version = f"mixture-1 {ORDER_VERSION}"

    def __init__(
        self, datasets: Mapping[str, MapDataset], weights: Sequence[float], epoch_samples: int | None = None
    ) -> None:
        self.names, self.datasets = list(map(str, datasets)), list(datasets.values())
        self.lengths = [len(dataset) for dataset in self.datasets]
        self.quotas = tuple(quotas(dict(zip(datasets, weights, strict=True)), BLOCK))
        if epoch_samples is not None:
            check_whole("data.epoch_samples", epoch_samples, 1)
        self.length = sum(self.lengths) if epoch_samples is None else epoch_samples
        self.deterministic = all(getattr(dataset, "deterministic", False) for dataset in self.datasets)
        facts = [
            (name, length, quota, getattr(dataset, "fingerprint", None), getattr(dataset, "order_version", None))
            for (name, dataset), length, quota in zip(datasets.items(), self.lengths, self.quotas, strict=True)
        ]
        self.fingerprint = blake2b(repr(facts).encode(), digest_size=16).hexdigest()
        if (collate := _common_collate(self.datasets)) is not None:
            self.collate = collate

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        number, inner_key = key
        return self.datasets[number][inner_key]

    def describe(self, key: tuple[int, Any]) -> str:
        """The description of a sample by its source, if the source has any."""
        number, inner_key = key
        describe = getattr(self.datasets[number], "describe", None)
        return str(describe(inner_key)) if callable(describe) else ""

    def sample_keys(self, seed: int, epoch: int, start: int, stop: int) -> list[tuple[int, Any]]:
        """The (index of the dataset, key in it) at each of these positions of an epoch."""
        keys: list[tuple[int, Any]] = []
        # Positions count over all epochs, so an epoch may begin inside a block.
        position, end = epoch * self.length + start, epoch * self.length + stop
        order_seed = sample_seed(seed, _ORDER_EPOCH, 0)
        while position < end:
            block, offset = divmod(position, BLOCK)
            count = min(end - position, BLOCK - offset)
            for number, nth in _arrange_block(order_seed, block, self.quotas)[offset : offset + count]:
                keys.append((number, self._key(seed, number, block * self.quotas[number] + nth)))
            position += count
        return keys

    def _key(self, seed: int, number: int, draw: int) -> Any:
        """The key of the `draw`-th sample that is drawn from a dataset, counted from the beginning of the training."""
        dataset, length = self.datasets[number], self.lengths[number]
        epoch, position = divmod(draw, length)
        dataset_seed = sample_seed(seed, _ORDER_EPOCH, 1 + number)
        if (sample_keys := getattr(dataset, "sample_keys", None)) is not None:
            return sample_keys(dataset_seed, epoch, position, position + 1)[0]
        return sample_indices(dataset_seed, epoch, position, position + 1, length)[0]


def quotas(weights: Mapping[str, float], block: int) -> list[int]:
    """The number of positions in a block for each weight, by the largest remainder.

    Raises:
        UserError: a weight is not a positive number, or too small for one position in a block.
    """
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise UserError(
                f"data.weights.{name} is {weight!r}, but it must be a number above 0",
                where=f"data.weights.{name}",
                cure="Leave out a source that is not wanted.",
            )
    # fsum is exact, so the result does not depend on the order of the weights.
    total = math.fsum(weights.values())
    exact_shares = [block * weight / total for weight in weights.values()]
    shares = [math.floor(share) for share in exact_shares]
    # Ties go to the earlier source, so that equal weights give the same shares on each machine.
    by_remainder = sorted(range(len(exact_shares)), key=lambda number: (shares[number] - exact_shares[number], number))
    for number in by_remainder[: block - sum(shares)]:
        shares[number] += 1
    for name, share in zip(weights, shares, strict=True):
        if share == 0:
            raise UserError(
                f"data.weights.{name} is {weights[name]!r} of {total:g}, less than one in {block:,}",
                where=f"data.weights.{name}",
                cure="Give it more weight, or leave the source out.",
            )
    return shares


# Batches and workers ask for positions of the same few blocks again and again.
@lru_cache(maxsize=4)
def _arrange_block(seed: int, block: int, quotas: tuple[int, ...]) -> list[tuple[int, int]]:
    """For each position of a block: (source index, position within that source's samples of the block)."""
    owners = [number for number, quota in enumerate(quotas) for _ in range(quota)]
    counts = [0] * len(quotas)
    arranged = []
    for index in sample_indices(seed, block, 0, len(owners), len(owners)):
        number = owners[index]
        arranged.append((number, counts[number]))
        counts[number] += 1
    return arranged


def _get_train(name: str, source: Any) -> MapDataset:
    """The training data of a source. Raises UserError if it is not a dataset with a length, or empty."""
    train: Any = getattr(source, "train", None)
    if not hasattr(train, "__getitem__") or not hasattr(train, "__len__"):
        raise UserError(
            f"the train part of {name} ({class_name(source)}) is {class_name(train)}, which is not a dataset with a "
            "length",
            where=f"data.sources.{name}",
        )
    if len(train) == 0:
        raise UserError(f"the train part of {name} is empty", where=f"data.sources.{name}")
    dataset: MapDataset = train
    return dataset


def _common_collate(datasets: Sequence[MapDataset]) -> Callable[[list[Any]], Any] | None:
    """The collate function of the sources, or None. Raises UserError if they differ."""
    collates: list[Any] = [getattr(dataset, "collate", None) for dataset in datasets]
    # Bound methods of two datasets of a class are never equal, but their functions are.
    if len({getattr(collate, "__func__", collate) for collate in collates}) > 1:
        raise UserError("the sources make batches in different ways", where="data.sources", cure="Set data.collate_fn.")
    common: Callable[[list[Any]], Any] | None = collates[0]
    return common
