"""What every kind of loader promises: exact order, a resume at any batch, and nothing else disturbed."""

from __future__ import annotations

import importlib.util
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    get_worker_info,
)

from trainer_cli.data.datasets import Digits
from trainer_cli.data.loader import Loader
from trainer_cli.data.stream import StreamLoader
from trainer_cli.data.user_loader import UserLoader
from trainer_cli.format.tree import encode

LENGTH = 23


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand()), float(np.random.randn())]


class Drawing(Dataset[torch.Tensor]):
    """Each sample: its index, and numbers from each of the three generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor([int(index), *draw()], dtype=torch.float64)


class ByList(Drawing):
    """Read by list, as a dataset of Hugging Face."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Constant(Drawing):
    deterministic = True

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor([int(index), 0.0], dtype=torch.float64)


class Backwards(Drawing):
    """Its own order: from the end, with words for keys."""

    order_version = "backwards-1"

    def sample_keys(self, seed: int, epoch: int, start: int, stop: int) -> list[str]:
        return [str(LENGTH - 1 - position) for position in range(start, stop)]


class Stream(IterableDataset[torch.Tensor]):
    """Numbers with random ones, shared among workers in turn; it knows where it stands."""

    def __init__(self) -> None:
        self.at = self.start = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        self.at, self.start = self.start, 0
        while (number := self.at * workers + worker) < LENGTH:
            self.at += 1
            yield torch.tensor([number, *draw()], dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.start = state["at"]


class Forgetful(IterableDataset[torch.Tensor]):
    """The same numbers, but it cannot say where it stands."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Stream())


class Stateful:
    """Batches of a user's loader, which knows where it stands and is put there."""

    def __init__(self) -> None:
        self.count = self.start = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.count, self.start = self.start, 0
        while self.count < 6:
            self.count += 1
            yield torch.tensor([[self.count]])
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.count = state["count"]


class Wandering(Sampler[int]):
    """Draws for each sample from what it drew before."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        place = 0
        for _ in range(LENGTH):
            place = (place + int(torch.randint(1, 7, ()))) % LENGTH
            yield place


class Eager(Sampler[list[int]]):
    """Draws all of its order when it begins."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[index] for index in torch.randperm(LENGTH).tolist()])


def shaken(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that draws too, as mixing samples does."""
    return torch.stack(samples) + torch.rand(()) + random.random() + np.random.rand()


def _subset(data: Any) -> Subset[Any]:
    return Subset(data, range(LENGTH))


def _ours(dataset: Any = None, **settings: Any) -> Callable[[], Any]:
    return lambda: Loader(Drawing() if dataset is None else dataset(), 4, **{"shuffle": True, "seed": 3, **settings})


def _stream(dataset: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: StreamLoader(dataset(), 4, seed=1, **settings)


def _theirs(dataset: Any = None, **settings: Any) -> Callable[[], Any]:
    """A user's DataLoader; settings that are functions are called for each loader."""

    def make() -> UserLoader:
        made = {
            name: value() if callable(value) and name != "collate_fn" else value for name, value in settings.items()
        }
        sizes = {} if "batch_sampler" in made else {"batch_size": 4}
        return UserLoader(DataLoader(Drawing() if dataset is None else dataset(), **{**sizes, **made}), seed=3)

    return make


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _both() -> UserLoader:
    generator = _seeded()
    sampler = RandomSampler(Drawing(), generator=generator)
    return UserLoader(DataLoader(Drawing(), 4, sampler=sampler, generator=generator), seed=3)


def _mixture() -> Any:
    sources = {name: SimpleNamespace(train=Drawing(), val=None) for name in ("a", "b")}
    return pytest.importorskip("trainer_cli.addons.text.mixture").Mixture(sources, {"a": 1, "b": 2}, 46).train


def _rows() -> Any:
    tokens = torch.randint(11, (780,), generator=torch.Generator().manual_seed(0))
    text = pytest.importorskip("trainer_cli.addons.text.text")
    return text.PackedRows(text.Sequences(tokens, np.arange(1, 40)), 32)


@cache
def _token_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _tokens() -> Any:
    file = Path(_token_folder().name) / "ids.bin"
    np.arange(LENGTH * 4 + 1, dtype=np.uint16).tofile(file)
    tokens = pytest.importorskip("trainer_cli.addons.text.tokens")
    return tokens.TokenFiles(str(file), vocab_size=LENGTH * 4 + 1, context=4, val_fraction=0).train


def _torchdata() -> UserLoader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return UserLoader(StatefulDataLoader(Drawing(), 4, shuffle=True), seed=3)


KINDS: dict[str, Any] = {
    "ours": _ours(),
    "ours, not shuffled": _ours(shuffle=False),
    "ours, 2 workers": _ours(num_workers=2),
    "ours, read by list": _ours(ByList),
    "ours, a subset": _ours(lambda: Subset(ByList(), range(LENGTH))),
    "ours, drop_last": _ours(drop_last=True),
    "ours, an order of the dataset": _ours(Backwards),
    "ours, an order of the dataset, 2 workers": _ours(Backwards, num_workers=2),
    "ours, random collating": _ours(collate_fn=shaken),
    "ours, random collating, 2 workers": _ours(collate_fn=shaken, num_workers=2),
    "ours, random collating alone": _ours(Constant, collate_fn=shaken, num_workers=2),
    "ours, augmented digits": _ours(lambda: _subset(Digits(val_fraction=0.95).train)),
    "ours, augmented digits, 2 workers": _ours(lambda: _subset(Digits(val_fraction=0.95).train), num_workers=2),
    "ours, a mixture": _ours(_mixture),
    "ours, a mixture, 2 workers": _ours(_mixture, num_workers=2),
    "ours, packed rows": _ours(_rows),
    "ours, packed rows, 2 workers": _ours(_rows, num_workers=2),
    "ours, files of tokens": _ours(_tokens),
    "ours, files of tokens, 2 workers": _ours(_tokens, num_workers=2),
    "a stream": _stream(Stream),
    "a stream, 1 worker": _stream(Stream, num_workers=1, persistent_workers=True),
    "a stream, 2 workers": _stream(Stream, num_workers=2, persistent_workers=False),
    "a stream, 2 persistent workers": _stream(Stream, num_workers=2, persistent_workers=True),
    "a forgetful stream": _stream(Forgetful),
    "a forgetful stream, 2 workers": _stream(Forgetful, num_workers=2),
    "a forgetful stream, 2 persistent workers": _stream(Forgetful, num_workers=2, persistent_workers=True),
    "a DataLoader": _theirs(shuffle=True),
    "a DataLoader, 2 workers": _theirs(shuffle=True, num_workers=2),
    "a DataLoader, 1 persistent worker": _theirs(Constant, shuffle=True, num_workers=1, persistent_workers=True),
    "a seeded DataLoader, 1 persistent worker": _theirs(
        Constant, shuffle=True, num_workers=1, persistent_workers=True, generator=_seeded
    ),
    "a DataLoader with replacement": _theirs(sampler=lambda: RandomSampler(Drawing(), replacement=True)),
    "a DataLoader with drop_last": _theirs(drop_last=True),
    "a DataLoader with a generator": _theirs(shuffle=True, generator=_seeded),
    "a DataLoader with a generator, 2 workers": _theirs(shuffle=True, generator=_seeded, num_workers=2),
    "a sampler with a generator": _theirs(sampler=lambda: RandomSampler(Drawing(), generator=_seeded())),
    "a sampler and a loader with one generator": _both,
    "a batch sampler": _theirs(batch_sampler=lambda: BatchSampler(range(LENGTH), 5, False)),
    "a sampler that draws for each sample": _theirs(sampler=Wandering),
    "a sampler that draws at its start": _theirs(batch_sampler=Eager),
    "a DistributedSampler": _theirs(sampler=lambda: DistributedSampler(Drawing(), num_replicas=1, rank=0)),
    "a loader with its own position": lambda: UserLoader(Stateful(), seed=0),
    "a list of batches": lambda: UserLoader(list(torch.arange(12).reshape(6, 2)), seed=0),
    "a StatefulDataLoader": pytest.param(
        _torchdata,
        marks=[
            pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed"),
            pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
        ],
    ),
}
DATASETS = (
    "an order of the dataset",
    "random collating",
    "augmented digits",
    "a mixture",
    "packed rows",
    "files of tokens",
)
IN_CAMPAIGNS = {f"ours, {dataset}, 2 workers" for dataset in DATASETS}
"""Loaders of ours that differ in their dataset alone: each goes on as one without workers and as `ours, 2 workers` do,
and has the batches of the one without workers, see ALIKE."""
every_kind = pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=pytest.mark.campaign) if kind in IN_CAMPAIGNS else make for kind, make in KINDS.items()],
    ids=KINDS,
)


