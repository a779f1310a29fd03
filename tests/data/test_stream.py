"""Iterable datasets that know where they stand: what a position means, what is refused, and what is reported."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from trainer_cli.data.adapt import as_loader
from trainer_cli.data.repeats import STATE_STAYS, RepeatWatch
from trainer_cli.data.stream import StreamLoader
from trainer_cli.data.user_loader import UserLoader
from trainer_cli.data.workers import WorkerError
from trainer_cli.errors import UserError


class Stream(IterableDataset[torch.Tensor]):
    """Numbers, shared among workers in turn. Counts what it makes."""

    def __init__(self, size: int = 37, bad: str | None = None) -> None:
        self.size, self.bad = size, bad
        self.at = self.start = self.made = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        self.at, self.start = self.start, 0
        while (number := self.at * workers + worker) < self.size:
            self.at += 1
            self.made += 1
            if number == 11 and self.bad == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 11 and self.bad == "raises":
                raise OSError(5, "no such shard")
            yield torch.tensor([number, torch.rand(()).item()], dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.start = state["at"]


def made(workers: int = 0, persistent: bool | None = None, **settings: Any) -> StreamLoader:
    loader = as_loader(
        Stream(), shuffle=True, seed=1, batch_size=4, num_workers=workers, persistent_workers=persistent, **settings
    )
    assert isinstance(loader, StreamLoader)
    return loader


MORE_WORKERS_THAN_CPUS = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_a_resume_makes_nothing_again() -> None:
    loader = made()
    iterator = loader.iterate(0)
    for _ in range(8):
        next(iterator)
    later = made()
    later.check_state(loader.state_dict(0, batch=8))
    list(later.iterate(0, batch=8))
    assert later.source.dataset.made == 37 - 32


def test_without_its_position_an_epoch_is_replayed() -> None:
    whole = [batch.tolist() for batch in made().iterate(1)]
    assert [batch.tolist() for batch in made().iterate(1, batch=4)] == whole[4:]


class Forgetful(IterableDataset[torch.Tensor]):
    """The same numbers, but it cannot say where it stands."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Stream())


def test_other_workers_cannot_take_up_a_position_inside_an_epoch() -> None:
    loader = made(2)
    iterator = loader.iterate(0)
    next(iterator)
    state = loader.state_dict(0, batch=1)
    iterator.close()
    with pytest.raises(UserError, match=r"continue with data\.num_workers=2"):
        made(0).check_state(state)
    with pytest.raises(UserError, match="seed was 1 and is 2"):
        StreamLoader(Stream(), 4, seed=2, num_workers=2).check_state(state)
    forgetful = StreamLoader(Forgetful(), 4, seed=1, num_workers=2)
    with pytest.raises(UserError, match="order was"):
        forgetful.check_state(state)
    assert "replays" in forgetful.promise


@MORE_WORKERS_THAN_CPUS
def test_other_workers_at_the_end_of_an_epoch_are_reported_what_it_means(caplog: pytest.LogCaptureFixture) -> None:
    loader = made(3)
    with caplog.at_level(logging.WARNING):
        loader.check_state(made(2).state_dict(1))
        loader.check_state(made(2).state_dict(1))
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("data.num_workers was 2 and is 3: ")
    assert message.endswith("divides its samples differently from here on, so the results differ from those with 2")
    assert sum(map(len, loader.iterate(1))) == 37


def test_lengths_are_reported_where_they_are_known() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.size

    for drop_last, length in ((False, 10), (True, 9)):
        loader = StreamLoader(Sized(), 4, seed=0, drop_last=drop_last)
        assert len(loader) == len(list(loader.iterate(0))) == length
    for unknown in (made(), StreamLoader(Sized(), 4, seed=0, num_workers=2)):
        with pytest.raises(TypeError):
            len(unknown)


