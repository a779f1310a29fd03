"""The right loader for whatever the user gives: a dataset, a DataLoader, or something that can be iterated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainer_cli.data.foreign import ForeignLoader
from trainer_cli.data.loader import Loader
from trainer_cli.data.position import check_counts, type_name
from trainer_cli.errors import UserError


def as_loader(
    data: Any,
    *,
    shuffle: bool,
    seed: int,
    batch_size: int | None = None,
    num_workers: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    pin_memory: bool = False,
    where: str = "data",
) -> Loader | ForeignLoader:
    """The right loader for what the user's data object holds.

    A dataset becomes a `Loader` (batches of 32 unless said otherwise), an IterableDataset a DataLoader in a
    `ForeignLoader`, any other iterable a `ForeignLoader` as it is.

    Raises:
        UserError: for an object that is neither, and for settings that a ready-made loader cannot heed.
    """
    if isinstance(data, Loader | ForeignLoader):
        return data
    if isinstance(data, IterableDataset):
        check_counts(batch_size=batch_size or 32, num_workers=num_workers or 0)
        loader: Iterable[Any] = DataLoader(
            data,
            batch_size or 32,
            num_workers=num_workers or 0,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=pin_memory,
        )
        return ForeignLoader(loader, seed=seed)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, DataLoader):
        return Loader(
            data,
            32 if batch_size is None else batch_size,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers or 0,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=pin_memory,
        )
    if not hasattr(data, "__iter__"):
        raise UserError(
            f"{type_name(data)} is neither a dataset nor a loader",
            where=where,
            cure="A dataset has __len__ and __getitem__, a loader __iter__.",
        )
    settings = {"batch_size": batch_size, "num_workers": num_workers, "collate_fn": collate_fn}
    if unheeded := [name for name, value in settings.items() if value is not None]:
        raise UserError(
            f"{type_name(data)} makes its own batches, so {' and '.join(unheeded)} would have no effect",
            where=where,
            cure="Remove it, or give the dataset instead of a loader.",
        )
    return ForeignLoader(data, seed=seed)
