"""Iterable datasets that know where they stand: resumed there exactly, with any workers, persistent or not."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from trainer_cli.checkpoint.format.tree import encode
from trainer_cli.data.adapt import as_loader
from trainer_cli.data.stream import StreamLoader
from trainer_cli.data.user_loader import UserLoader
from trainer_cli.data.workers import WorkerError
from trainer_cli.errors import UserError


class Stream(IterableDataset[torch.Tensor]):
    """Numbers, shared among workers in turn, with one from each random generator. Counts what it makes."""

    def __init__(self, size: int = 37, bad: str | None = None) -> None:
        self.size = size
        self.bad = bad
        self.at = self.start = 0
        self.made = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        self.at, self.start = self.start, 0
        while self.at * workers + worker < self.size:
            number = self.at * workers + worker
            self.at += 1
            self.made += 1
            if number == 11 and self.bad == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 11 and self.bad == "raises":
                raise OSError(5, "no such shard")
            drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
            yield torch.tensor([number, self.epoch, *drawn], dtype=torch.float64)

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


@MORE_WORKERS_THAN_CPUS
@pytest.mark.parametrize(("workers", "persistent"), [(0, None), (1, True), (2, True), (2, False), (3, None)])
def test_a_resume_at_any_batch_goes_on_where_the_dataset_stood(workers: int, persistent: bool | None) -> None:
    loader, again = made(workers, persistent), made(workers, persistent)
    for epoch in (0, 1):
        whole, states = [], []
        for batch in loader.iterate(epoch):
            whole.append(batch.tolist())
            states.append(loader.state_dict(epoch, batch=len(whole)))
        flat = [sample for batch in whole for sample in batch]
        assert sorted(sample[0] for sample in flat) == list(range(37))
        assert {sample[1] for sample in flat} == {epoch}
        for done in range(1, len(whole), 3):
            encode({"data": states[done - 1]})
            again.check_state(states[done - 1])
            assert again.state_dict(epoch, batch=done) == states[done - 1]
            assert [batch.tolist() for batch in again.iterate(epoch, batch=done)] == whole[done:]
        again.check_state(loader.state_dict(epoch))
        assert [batch.tolist() for batch in again.iterate(epoch)] == whole
    loader.close()
    again.close()
    assert multiprocessing.active_children() == []


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [None, True])
def test_a_dataset_that_does_not_know_where_it_stands_is_replayed(workers: int, persistent: bool | None) -> None:
    def one() -> StreamLoader:
        return StreamLoader(Forgetful(), 4, seed=1, num_workers=workers, persistent_workers=persistent)

    loader = one()
    for epoch in (0, 1):
        whole = [batch.tolist() for batch in loader.iterate(epoch)]
        assert sorted(sample[0] for batch in whole for sample in batch) == list(range(37))
        later = one()
        iterator = one().iterate(epoch, batch=3)
        assert next(iterator).tolist() == whole[3]
        state = loader.state_dict(epoch, batch=3)
        later.check_state(state)
        assert later.state_dict(epoch, batch=3) == state
        assert [batch.tolist() for batch in later.iterate(epoch, batch=3)] == whole[3:]
        later.close()
    assert "replays" in loader.promise
    assert len(multiprocessing.active_children()) == (2 if workers and persistent else 0) + (2 if workers else 0)
    del iterator
    loader.close()
    with pytest.raises(UserError, match="order was"):
        loader.check_state(made(workers).state_dict(0))


def test_a_dataset_that_does_not_know_where_it_stands_is_replayed_in_the_same_process_too() -> None:
    loader = StreamLoader(Forgetful(), 4, seed=1)
    whole = [batch.tolist() for batch in loader.iterate(0)]
    left = loader.iterate(0)
    next(left), next(left)
    left.close()
    assert [batch.tolist() for batch in loader.iterate(0, batch=2)] == whole[2:]


def test_a_pass_left_early_does_not_show_in_the_next() -> None:
    for workers in (0, 2):
        loader = made(workers)
        whole = [batch.tolist() for batch in made(workers).iterate(0)]
        iterator = loader.iterate(0)
        next(iterator)
        iterator.close()
        assert [batch.tolist() for batch in loader.iterate(0)] == whole


def test_the_random_state_of_the_training_is_not_touched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate()
    list(made().iterate(0))
    list(made(2).iterate(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_other_workers_cannot_take_up_a_position_inside_an_epoch() -> None:
    loader = made(2)
    iterator = loader.iterate(0)
    next(iterator)
    state = loader.state_dict(0, batch=1)
    with pytest.raises(UserError, match=r"go on with data\.num_workers=2"):
        made(0).check_state(state)
    with pytest.raises(UserError, match="seed was 1 and is 2"):
        StreamLoader(Stream(), 4, seed=2, num_workers=2).check_state(state)


@MORE_WORKERS_THAN_CPUS
def test_other_workers_at_the_end_of_an_epoch_are_reported_what_it_means(caplog: pytest.LogCaptureFixture) -> None:
    loader = made(3)
    with caplog.at_level(logging.WARNING):
        loader.check_state(made(2).state_dict(1))
        loader.check_state(made(2).state_dict(1))
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("data.num_workers was 2 and is 3: ")
    assert message.endswith(
        "shares its samples in another way from here on, so the results differ from those of going on with 2"
    )
    assert sum(map(len, loader.iterate(1))) == 37


def test_no_worker_and_one_are_the_same() -> None:
    here = made(0)
    iterator = here.iterate(0)
    first = next(iterator).tolist()
    one = made(1)
    one.check_state(here.state_dict(0, batch=1))
    assert [first, *(batch.tolist() for batch in one.iterate(0, batch=1))] == [
        batch.tolist() for batch in made(0).iterate(0)
    ]


def test_lengths_are_reported_where_they_are_known() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.size

    assert len(StreamLoader(Sized(), 4, seed=0)) == 10
    assert len(StreamLoader(Sized(), 4, seed=0, drop_last=True)) == 9
    for unknown in (made(), StreamLoader(Sized(), 4, seed=0, num_workers=2)):
        with pytest.raises(TypeError):
            len(unknown)


def test_drop_last_leaves_out_short_batches() -> None:
    assert [len(batch) for batch in made(drop_last=True).iterate(0)] == [4] * 9


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


# torchdata's


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stateful_dataloader_is_put_where_it_was(shuffle: bool) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    class Drawing(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 22

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index, torch.rand(()).item(), random.random()], dtype=torch.float64)

    def one() -> UserLoader:
        return UserLoader(torchdata.StatefulDataLoader(Drawing(), 4, shuffle=shuffle), seed=3)

    loader = one()
    for epoch in (0, 1):
        beginning = loader.state_dict(epoch)
        whole, states = [], []
        for batch in loader.iterate(epoch):
            whole.append(batch.tolist())
            states.append(loader.state_dict(epoch, batch=len(whole)))
        assert sorted(sample[0] for batch in whole for sample in batch) == list(range(22))
        for done in range(1, len(whole)):
            encode({"data": states[done - 1]})
            later = one()
            later.check_state(states[done - 1])
            assert [batch.tolist() for batch in later.iterate(epoch, batch=done)] == whole[done:]
        later = one()
        later.check_state(beginning)
        assert [batch.tolist() for batch in later.iterate(epoch)] == whole
    assert "its own position" in loader.promise
    assert not UserLoader(DataLoader(Drawing(), 4), seed=0).stateful


class Heavy(Stream):
    """Its state takes milliseconds to copy."""

    class State(dict[str, Any]):
        def __deepcopy__(self, memo: Any) -> Any:
            time.sleep(0.005)
            return dict(self)

    def state_dict(self) -> dict[str, Any]:
        return self.State(super().state_dict())


def test_a_state_that_takes_long_to_copy_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    for dataset in (Stream(), Heavy()):
        assert len(list(StreamLoader(dataset, 2, seed=0).iterate(0))) > 2
    assert caplog.text.count("ms to copy, for every batch: keep its state_dict() small") == 1


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
    with pytest.raises(UserError, match="counted in batches of 2, but its batch size is 4: go on with 2"):
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
