"""Choose the loader for a dataset, a DataLoader, or another iterable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_cli.data.loader import Loader, SharedLoader
from trainer_cli.data.position import PositionedLoader, timeout_seconds
from trainer_cli.errors import UserError
from trainer_cli.layout import class_name

if TYPE_CHECKING:
    from trainer_cli.data.stream import StreamLoader
    from trainer_cli.data.user_loader import UserLoader

    AnyLoader: TypeAlias = Loader | StreamLoader | UserLoader | SharedLoader


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
    name: str = "",
    rank: int = 0,
    world_size: int = 1,
) -> AnyLoader:
    """Make the loader for a dataset, a DataLoader, or another iterable.

    A dataset becomes a `Loader` (with batches of 32 by default), an IterableDataset a `StreamLoader`, any other
    iterable a `UserLoader`. The batches are divided among ranks. They are not if a DataLoader has a DistributedSampler,
    or if an iterable (or the dataset of a DataLoader) has an attribute `per_rank` that is true: then each rank takes
    all batches of its loader.

    Args:
        persistent_workers: keep workers between epochs, with a copy of the dataset from their start; None: yes, except
            for an IterableDataset without `state_dict`.
        worker_timeout: limit of the wait for a batch from the workers, in seconds or as `30s` or `5min`; None: ten
            minutes.
        name: what the messages call the dataset, such as `train`.

    Raises:
        UserError: the object is not a dataset or an iterable, or a setting would have no effect on it.
    """
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    # First: a loader that is divided already must not be divided again.
    if isinstance(data, SharedLoader):
        return data
    if isinstance(data, PositionedLoader):
        return _share(cast("Loader | StreamLoader | UserLoader", data), **ranks)
    _refuse_text_and_several(data, where)
    timeout_s = timeout_seconds(worker_timeout)
    if not isinstance(persistent_workers, bool | None):
        raise UserError(
            f"data.persistent_workers is {persistent_workers!r}, but it must be true, false or null",
            where="data.persistent_workers",
        )
    batching: dict[str, Any] = {
        "batch_size": 32 if batch_size is None else batch_size,
        "seed": seed,
        "num_workers": num_workers or 0,
        "collate_fn": collate_fn,
        "drop_last": drop_last,
        "pin_memory": pin_memory,
        "persistent_workers": persistent_workers,
        "worker_timeout_s": timeout_s,
    }
    # The loaders are imported where they are made: a training has loaders of one kind or two.
    if isinstance(data, IterableDataset):
        from trainer_cli.data.stream import StreamLoader

        return _share(StreamLoader(data, **batching), **ranks)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, DataLoader):
        if len(data) == 0:
            cure = f"The length of {class_name(data)} is 0: check the settings that choose its samples."
            raise UserError(f"the {name} dataset is empty".replace("  ", " "), where=where, cure=cure)
        return Loader(data, shuffle=shuffle, **batching, **ranks)
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
        "drop_last": drop_last or None,
    }
    _refuse_ignored(settings, data, where)
    from trainer_cli.data.user_loader import UserLoader

    return _share(UserLoader(data, seed=seed), **ranks)


def _refuse_ignored(settings: Mapping[str, Any], loader: Any, where: str) -> None:
    """Refuse settings of batches, those that are not None, of a loader that makes its own batches."""
    if ignored := [name for name, value in settings.items() if value is not None]:
        raise UserError(
            f"{class_name(loader)} makes its own batches, so {' and '.join(ignored)} would have no effect",
            where=where,
            cure="Remove it, or give the dataset instead of a loader.",
        )


def as_val_loaders(val_loader: Any, **settings: Any) -> dict[str, AnyLoader]:
    """The validation loaders by name, not shuffled: a single one is `val`, those of a list `validate_0` and so on.

    Args:
        val_loader: what `as_loader` takes, or a list or mapping of it; None: no loaders.
        settings: further arguments of `as_loader`.
    """
    if val_loader is None:
        return {}
    if isinstance(val_loader, list | tuple) and val_loader and all(map(_is_loader, val_loader)):
        val_loader = {f"validate_{index}": loader for index, loader in enumerate(val_loader)}
    elif not isinstance(val_loader, Mapping):
        val_loader = {"val": val_loader}
    return {name: as_loader(loader, shuffle=False, **settings) for name, loader in val_loader.items()}


def _refuse_text_and_several(data: Any, where: str) -> None:
    """Refuse a text, and a collection of loaders or datasets, where one loader or dataset is expected."""
    if isinstance(data, str | bytes):
        # It has a length and items, as a dataset has.
        raise UserError(
            f"there is the text {data[:60]!r} where a loader or dataset is expected",
            where=where,
            cure="Give the dataset itself. Names of options, such as digits, are for the command line: data=NAME.",
        )
    if isinstance(data, list | tuple) and data and all(map(_is_loader, data)):
        raise UserError(
            f"there is a {type(data).__name__} of {len(data)} where one loader or dataset is expected",
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


def _share(loader: Loader | StreamLoader | UserLoader, *, rank: int, world_size: int) -> AnyLoader:
    """Divide the batches of a loader among the ranks, unless it has different batches on each rank already."""
    is_divided = world_size == loader.world_size if isinstance(loader, Loader) else loader.per_rank
    if world_size == 1 or is_divided:
        return loader
    return SharedLoader(loader, rank=rank, world_size=world_size)


def _is_loader(value: Any) -> bool:
    """Whether a value is a loader or a dataset, rather than a sample."""
    if isinstance(value, PositionedLoader | DataLoader | Dataset):
        return True
    # A class of the user is a dataset if it has a length and samples by number, as many samples themselves do.
    is_sample = isinstance(value, Tensor | np.ndarray | str | bytes | list | tuple | Mapping)
    return not is_sample and hasattr(value, "__getitem__") and hasattr(value, "__len__")
