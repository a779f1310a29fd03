"""Choose the loader for a dataset, a DataLoader, or another iterable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_cli.core.naming import class_name
from trainer_cli.data.loader import Loader, SharedLoader
from trainer_cli.data.position import timeout_seconds
from trainer_cli.data.stream import StreamLoader
from trainer_cli.data.user_loader import UserLoader
from trainer_cli.errors import UserError

AnyLoader = Loader | StreamLoader | UserLoader | SharedLoader


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
    persistent_workers: bool | None = None,
    worker_timeout: float | str | None = None,
    where: str = "data",
    rank: int = 0,
    world_size: int = 1,
) -> AnyLoader:
    """The loader for a dataset, a DataLoader, or another iterable.

    A dataset becomes a `Loader` (batches of 32 by default), an IterableDataset a `StreamLoader`, any
    other iterable a `UserLoader`. Several ranks share its batches, unless a DataLoader has a DistributedSampler, or an
    iterable (or the dataset of a DataLoader) has an attribute `per_rank` that is true: then each rank takes all that
    its own gives.

    Args:
        persistent_workers: keep workers between epochs, with a copy of the dataset from their start. Not given: yes,
            except for an IterableDataset without `state_dict`.
        worker_timeout: limit of the wait for a batch from the workers, in seconds or as `30s` or `5min`. Not given:
            ten minutes.

    Raises:
        UserError: the object is none of these, or a setting has no effect on a loader.
    """
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if isinstance(data, SharedLoader):
        return data
    if isinstance(data, Loader | StreamLoader | UserLoader):
        return _shared(data, **ranks)
    if isinstance(data, list | tuple) and data and all(is_loader(one) for one in data):
        raise UserError(
            f"there is a {type(data).__name__} of {len(data)} loaders or datasets where one is expected",
            where=where,
            cure="Give several validation loaders as a mapping of names to them; join training data in one dataset.",
        )
    if isinstance(data, Mapping):
        raise UserError(
            f"there is a mapping ({', '.join(map(repr, list(data)[:5]))}) where one loader or dataset is expected",
            where=where,
            cure="Only validation loaders have names. Give one object whose __iter__ yields a batch of each, such as "
            "a class that returns zip(a, b).",
        )
    timeout_s = timeout_seconds(worker_timeout)
    if not isinstance(persistent_workers, bool | None):
        raise UserError(
            f"data.persistent_workers is {persistent_workers!r}, but it must be true, false or null",
            where="data.persistent_workers",
        )
    batches: dict[str, Any] = {
        "batch_size": 32 if batch_size is None else batch_size,
        "seed": seed,
        "num_workers": num_workers or 0,
        "collate_fn": collate_fn,
        "drop_last": drop_last,
        "pin_memory": pin_memory,
        "persistent_workers": persistent_workers,
        "worker_timeout_s": timeout_s,
    }
    if isinstance(data, IterableDataset):
        return _shared(StreamLoader(data, **batches), **ranks)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, DataLoader):
        return Loader(data, shuffle=shuffle, **batches, **ranks)
    if not hasattr(data, "__iter__"):
        raise UserError(
            f"{class_name(data)} is neither a dataset nor a loader",
            where=where,
            cure="A dataset has __len__ and __getitem__, a loader __iter__.",
        )
    settings = {
        "batch_size": batch_size,
        "num_workers": num_workers,
        "collate_fn": collate_fn,
        "persistent_workers": persistent_workers,
        "worker_timeout": worker_timeout,
    }
    if unheeded := [name for name, value in settings.items() if value is not None]:
        raise UserError(
            f"{class_name(data)} makes its own batches, so {' and '.join(unheeded)} would have no effect",
            where=where,
            cure="Remove it, or give the dataset instead of a loader.",
        )
    return _shared(UserLoader(data, seed=seed), **ranks)


def _shared(loader: Loader | StreamLoader | UserLoader, *, rank: int, world_size: int) -> AnyLoader:
    """A loader whose batches the ranks share, unless each has batches of its own already."""
    own = world_size == loader.world_size if isinstance(loader, Loader) else loader.per_rank
    return loader if world_size == 1 or own else SharedLoader(loader, rank=rank, world_size=world_size)


def is_loader(one: Any) -> bool:
    """Whether it is a dataset or a loader, and no sample: a class of its own with samples, or one of torch or ours."""
    if isinstance(one, Loader | StreamLoader | UserLoader | DataLoader | Dataset):
        return True
    sample = isinstance(one, Tensor | np.ndarray | str | bytes | list | tuple | Mapping)
    return not sample and hasattr(one, "__getitem__") and hasattr(one, "__len__")