def flat(batch: Any) -> Any:
    """A batch as numbers that can be compared."""
    if isinstance(batch, dict):
        return {name: flat(value) for name, value in batch.items()}
    return [flat(value) for value in batch] if isinstance(batch, list | tuple) else torch.as_tensor(batch).tolist()


def samples_in(batch: Any) -> int:
    return len(
        next(iter(batch.values())) if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
    )


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state(legacy=False))]


def read(make: Callable[[], Any], *epochs: int) -> list[list[Any]]:
    """The batches of these epochs, one after the other, of a new loader."""
    loader = make()
    batches = [[flat(batch) for batch in loader.iterate(epoch)] for epoch in epochs]
    loader.close()
    return batches


@every_kind
def test_a_resume_at_any_batch_gives_what_going_on_would_have_given(make: Callable[[], Any]) -> None:
    epochs = read(make, 0, 1)
    states: list[tuple[int, dict[str, int], Any]] = []
    loader = make()
    for epoch, whole in enumerate(epochs):
        if epoch == 1:
            states.append((epoch, {}, loader.state_dict(epoch)))
        samples = 0
        for number, batch in enumerate(loader.iterate(epoch), start=1):
            assert flat(batch) == whole[number - 1]
            draw()  # What the training draws does not matter.
            samples += samples_in(batch)
            if number in ((3,) if epoch == 0 else (1, 3, len(whole))):
                position = {"batch": number, "samples": samples}
                states.append((epoch, position, loader.state_dict(epoch, **position)))
    loader.close()
    for epoch, position, state in states:
        encode({"data": state})
        later = make()
        later.check_state(state)
        batches = [flat(batch) for batch in later.iterate(epoch, **position)]
        assert batches == epochs[epoch][position.get("batch", 0) :], (epoch, position)
        if epoch == 0:
            assert [flat(batch) for batch in later.iterate(1)] == epochs[1]
        later.close()


