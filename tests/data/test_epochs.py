"""`set_epoch` reaches every dataset and sampler before each epoch, in every process that loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_parts import present
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    random_split,
)

from trainer_cli.data.adapt import as_loader
from trainer_cli.errors import UserError


class Rows(Dataset[Any]):
    """Each sample is the epoch that the dataset was given last."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.epoch)


class Draws(Rows):
    """Each sample is what `set_epoch` drew."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = int(torch.randint(1 << 30, ()))


class Stream(IterableDataset[Any]):
    epoch = -1
    set_epoch = Rows.set_epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(4):
            yield torch.tensor(self.epoch)


class Chained(IterableDataset[Any]):
    """A wrapper of a user's own."""

    def __init__(self) -> None:
        self.dataset = Stream()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.dataset)


class Order(Sampler[int]):
    """Gives the index of the epoch that it was given last."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)


class Batches(BatchSampler):
    epoch = 0
    set_epoch = Order.set_epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield [self.epoch] * 2
        yield [self.epoch] * 2


def _loader(dataset: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **settings if "batch_sampler" in settings else {"batch_size": 2, **settings})


class Own:
    """A loader of a user's own that joins the loaders of what it holds."""

    def __init__(self, *held: Any) -> None:
        self.held, self.note, self.weights = list(held), "text", torch.zeros(3)

    def loaders(self) -> list[Any]:
        return [*(self.held[0].values() if isinstance(self.held[0], dict) else self.held)]

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return (torch.stack(batches).flatten() for batches in zip(*self.loaders(), strict=True))


class Combined:
    """As Lightning's CombinedLoader: `iter` starts anew and returns the object, which has a length only then."""

    def __init__(self, loaders: Any) -> None:
        self._iterables = loaders
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        if self._iterator is None:
            raise RuntimeError("Please call `iter(combined_loader)` first.")
        return 2

    def __iter__(self) -> Any:
        self._iterator = zip(*self._iterables.values(), strict=True)
        return self

    def __next__(self) -> Any:
        return torch.stack(next(present(self._iterator))).flatten()


class Attribute:
    def __init__(self, loader: Any) -> None:
        self.inner = loader
        self.loop = self

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def _mixed(*arguments: Any) -> Any:
    return pytest.importorskip("trainer_cli.addons.text.mixture").MixedDataset(*arguments)


KINDS: dict[str, Any] = {
    "two, zipped": lambda: Own(_loader(Rows()), _loader(Rows())),
    "two in a mapping": lambda: Own({"a": _loader(Rows()), "b": _loader(Subset(Rows(), [0, 1, 2, 3]))}),
    "two with samplers": lambda: Own(_loader(range(9), sampler=Order()), _loader(range(9), sampler=Order())),
    "combined": lambda: Combined({"a": _loader(Rows()), "b": _loader(Rows())}),
    "a wrapper of a combined one": lambda: Attribute(Combined({"a": _loader(Rows()), "b": _loader(Rows())})),
    "an attribute": lambda: Attribute(_loader(Rows())),
    "an attribute of an attribute": lambda: Attribute(Attribute(_loader(Rows()))),
    "given directly": Rows,
    "in a Subset": lambda: Subset(Rows(), [0, 1, 2, 3]),
    "in a random_split": lambda: random_split(Rows(), [4, 0])[0],
    "in a ConcatDataset": lambda: ConcatDataset([Rows(), Subset(Rows(), [0, 1])]),
    "in a mixture": lambda: _mixed({"a": Rows(), "b": Rows()}, [1, 1]),
    "iterable": Stream,
    "in a wrapper of a user": Chained,
    "in a DataLoader": lambda: _loader(Rows()),
    "in a Subset in a DataLoader": lambda: _loader(Subset(Rows(), [0, 1, 2, 3])),
    "iterable in a DataLoader": lambda: _loader(Stream()),
    "a sampler": lambda: _loader(range(9), sampler=Order()),
    "a sampler in a batch sampler": lambda: _loader(range(9), batch_sampler=BatchSampler(Order(), 2, False)),
    "a batch sampler": lambda: _loader(range(9), batch_sampler=Batches(SequentialSampler(range(4)), 2, False)),
    "in a DataLoader with workers": lambda: _loader(Rows(), num_workers=1),
    "in a DataLoader with persistent workers": lambda: _loader(Rows(), num_workers=1, persistent_workers=True),
    "iterable, with persistent workers": lambda: _loader(Stream(), num_workers=1, persistent_workers=True),
}
WORKERS = {"given directly": 1, "in a Subset": 2, "iterable": 1}


def _seen(loader: Any, epoch: int, **place: int) -> set[int]:
    return {int(value) for batch in loader.iterate(epoch, **place) for value in batch}


def _made(kind: str, num_workers: int | None) -> Any:
    data = KINDS[kind]()
    settings: dict[str, Any] = (
        {}
        if isinstance(data, DataLoader | Own | Combined | Attribute)
        else {"batch_size": 2, "num_workers": num_workers or 0}
    )
    return as_loader(data, shuffle=False, seed=0, **settings)


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, None) for kind in KINDS), *((kind, count) for kind, count in WORKERS.items())]
)
def test_every_epoch_is_passed_on(kind: str, workers: int | None) -> None:
    loader = _made(kind, workers)
    assert [_seen(loader, epoch) for epoch in range(3)] == [{0}, {1}, {2}]
    loader.close()
    later = _made(kind, workers)
    assert _seen(later, 2, batch=1, samples=2) == {2}, "after a stop"
    assert _seen(later, 3) == {3}
    later.close()


