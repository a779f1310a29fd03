"""The claims of Composer's tests of evaluation: when it evaluates, on which samples, and on how many batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from peer_runs import Numbers, Stream, Sum, Watcher, batches, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_cli import Callback, Trainer, ValidationLoop


def check_number_of_evaluations(
    folder: Path,
    interval: str,
    max_duration: int | str,
    count: int,
    length: int = 10,
    batch_size: int = 2,
    width: int = 4,
) -> None:
    watcher = Watcher()
    made = make_trainer(max_duration, watcher, eval_interval=interval, eval_steps=2, model=lambda: Sum(width))
    made.fit(batches(length, batch_size, width), batches(10, 1, width))
    steps = [step for step, _, number in watcher.evaluations if number == 2]
    assert len(steps) == count == len(set(steps))
    assert steps[-1] == made.progress.step, "the end is always evaluated"


def check_changed_batch(folder: Path) -> None:
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


def check_every_sample_once(folder: Path, size: int, batch_size: int) -> None:
    model = Zero()
    made = make_trainer(model=model, optimizer=None)
    metrics = made.validate(DataLoader(Parity(size), batch_size=batch_size))["val"]
    assert model.seen == list(range(size))
    assert metrics["accuracy"] == pytest.approx(1 - (size // 2) / size, abs=1e-7)


def check_subset(folder: Path, by_trainer: bool) -> None:
    watcher = Watcher()
    made = make_trainer(1, watcher, **({"eval_steps": 1} if by_trainer else {}))
    made.validate(batches(10, 1), loop=None if by_trainer else ValidationLoop(eval_steps=1))
    assert watcher.evaluations == [(0, "val", 1)]


def check_first_batches_of_a_stream(folder: Path) -> None:
    watcher = Watcher()
    make_trainer(2, watcher, eval_interval=1, eval_steps=1).fit(batches(), DataLoader(Stream(), batch_size=2))
    assert watcher.evaluations == [(1, "val", 1), (2, "val", 1)]


def check_stream_is_read_to_its_end(folder: Path) -> None:
    class StopsIn(Callback):
        def on_validate_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 20:
                trainer.stop("it has no end", finished=False)

    watcher = Watcher()
    make_trainer(1, watcher).validate(DataLoader(Stream(9), batch_size=2))
    assert watcher.evaluations == [(0, "val", 5)]
    result = make_trainer(2, StopsIn(), eval_interval=1).fit(batches(), DataLoader(Stream(), batch_size=2))
    assert (result.finished, result.step, result.reason) == (False, 1, "it has no end")


def check_list_with_something_else(folder: Path) -> None:
    made = make_trainer(optimizer=None)
    with pytest.raises(TypeError, match=r"batch must contain tensors.*; found <class 'torch\.utils\.data"):
        made.validate([batches(), "something else"])
    assert set(made.validate([batches(), batches()])) == {"validate_0", "validate_1"}


CLAIMS: list[Claim] = [
    *claims(
        "test_trainer_eval: test_eval_with_nondivisible_dataset",
        check_every_sample_once,
        {
            f"{size} samples in batches of {batch_size}: each once, and the accuracy is exact": (size, batch_size)
            for size in (12, 13, 14, 15, 16)
            for batch_size in (1, 2, 3, 4, 6)
        },
    ),
    *claims(
        "test_trainer_eval: test_trainer_eval_subset_num_batches",
        check_subset,
        {
            "the trainer's number of batches holds for an evaluation outside of a fit": (True,),
            "an evaluation's own number of batches holds": (False,),
        },
    ),
    *claims(
        "test_trainer_eval: test_eval_token_interval",
        check_number_of_evaluations,
        {
            f"every {interval}, {batch_size} sequences of {width} a step, 5 steps: {count} evaluations": (
                interval, 5, count, 100, batch_size, width,
            )
            for interval, batch_size, width, count in (
                ("1tok", 1, 1, 5), ("1tok", 1, 16, 5), ("1tok", 4, 1, 5), ("1tok", 4, 16, 5), ("1tok", 5, 1, 5),
                ("1tok", 5, 16, 5), ("64tok", 1, 1, 1), ("64tok", 1, 16, 2), ("64tok", 4, 1, 1), ("64tok", 4, 16, 5),
                ("64tok", 5, 1, 1), ("64tok", 5, 16, 5), ("65tok", 1, 1, 1), ("65tok", 1, 16, 1), ("65tok", 4, 1, 1),
                ("65tok", 4, 16, 4), ("65tok", 5, 1, 1), ("65tok", 5, 16, 5),
            )
        },
    ),
    *claims(
        "test_trainer_eval: test_eval_sample_interval",
        check_number_of_evaluations,
        {
            f"every {interval}, {batch_size} samples a step, 5 steps: {count} evaluations": (
                interval, 5, count, 100, batch_size,
            )
            for interval, batch_size, count in (
                ("1sp", 1, 5), ("1sp", 4, 5), ("1sp", 5, 5), ("4sp", 1, 2), ("4sp", 4, 5), ("4sp", 5, 5),
                ("5sp", 1, 1), ("5sp", 4, 4), ("5sp", 5, 5),
            )
        },
    ),
    *claims(
        "test_trainer_eval: test_eval_at_fit_end",
        check_number_of_evaluations,
        {
            f"every {interval} in a training of {duration}, 5 steps an epoch: {count} evaluations": (
                interval, duration, count,
            )
            for interval, duration, count in (
                ("1ep", "5ep", 5), ("2ep", "8ep", 4), ("10st", "8ep", 4), ("1ep", "4ep", 4), ("5st", "4ep", 4),
                ("5st", "10st", 2), ("3ep", "8ep", 3),
            )
        },
    ),
    *claims(
        "test_trainer_eval: test_eval_batch_can_be_modified",
        check_changed_batch,
        {"a callback may change a batch of an evaluation before the model sees it": ()},
    ),
    *claims(
        "test_trainer_eval: test_infinite_eval_dataloader",
        check_first_batches_of_a_stream,
        {"a stream without end is evaluated on its first batch": ()},
    ),
    *claims(
        "test_trainer_eval: test_infinite_eval_dataloader",
        check_stream_is_read_to_its_end,
        {"a stream without end is refused unless the number of batches is given": ()},
        difference="A loader without a length may end, so it is read to its end; a stop ends one without end.",
    ),
    *claims(
        "test_trainer_eval: test_evaluator_dataloader_value_error",
        check_list_with_something_else,
        {"a list of a loader and something else is refused": ()},
        difference="Such a list counts as a dataset of samples, and torch, which cannot batch them, raises its error.",
    ),
]  # fmt: skip


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
