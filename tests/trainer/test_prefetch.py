"""Batches sent ahead: in time, and without changing what is trained on, saved or message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import data_loader
from tiny import Points, StopAt, Unsized, assert_resumes_exactly, everything, loader, on, recorder, same, trainer
from torch.utils.data import DataLoader, IterableDataset

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.data.adapt import as_loader
from trainer_cli.data.stream import StreamLoader
from trainer_cli.errors import UserError
from trainer_cli.steps.progress import Progress
from trainer_cli.trainer import training_loop
from trainer_cli.trainer.prefetch import Direct, TrainBatches
from trainer_cli.trainer.time_account import TimeAccount


class Ahead(Direct):
    """Sends ahead, as on a device with streams, and writes down what happens when."""

    ahead = True

    def __init__(self, book: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.book = book

    def send(self, batch: Any) -> Any:
        self.book.append("send")
        return [batch]

    def receive(self, sent: Any) -> Any:
        self.book.append("receive")
        return sent[0]


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything is sent ahead, and this is what happened."""
    book: list[str] = []
    monkeypatch.setattr(training_loop, "device_prefetcher", lambda device: Ahead(book))
    return book


def test_the_next_batch_is_on_its_way_before_this_one_has_made_its_step(book: list[str]) -> None:
    trainer(settings={"max_duration": 3}, callbacks=[recorder(book)]).fit(loader(length=12))
    kept = [each for each in book if each in ("send", "receive", "on_after_optimizer_step")]
    a_step = ["send", "on_after_optimizer_step", "receive"]
    assert kept == ["send", "receive", *a_step, *a_step, "on_after_optimizer_step"]


LOADERS: dict[str, Callable[[], Any]] = {
    "ours": loader,
    "without length": lambda: Unsized(3),
    "a DataLoader": lambda: data_loader(Points(10), batch_size=4),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(("stop", "accum"), [(4, 1), (6, 2)])
def test_a_training_is_the_same_whether_batches_are_sent_ahead_or_not(
    name: str, stop: int, accum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(prefetcher: Any) -> Any:
        monkeypatch.setattr(training_loop, "device_prefetcher", prefetcher)
        made = trainer(settings={"grad_accum_steps": accum, "max_duration": 7}, callbacks=[StopAt(stop)])
        made.fit(LOADERS[name]())
        return everything(made)

    assert same(trained(lambda device: Ahead([])), trained(Direct)) == []


class Shards(IterableDataset[Any]):
    """Ten samples of unknown number; its state moves with each."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.at = self.at, 0
        for number in range(first + 1, 11):
            self.at = number
            x = torch.full((2,), float(number))
            yield x, x.sum()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("prefetcher", [Direct, lambda device: Ahead([])], ids=["direct", "ahead"])
@pytest.mark.parametrize("stops", [(2,), (5,), (3, 4)], ids=str)
def test_a_stream_of_unknown_length_resumes_after_the_batch_trained_on(
    stops: tuple[int, ...], prefetcher: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its next batch is fetched before the save, to see whether the epoch is over; an epoch has three batches."""
    monkeypatch.setattr(training_loop, "device_prefetcher", prefetcher)
    seen: list[list[float]] = []

    def fit(folder: Path, *callbacks: Any) -> Any:
        def note(made: Any, model: Any, batch: Any, *more: Any) -> None:
            seen.append(batch[0][:, 0].tolist())

        saver = CheckpointerCallback(folder, save_interval=100, save_async=False)
        made = trainer(
            lr=0.001, callbacks=[*callbacks, on(on_before_forward=note)], checkpoint=saver, settings={"max_duration": 8}
        )
        made.fit(StreamLoader(Shards(), 4, seed=1))
        return made

    assert_resumes_exactly(fit, tmp_path, *stops)
    epoch = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert seen == [*epoch, *epoch, *epoch[:2]] * 2


def test_a_batch_that_was_sent_ahead_is_forgotten_where_the_training_goes_on_elsewhere() -> None:
    batches = TrainBatches(as_loader(Unsized(4), shuffle=False, seed=0), Ahead([]), None, TimeAccount())
    progress = Progress()
    assert float(batches.next(progress)[0][0, 0]) == 0
    progress.batch = 1
    assert not batches.is_over(progress)
    batches.close()
    progress.batch = 3
    assert float(batches.next(progress)[0][0, 0]) == 3
    batches.close()


def test_the_state_before_a_batch_that_was_sent_ahead_is_of_that_position_alone() -> None:
    loader = StreamLoader(Shards(), 4, seed=1)
    batches = TrainBatches(loader, Ahead([]), None, TimeAccount())
    progress = Progress()
    beginning = batches.state(progress)
    batches.next(progress)
    progress.batch = 1
    assert not batches.is_over(progress)
    after = batches.state(progress)
    assert after != beginning
    batches.end()
    assert batches.state(progress) == after
    # A checkpoint of another position is loaded.
    loader.check_state(beginning)
    progress.batch = 0
    assert batches.state(progress) == beginning
    batches.close()
    progress.epoch, progress.batch = 1, 0
    assert batches.state(progress) == {**beginning, "epoch": 1}


def test_a_loader_that_ends_before_its_length_is_reported_when_the_batch_is_needed(book: list[str]) -> None:
    short = type("Short", (Unsized,), {"__len__": lambda self: self.batches + 1})(2)
    made = trainer()
    with pytest.raises(UserError, match="ended after 2 batches of epoch 0, but 3 were expected"):
        made.fit(short)
    assert made.progress.step == 2


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped inside an epoch", "failed"])
def test_a_loader_that_does_not_end_cleanly_changes_neither_the_result_nor_the_error(
    stopped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Unclean:
        """The iterator of a DataLoader whose workers do not end as they should."""

        def __init__(self, batches: Any) -> None:
            self.batches = batches

        def __next__(self) -> Any:
            return next(self.batches)

        def _shutdown_workers(self) -> None:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    class Loader(DataLoader[Any]):
        def __iter__(self) -> Any:
            return Unclean(super().__iter__())

    ends = StopAt(2) if stopped else recorder([], fail_in=("on_after_optimizer_step",), error=ZeroDivisionError)
    training = trainer(callbacks=[ends])
    if stopped:
        assert training.fit(Loader(Points(12), 2)).step == 2
    else:
        with pytest.raises(ZeroDivisionError):
            training.fit(Loader(Points(12), 2))
    assert "a loader did not end cleanly: RuntimeError: DataLoader worker (pid 7) is killed" in caplog.text
