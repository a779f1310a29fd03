"""Batches sent ahead: in time, and without changing what is trained on, saved or message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Points, StopAt, Unsized, everything, loader, recorder, same, trainer
from torch.utils.data import DataLoader

from trainer_cli.errors import UserError
from trainer_cli.trainer import training_loop
from trainer_cli.trainer.prefetch import Direct


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
    calls = recorder(book)
    trainer(settings={"max_duration": 3}, callbacks=[calls]).fit(loader(length=12))
    kept = [one for one in book if one in ("send", "receive", "on_after_optimizer_step")]
    assert kept == ["send", "receive"] + 2 * ["send", "on_after_optimizer_step", "receive"] + [
        "on_after_optimizer_step"
    ]


LOADERS = {
    "ours": loader,
    "without length": lambda: Unsized(3),
    "a DataLoader": lambda: DataLoader(Points(10), batch_size=4),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [4, 6])
@pytest.mark.parametrize("accum", [1, 2])
def test_a_training_is_the_same_whether_batches_are_sent_ahead_or_not(
    name: str, stop: int, accum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(ahead: bool) -> Any:
        kind = Ahead if ahead else Direct
        monkeypatch.setattr(training_loop, "device_prefetcher", lambda device: kind([]) if ahead else kind(device))
        one = trainer(settings={"grad_accum_steps": accum, "max_duration": 7}, callbacks=[StopAt(stop)])
        one.fit(LOADERS[name]())
        return everything(one)

    assert same(trained(ahead=True), trained(ahead=False)) == []


def test_a_loader_that_ends_before_its_length_is_reported_when_the_batch_is_needed(book: list[str]) -> None:
    class Short(Unsized):
        def __len__(self) -> int:
            return self.batches + 1

    one = trainer()
    with pytest.raises(UserError, match="ended after 2 batches of epoch 0, but 3 were to come"):
        one.fit(Short(2))
    assert one.progress.step == 2


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