def test_a_position_is_only_reported_where_it_is() -> None:
    loader = made()
    next(loader.iterate(0))
    with pytest.raises(ValueError, match="the position is"):
        loader.state_dict(0, batch=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_batch_and_worker(workers: int) -> None:
    loader = StreamLoader(Stream(bad="raises"), 4, seed=0, num_workers=workers)
    with pytest.raises(OSError, match="no such shard") as caught:
        list(loader.iterate(2))
    # What a worker raised comes as torch's DataLoader puts it: with the traceback in its text.
    text = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", ()))
    assert ("sample 1 of batch 3 of epoch 2" if workers else "sample 3 of batch 2 of epoch 2") in text
    assert ("in DataLoader worker process 1" in text) is bool(workers)


def test_a_worker_that_dies_is_named() -> None:
    loader = StreamLoader(Stream(bad="killed"), 4, seed=0, num_workers=2)
    with pytest.raises(WorkerError, match=r"data worker 1 .* SIGKILL"):
        list(loader.iterate(2))
    assert multiprocessing.active_children() == []


class Heavy(Stream):
    """Each copy of its state takes the next of `copies_s` seconds, of the processor or of waiting."""

    def __init__(self, copies_s: Sequence[float], *, waits: bool = False) -> None:
        super().__init__()
        self.copies_s, self.waits = iter(copies_s), waits

    def state_dict(self) -> dict[str, Any]:
        took_s = next(self.copies_s, 0.0)
        if self.waits:
            time.sleep(took_s)
        else:
            until = time.thread_time() + took_s
            while time.thread_time() < until:
                pass
        return super().state_dict()


@pytest.mark.parametrize(
    ("copies_s", "waits", "reports"),
    [
        pytest.param([0.05] * 9, False, 1, id="each is long"),
        pytest.param([0.0, 0.05, 0.05, 0.05, 0.0], False, 1, id="three in a row"),
        pytest.param([0.05, 0.05, 0.0, 0.05, 0.05], False, 0, id="never three in a row"),
        pytest.param([0.05] * 9, True, 0, id="waiting is not counted"),
        pytest.param([], False, 0, id="none"),
    ],
)
def test_a_state_that_takes_long_to_copy_is_reported_once(
    copies_s: list[float], waits: bool, reports: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Far from what any copy takes on a slow machine.
    monkeypatch.setattr("trainer_cli.data.stream._LONG_S", 0.04)
    assert len(list(StreamLoader(Heavy(copies_s, waits=waits), 2, seed=0).iterate(0))) > 5
    assert caplog.text.count("ms to copy, for every batch: keep its state_dict() small") == reports


@pytest.mark.parametrize("loader", ["stream", "dataloader"])
def test_another_batch_size_where_batches_are_counted_is_refused_inside_an_epoch_alone(loader: str) -> None:
    def of_size(batch_size: int) -> Any:
        if loader == "stream":
            return StreamLoader(Stream(), batch_size, seed=0)
        return UserLoader(DataLoader(TensorDataset(torch.arange(20)), batch_size, num_workers=1), seed=0)

    one, other = of_size(2), of_size(4)
    batches = one.iterate(0)
    next(batches)
    next(batches)
    middle = one.state_dict(0, samples=4, batch=2)
    with pytest.raises(UserError, match="counted in batches of 2, but its batch size is 4: continue with 2"):
        other.check_state(middle)
    one.check_state(middle)
    other.check_state(one.state_dict(1))
    batches.close()


def test_another_batch_size_of_a_dataloader_whose_sampler_is_walked_may_change_inside_an_epoch() -> None:
    def of_size(batch_size: int) -> UserLoader:
        shuffled = DataLoader(TensorDataset(torch.arange(20)), batch_size, shuffle=True, generator=torch.Generator())
        return UserLoader(shuffled, seed=0)

    straight = [number for (batch,) in of_size(2).iterate(0) for number in batch.tolist()]
    one, other = of_size(2), of_size(5)
    other.check_state(one.state_dict(0, samples=4, batch=2))
    assert other.batches_after(4) == 4
    rest = [batch.tolist() for (batch,) in other.iterate(0, batch=1, samples=4)]
    assert [len(batch) for batch in rest] == [5, 5, 5, 1]
    assert straight[:4] + [number for batch in rest for number in batch] == straight


class Counting(IterableDataset[Any]):
    """Four samples; its state moves."""

    def __init__(self, samples: int = 4) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.at = self.at, 0
        for number in range(first + 1, self.samples + 1):
            self.at = number
            yield torch.tensor(number)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "other": torch.zeros(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Own:
    """A loader that a user made, of batches."""

    def __init__(self, dataset: Counting) -> None:
        self.dataset = dataset
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return (value[None] for value in self.dataset)


# A state that forgets, and one that no checkpoint can hold, which is reported elsewhere.
Resets = type("Resets", (Counting,), {"state_dict": lambda self: {"at": 0}})

Lambdas = type("Lambdas", (Counting,), {"state_dict": lambda self: {"at": lambda: self.at}})


@pytest.mark.parametrize(
    ("dataset", "settings", "warned"),
    [
        # A dataset whose state cannot be copied, given itself, is refused.
        *((Own(make()), {}, warned) for make, warned in (
            (Counting, False), (Resets, True), (lambda: Resets(1), False), (Lambdas, False))),
        *((make(), {"batch_size": 1}, warned) for make, warned in (
            (Counting, False), (Resets, True), (lambda: Resets(1), False))),
        (Resets(), {"batch_size": 1, "num_workers": 2}, True),
    ],
    ids=[
        "loader, moves", "loader, resets", "loader, one batch an epoch", "loader, cannot be copied",
        "dataset, moves", "dataset, resets", "dataset, one batch an epoch", "in workers",
    ],
)  # fmt: skip
def test_a_state_that_never_moves_is_a_warning_after_two_batches(
    dataset: Any, settings: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loader = as_loader(dataset, shuffle=False, seed=0, **settings)
    for epoch in (0, 1):
        for _ in loader.iterate(epoch):
            pass
    loader.close()
    assert caplog.text.count("is the same after two batches") == int(warned)


class Undivided(IterableDataset[torch.Tensor]):
    """Each worker reads all of the numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0))


@pytest.mark.parametrize(
    ("data", "settings", "warned"),
    [
        (Undivided(), {"num_workers": 2}, True),
        (Undivided(), {"num_workers": 1}, False),
        (Undivided(), {}, False),
        (Stream(), {"num_workers": 2}, False),
        (DataLoader(Undivided(), 2, num_workers=2), {}, True),
        (DataLoader(Stream(), 2, num_workers=2), {}, False),
        (DataLoader(TensorDataset(torch.zeros(8)), 2, num_workers=2), {}, False),
    ],
    ids=[
        "stream",
        "one worker",
        "no worker",
        "divided",
        "DataLoader",
        "DataLoader, divided",
        "DataLoader with indices",
    ],
)
def test_workers_that_begin_with_the_same_batch_are_a_warning(
    data: Any, settings: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loader = as_loader(data, shuffle=False, seed=0, **settings)
    for epoch in (0, 1):
        list(loader.iterate(epoch))
    loader.close()
    assert caplog.text.count("begin with the same batch") == int(warned)
    if warned:
        assert "Undivided begin" in caplog.text
        assert "get_worker_info()" in caplog.text


A, B = torch.zeros(2), torch.ones(2)
# Two states after one another, and whether they are certainly equal.
PAIRS = {
    "nested": ({"a": {"b": [A, 1]}}, {"a": {"b": [A, 1]}}, True),
    "nested, moved": ({"a": {"b": [A, 1]}}, {"a": {"b": [B, 1]}}, False),
    "a key more": ({"a": 1}, {"a": 1, "b": 1}, False),
    "a list grows": ({"a": [1]}, {"a": [1, 1]}, False),
    "tuples": ({"a": (A, "x")}, {"a": (A, "x")}, True),
    "other shapes": ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, False),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_states_are_compared_whole(pair: str, caplog: pytest.LogCaptureFixture) -> None:
    first, second, are_equal = PAIRS[pair]
    watch = RepeatWatch(STATE_STAYS, Counting(), watches=True)
    watch.begin()
    watch.see(first)
    watch.see(second)
    assert caplog.text.count("is the same after two batches") == int(are_equal)
