"""The claims of Composer's tests of evaluation: when it evaluates, on which samples, and on how many batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer_runs import Numbers, Stream, Sum, Watcher, batches, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_cli import Callback, Trainer, ValidationLoop


@pytest.mark.parametrize(
    ("interval", "batch_size", "width", "count"),
    [
        ("1tok", 1, 1, 5),
        ("1tok", 5, 16, 5),
        ("64tok", 1, 16, 2),
        ("64tok", 4, 1, 1),
        ("64tok", 4, 16, 5),
        ("65tok", 1, 16, 1),
        ("65tok", 4, 16, 4),
        ("65tok", 5, 16, 5),
        ("1sp", 4, 4, 5),
        ("4sp", 1, 4, 2),
        ("4sp", 5, 4, 5),
        ("5sp", 1, 4, 1),
        ("5sp", 4, 4, 4),
    ],
)
def test_tokens_and_samples_count_evaluations(interval: str, batch_size: int, width: int, count: int) -> None:
    """Of five steps; a sample has a token for each of its numbers."""
    watcher = Watcher()
    made = make_trainer(5, watcher, eval_interval=interval, eval_steps=2, model=lambda: Sum(width))
    made.fit(batches(100, batch_size, width), batches(10, 1, width))
    steps = [step for step, _, number in watcher.evaluations if number == 2]
    assert len(steps) == count == len(set(steps))
    assert steps[-1] == made.progress.step, "the end is always evaluated"


def test_a_callback_may_change_a_batch_of_an_evaluation_before_the_model_sees_it() -> None:
    class Blank(Callback):
        def on_validate_batch_start(self, trainer: Trainer, model: Any, batch: Tensor, batch_idx: int) -> None:
            batch.zero_()

    class Doubled(Callback):
        def on_before_forward(self, trainer: Trainer, model: Any, batch: Any, args: list[Any], kwargs: Any) -> None:
            if not model.training:
                args[0] = args[0] * 2

    seen: list[Tensor] = []

    class Looks(Sum):
        def forward(self, batch: Tensor) -> Any:
            seen.append(batch.clone())
            return super().forward(batch)

    for callback, factor in ((Blank(), 0.0), (Doubled(), 2.0)):
        seen.clear()
        make_trainer(1, callback, model=Looks).fit(batches(2, 2), batches(2, 2))
        assert torch.equal(seen[-1], seen[0] * factor)


class Parity(Numbers):
    """Each sample's index; odd ones are of class 1."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(index % 2)])


class Zero(nn.Module):
    """Calls every sample of class 0, and notes the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, batch: Tensor) -> Any:
        self.seen += [int(index) for index in batch[:, 0]]
        return {"loss": batch[:, 1].mean(), "accuracy": (batch[:, 1] == 0).float().mean()}


@pytest.mark.parametrize(("size", "batch_size"), [(12, 4), (12, 1), (13, 6), (14, 3), (15, 2), (16, 6)])
def test_every_sample_is_evaluated_once(size: int, batch_size: int) -> None:
    model = Zero()
    made = make_trainer(model=model, optimizer=None)
    metrics = made.validate(DataLoader(Parity(size), batch_size=batch_size))["val"]
    assert model.seen == list(range(size))
    assert metrics["accuracy"] == pytest.approx(1 - (size // 2) / size, abs=1e-7)


@pytest.mark.parametrize("by_trainer", [True, False])
def test_an_evaluation_takes_its_number_of_batches(by_trainer: bool) -> None:
    watcher = Watcher()
    made = make_trainer(1, watcher, **({"eval_steps": 1} if by_trainer else {}))
    made.validate(batches(10, 1), loop=None if by_trainer else ValidationLoop(eval_steps=1))
    assert watcher.evaluations == [(0, "val", 1)]


def test_a_stream_without_end_is_evaluated_on_its_first_batch() -> None:
    watcher = Watcher()
    make_trainer(2, watcher, eval_interval=1, eval_steps=1).fit(batches(), DataLoader(Stream(), batch_size=2))
    assert watcher.evaluations == [(1, "val", 1), (2, "val", 1)]


def test_a_stream_is_evaluated_to_its_end() -> None:
    class StopsIn(Callback):
        def on_validate_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 20:
                trainer.stop("it has no end", finished=False)

    watcher = Watcher()
    make_trainer(1, watcher).validate(DataLoader(Stream(9), batch_size=2))
    assert watcher.evaluations == [(0, "val", 5)]
    result = make_trainer(2, StopsIn(), eval_interval=1).fit(batches(), DataLoader(Stream(), batch_size=2))
    assert (result.finished, result.step, result.reason) == (False, 1, "it has no end")


def test_a_list_with_something_else_counts_as_samples() -> None:
    made = make_trainer(optimizer=None)
    with pytest.raises(TypeError, match=r"batch must contain tensors.*; found <class 'torch\.utils\.data"):
        made.validate([batches(), "something else"])
    assert set(made.validate([batches(), batches()])) == {"validate_0", "validate_1"}
