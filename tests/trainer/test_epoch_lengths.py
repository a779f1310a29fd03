"""Lengths: epochs whose length changes, and durations as shares of the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import data_loader
from tiny import Line, ListLogger, assert_resumes_exactly, loader, trainer
from torch import Tensor, nn
from torch.optim import lr_scheduler, lr_scheduler as lr
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from trainer_cli import TrainingLoop, WarmupCosine, WarmupLinear, scheduler_factory
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState
from trainer_cli.commands.command_line import main
from trainer_cli.errors import ConfigError, UserError
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
    "a batch sampler": lambda: data_loader(_points(), batch_sampler=Buckets()),
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
    loader: Any = DATA[kind]() if is_loader else DataLoader(DATA[kind](), batch_size=32)
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
    made.fit(data_loader(_points(), batch_size=4))
    assert made.progress.step == 9
    assert not [message for message in caplog.messages if "follow" in message]


# Durations as shares of the run: wherever a duration stands, in every unit of `max_duration`.


LENGTHS = {"steps": 12, "epochs": "4ep", "samples": "40sp", "tokens": "120tok"}
"""The same length, of epochs of three steps, 10 samples and 30 tokens."""


@pytest.mark.parametrize("unit", LENGTHS)
def test_logs_evaluations_saves_and_the_end_are_due_at_shares_of_the_run(tmp_path: Path, unit: str) -> None:
    logger = ListLogger()
    made = trainer(
        settings={
            "max_duration": LENGTHS[unit],
            "log_interval": "0.25dur",
            "eval_interval": "0.5dur",
            "hard_stop": "0.75dur",
        },
        loggers=[logger],
        checkpoint=CheckpointerCallback(
            tmp_path / "saved", save_interval="0.5dur", ephemeral_save_interval="0.25dur", max_checkpoints=9,
            remove="never", save_async=False,
        ),
    )  # fmt: skip
    made.fit(loader(), loader(4))
    assert logger.steps("train/loss") == [3, 6, 9]
    assert logger.steps("val/loss") == [6]
    assert {path.name for path in (tmp_path / "saved").glob("step*")} >= {"step3", "step6", "step9"}
    assert made.progress.step == 9


def test_a_share_of_less_than_a_step_is_every_step() -> None:
    logger = ListLogger()
    trainer(settings={"max_duration": 5, "log_interval": "0.1dur"}, loggers=[logger]).fit(loader())
    assert logger.steps("train/loss") == [1, 2, 3, 4, 5]


def test_callbacks_count_shares_of_the_run(tmp_path: Path) -> None:
    ema, swa = EMA(start="0.5dur"), SWA(start="0.5dur", every="0.25dur")
    saver = SaveCheckpointState(every="0.5dur")
    sparse_training = pytest.importorskip("trainer_cli.addons.sparsity.sparse_training")
    sparsity = sparse_training.GMP(0.5, start="0.25dur", stop="0.75dur", every="0.25dur")
    stopping = EarlyStopping(metric="val/loss", patience="0.25dur", min_delta=100.0)
    made = trainer(
        settings={"max_duration": "4ep", "eval_interval": 1},
        callbacks=[ema, stopping, saver],
        sparsity=sparsity,
        checkpoint=CheckpointerCallback(tmp_path / "saved", save_async=False),
        run_dir=tmp_path,
    )
    made.fit(loader(), loader(4))
    assert (sparsity._schedule.start, sparsity._schedule.stop, sparsity._schedule.every) == (3, 9, 3)
    assert made.progress.step == 1 + 3, "the first evaluation is the best one"
    other = trainer(settings={"max_duration": "4ep"}, callbacks=[swa])
    other.fit(loader())
    assert other.progress.step == 12


@pytest.mark.parametrize("length", LENGTHS.values())
def test_arguments_of_schedules_are_shares_of_the_run(length: Any) -> None:
    loop = TrainingLoop(max_duration=length, eval_interval=None, log_interval=None)
    if isinstance(length, str) and length.endswith("tok"):
        loop.steps_per_epoch = 3
    rates: dict[str, Any] = {
        "warm": scheduler_factory(WarmupCosine, loop, warmup="0.25dur", total_steps=12),
        "by epoch": scheduler_factory(lr.StepLR, loop, step_size="0.4dur", interval="epoch"),
    }
    made = trainer(schedulers=rates, settings={"max_duration": length})
    made.loop = loop
    if isinstance(length, str) and length.endswith("tok"):
        with pytest.raises(UserError, match="which is not a number of steps"):
            made.fit(loader())
        return
    made.fit(loader())
    assert made.schedulers.live["warm"]._warmup == 3
    assert made.schedulers.live["by epoch"].step_size == 2


def linear_with_warmup(optimizer: Any, num_warmup_steps: int, num_training_steps: int) -> lr.LambdaLR:
    """A schedule as other libraries make them: a function that wants the length of the training."""
    return lr.LambdaLR(
        optimizer,
        lambda step: (
            step / num_warmup_steps if step < num_warmup_steps
            else (num_training_steps - step) / (num_training_steps - num_warmup_steps)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("length", [length for length in LENGTHS.values() if not str(length).endswith("tok")])
def test_the_whole_run_is_the_number_of_its_steps_for_any_schedule(tmp_path: Path, length: Any) -> None:
    def fit(folder: Path, *callbacks: Any) -> Any:
        loop = TrainingLoop(max_duration=length, eval_interval=None, log_interval=None)
        made = trainer(
            schedulers=scheduler_factory(
                linear_with_warmup, loop, num_warmup_steps="0.25dur", num_training_steps="1dur"
            ),
            callbacks=callbacks,
            checkpoint=CheckpointerCallback(folder),
        )
        made.loop = loop
        made.fit(loader())
        return made

    straight, _ = assert_resumes_exactly(fit, tmp_path, 2, 7)
    assert straight.progress.step == 12
    assert straight.schedulers.live["scheduler"].lr_lambdas[0](6) == 6 / 9


def test_the_run_itself_is_no_share_of_itself() -> None:
    with pytest.raises(
        ConfigError, match=r"loop\.max_duration is '0\.5dur', but it must be counted in steps, epochs, samples"
    ):
        TrainingLoop(max_duration="0.5dur")
    with pytest.raises(ConfigError, match="a share of the run is at most 1dur"):
        TrainingLoop(eval_interval="1.5dur")


def test_a_plan_shows_what_is_due_at_shares_of_the_run(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = ("loop.eval_interval=0.5dur", "checkpoint.save_interval=0.5dur", "scheduler.warmup=0.1dur")
    assert main(["plan", "+experiment=digits_mlp", "loop.max_duration=40", *shares]) == 0
    printed = capsys.readouterr().out
    assert "every 20 steps" in printed
    assert "step20" in printed
