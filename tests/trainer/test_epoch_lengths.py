"""Data whose length changes from epoch to epoch: trained on as by a plain loop, and resumed bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, ListLogger, assert_resumes_exactly, trainer
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from trainer_cli import TrainingLoop, WarmupCosine, WarmupLinear, scheduler_factory
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping
from trainer_cli.optim.scheduler_intervals import Scheduled
from trainer_cli.trainer.hooks import Callback

EPOCHS = 4


class ByEpoch(Dataset[Any]):
    """As many points as the epoch says."""

    lengths = (4, 9, 3, 12)

    def __init__(self) -> None:
        self.length = self.lengths[0]

    def set_epoch(self, epoch: int) -> None:
        self.length = self.lengths[min(epoch, EPOCHS - 1)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.length:
            raise IndexError(index)
        x = torch.tensor([index / 10, 1.0])
        return x, x.sum()


class Growing(ByEpoch):
    lengths = (2, 4, 8, 10)


class Buckets:
    """Batches of about nine tokens, in another order and number in each epoch."""

    sizes = (3, 5, 2, 7, 1, 4, 6, 2, 3, 5, 1, 2)
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        order, batch = list(range(12)), list[int]()
        random.Random(self.epoch).shuffle(order)
        for index in order:
            if batch and sum(self.sizes[i] for i in batch) + self.sizes[index] > 9:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def _points() -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor([index / 10, 1.0]), torch.tensor(index / 10 + 1)) for index in range(12)]


DATA: dict[str, Callable[[], Any]] = {
    "a DataLoader": lambda: DataLoader(ByEpoch(), batch_size=4),
    "a DataLoader with workers": lambda: DataLoader(ByEpoch(), batch_size=4, num_workers=1),
    "a DataLoader that shuffles": lambda: DataLoader(ByEpoch(), batch_size=4, shuffle=True),
    "a DataLoader that drops the last": lambda: DataLoader(Growing(), batch_size=2, drop_last=True),
    "a batch sampler": lambda: DataLoader(_points(), batch_sampler=Buckets()),  # type: ignore[arg-type]
    "a dataset": ByEpoch,
    "a growing dataset": Growing,
}


class See(Callback):
    def __init__(self) -> None:
        self.seen: dict[int, list[float]] = {}

    def on_train_batch_start(self, trainer: Any, model: nn.Module, batch: Any, batch_idx: int) -> None:
        self.seen.setdefault(trainer.progress.epoch, []).extend(batch[0][:, 0].tolist())


@pytest.mark.parametrize("kind", [kind for kind in DATA if kind != "a DataLoader that shuffles"])
def test_a_run_trains_on_what_a_plain_loop_trains_on(kind: str) -> None:
    logger, see = ListLogger(), See()
    is_loader = isinstance(DATA[kind](), DataLoader)
    made = trainer(
        callbacks=[see],
        loggers=[logger],
        settings={"max_duration": f"{EPOCHS}ep", "log_interval": 1, "eval_interval": "1ep"},
    )
    data = DATA[kind]()
    result = made.fit(data, DATA["a DataLoader"]())
    plain_model = trainer().model
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    loader = DATA[kind]() if is_loader else DataLoader(DATA[kind](), batch_size=32)
    epochs: dict[int, list[float]] = {}
    losses, ends = list[float](), list[int]()
    for epoch in range(EPOCHS):
        for part in (loader.dataset, loader.batch_sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for batch in loader:
            epochs.setdefault(epoch, []).extend(batch[0][:, 0].tolist())
            outputs = plain_model(batch)
            optimizer.zero_grad()
            outputs["loss"].backward()
            optimizer.step()
            losses.append(outputs["loss"].item())
        ends.append(len(losses))
    if is_loader:
        assert see.seen == epochs
    else:
        assert {epoch: sorted(seen) for epoch, seen in see.seen.items()} == epochs
    assert (result.step, made.progress.epoch) == (len(losses), EPOCHS)
    logged = [record.metrics["train/loss"] for record in logger.records if "train/loss" in record.metrics]
    assert logged == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(made.model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    evaluated = [record.step for record in logger.records if "val/loss" in record.metrics]
    assert evaluated == ends


SCHEDULES: dict[str, Callable[[TrainingLoop], Any]] = {
    "of evaluations": lambda loop: Scheduled(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0)),
    "of the length": lambda loop: scheduler_factory(WarmupCosine, loop, warmup="1ep", min_ratio=0.1),
    "of a share": lambda loop: scheduler_factory(lr_scheduler.StepLR, loop, step_size="0.5dur", interval="step"),
    "of epochs": lambda loop: scheduler_factory(WarmupLinear, loop, interval="epoch"),
}


def _fit(kind: str, folder: Path, *callbacks: Callback, schedule: str = "of evaluations") -> Any:
    loop = TrainingLoop(max_duration=f"{EPOCHS}ep", log_interval=2, eval_interval="0.5ep")
    made = trainer(
        callbacks=[*callbacks, EarlyStopping(patience="1.5ep", min_delta=9)],
        schedulers=SCHEDULES[schedule](loop),
        loop=loop,
        checkpoint=CheckpointerCallback(folder, save_interval="1ep", save_async=False),
    )
    data = DATA[kind]()
    made.fit(data, [(torch.ones(2, 2), torch.ones(2))])
    return made


@pytest.mark.parametrize("kind", DATA)
def test_a_run_on_epochs_of_several_lengths_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    steps = _fit(kind, tmp_path / "whole").progress.step
    assert_resumes_exactly(partial(_fit, kind), tmp_path, *range(1, steps, 2))


@pytest.mark.parametrize("kind", ["a DataLoader", "a DataLoader that drops the last", "a batch sampler"])
@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "of evaluations"])
def test_a_resume_keeps_the_steps_that_schedules_were_made_for(schedule: str, kind: str, tmp_path: Path) -> None:
    fit = partial(_fit, kind, schedule=schedule)
    steps = fit(tmp_path / "whole").progress.step
    assert_resumes_exactly(fit, tmp_path, *range(1, steps))


class Buffer(ByEpoch):
    """A buffer that a callback fills after each evaluation."""

    def set_epoch(self, epoch: int) -> None:
        pass


class Fill(Callback):
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def on_after_evaluation(self, trainer: Any, metrics: Any) -> None:
        self.buffer.length += 4


@pytest.mark.parametrize("wrap", [lambda data: data, partial(DataLoader, batch_size=4, shuffle=True)])
def test_samples_that_a_callback_adds_are_trained_on_in_the_next_epoch(
    wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    buffer, see = Buffer(), See()
    fill = Fill(buffer)
    made = trainer(callbacks=[see, fill], settings={"max_duration": "3ep", "eval_interval": "1ep"})
    made.fit(wrap(buffer), [(torch.ones(2, 2), torch.ones(2))])
    assert [len(seen) for seen in see.seen.values()] == [4, 8, 12]
    changes = [message for message in caplog.messages if "durations in epochs follow" in message]
    assert len(changes) == (0 if isinstance(wrap(buffer), ByEpoch) else 1), "one batch of 32 holds all"


def test_epochs_that_stay_as_they_are_are_no_reason_for_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = trainer(Line, settings={"max_duration": "3ep"})
    made.fit(DataLoader(_points(), batch_size=4))  # type: ignore[arg-type]
    assert made.progress.step == 9
    assert not [message for message in caplog.messages if "follow" in message]