@pytest.mark.parametrize("kind", ["direct", "loader"])
def test_an_evaluation_on_the_other_half_of_a_split_does_not_move_the_epoch(kind: str) -> None:
    halves = random_split(Rows(), [2, 2])
    train, val = (
        as_loader(half if kind == "direct" else DataLoader(half, 1), shuffle=False, seed=0,
                  batch_size=1 if kind == "direct" else None)
        for half in halves
    )  # fmt: skip
    batches = train.iterate(3)
    assert int(next(batches)[0]) == 3
    assert _seen(val, 0) == {0}
    assert int(next(batches)[0]) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_what_set_epoch_draws_is_a_function_of_seed_and_epoch(workers: int) -> None:
    def drawn(seed: int) -> list[set[int]]:
        loader = as_loader(Draws(), shuffle=True, seed=seed, batch_size=1, num_workers=workers)
        before = torch.get_rng_state()
        values = [_seen(loader, epoch) for epoch in (0, 1)]
        assert torch.equal(torch.get_rng_state(), before)
        loader.close()
        return values

    first = drawn(0)
    assert first == drawn(0)
    assert [len(values) for values in first] == [1, 1], "equal in all workers"
    assert first[0] != first[1] != drawn(1)[1]


def test_a_loader_that_keeps_its_workers_and_is_no_plain_dataloader_is_refused() -> None:
    class Mine(DataLoader[Any]):
        """A loader whose workers cannot be renewed from outside."""

    with pytest.raises(UserError, match="persistent_workers=False"):
        as_loader(Mine(Rows(), 2, num_workers=1, persistent_workers=True), shuffle=False, seed=0)
    with pytest.raises(UserError, match=r"the workers of .*DataLoader are kept"):
        as_loader(Own(_loader(Rows(), num_workers=1, persistent_workers=True)), shuffle=False, seed=0)
    as_loader(Mine(range(4), 2, num_workers=1, persistent_workers=True), shuffle=False, seed=0)  # type: ignore[arg-type]


class Restarts:
    """`iter` starts anew and returns the object itself."""

    def __init__(self, restarts: bool = True) -> None:
        self.restarts, self.count = restarts, 0

    def __iter__(self) -> Any:
        if self.restarts:
            self.count = 0
        return self

    def __next__(self) -> Any:
        if self.count == 3:
            raise StopIteration
        self.count += 1
        return torch.tensor([self.count])


class Inherited(Iterator[Any]):
    def __next__(self) -> Any:
        raise StopIteration


def test_a_loader_that_starts_anew_is_used_although_it_has_next() -> None:
    loader = as_loader(Restarts(), shuffle=False, seed=0)
    assert [[int(batch) for batch in loader.iterate(epoch)] for epoch in range(3)] == [[1, 2, 3]] * 3
    assert [int(batch) for batch in loader.iterate(1, batch=1)] == [2, 3], "after a stop"
    once = as_loader(Restarts(restarts=False), shuffle=False, seed=0)
    assert len(list(once.iterate(0))) == 3
    with pytest.raises(UserError, match="gives no batch in epoch 1: its __iter__ returns the object itself"):
        list(once.iterate(1))


@pytest.mark.parametrize(
    "used_up",
    [zip([1]), map(str, [1]), (value for value in [1]), iter([1]), enumerate([1]), Inherited()],
    ids=lambda value: type(value).__name__,
)
def test_an_iterator_that_cannot_start_anew_is_refused(used_up: Any) -> None:
    with pytest.raises(UserError, match="can be iterated only once"):
        as_loader(used_up, shuffle=False, seed=0)


def test_the_generators_of_loaders_inside_another_one_are_kept_for_a_resume() -> None:
    def made() -> Any:
        shuffled = _loader(range(4), shuffle=True, generator=torch.Generator().manual_seed(3))
        return as_loader(Own(shuffled, _loader(range(4))), shuffle=False, seed=0)

    straight = made()
    epochs = [[batch.tolist() for batch in straight.iterate(epoch)] for epoch in range(2)]
    before = made()
    list(before.iterate(0))
    batches = before.iterate(1)
    next(batches)
    later = made()
    later.check_state(before.state_dict(1, batch=1))
    assert [batch.tolist() for batch in later.iterate(1, batch=1)] == epochs[1][1:]


def test_persistent_workers_are_kept_where_no_dataset_has_set_epoch() -> None:
    loader: Any = as_loader(_loader(list(range(4)), num_workers=1, persistent_workers=True), shuffle=False, seed=0)
    assert loader.persistent
    assert "restarted for each epoch" not in loader.promise
    renewed: Any = as_loader(_loader(Rows(), num_workers=1, persistent_workers=True), shuffle=False, seed=0)
    assert "restarted for each epoch" in renewed.promise