@every_kind
def test_the_random_state_of_the_training_is_not_touched(make: Callable[[], Any]) -> None:
    loader = make()
    np.random.randn()  # Leaves a second normal number in store, which is part of the state.
    before = random_states()
    iterator = loader.iterate(0, batch=2, samples=8)
    for _ in range(2):
        next(iterator)
        assert random_states() == before
    iterator.close()
    loader.close()
    assert random_states() == before


@every_kind
def test_a_pass_left_early_does_not_show_in_the_next(make: Callable[[], Any]) -> None:
    loader, whole = make(), read(make, 0)
    iterator = loader.iterate(0)
    next(iterator), next(iterator)
    iterator.close()
    assert [[flat(batch) for batch in loader.iterate(0)]] == whole
    loader.close()
    assert multiprocessing.active_children() == []


ALIKE = {
    "ours": ("ours, 2 workers", "ours, read by list", "ours, a subset"),
    "ours, an order of the dataset": ("ours, an order of the dataset, 2 workers",),
    "ours, random collating": ("ours, random collating, 2 workers",),
    "ours, augmented digits": ("ours, augmented digits, 2 workers",),
    "ours, a mixture": ("ours, a mixture, 2 workers",),
    "ours, packed rows": ("ours, packed rows, 2 workers",),
    "ours, files of tokens": ("ours, files of tokens, 2 workers",),
    "a stream": ("a stream, 1 worker", "a forgetful stream"),
    "a stream, 2 workers": ("a stream, 2 persistent workers", "a forgetful stream, 2 workers"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_batches_are_the_same_whatever_workers_read_them_and_however(name: str) -> None:
    expected = read(KINDS[name], 0, 1)
    assert len({str(batch) for epoch in expected for batch in epoch}) == sum(map(len, expected))
    for other in ALIKE[name]:
        assert read(KINDS[other], 0, 1) == expected, other
