"""Durations as shares of the run: wherever a duration stands, in every unit of `max_duration`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import ListLogger, assert_resumes_exactly, loader, trainer
from torch.optim import lr_scheduler as lr

from trainer_cli import WarmupCosine
from trainer_cli.addons.sparsity.sparse_training import GMP
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState
from trainer_cli.commands.command_line import main
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.optim.schedulers import scheduler_factory
from trainer_cli.trainer.training_loop import TrainingLoop

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
    sparsity = GMP(0.5, start="0.25dur", stop="0.75dur", every="0.25dur")
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
