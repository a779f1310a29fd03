"""The time of a training, divided among activities."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tiny import Line, ListLogger, Points, loader, trainer

from trainer_cli import CheckpointerCallback
from trainer_cli.data.loader import Loader
from trainer_cli.policy import Occasion
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.trainer import Trainer

PAUSE_S = 0.02


class SlowLine(Line):
    """Takes a while in training, and twice as long in an evaluation."""

    def forward(self, batch: Any) -> Any:
        time.sleep(PAUSE_S if self.training else 2 * PAUSE_S)
        return super().forward(batch)


class SlowPoints(Points):
    def __getitem__(self, index: int) -> Any:
        time.sleep(PAUSE_S)
        return super().__getitem__(index)


def saving(folder: Path, steps: int, log_interval: int | None = None, **more: Any) -> Trainer:
    """A trainer that saves every second step."""
    return trainer(
        SlowLine,
        checkpoint=CheckpointerCallback(folder, save_interval=2, save_async=False),
        settings={"max_duration": steps, "log_interval": log_interval, "eval_interval": None},
        **more,
    )


def test_each_activity_has_its_seconds_and_together_they_are_all_time(tmp_path: Path) -> None:
    began = time.monotonic()
    trained = saving(tmp_path, 4)
    trained.fit(Loader(SlowPoints(4), 1, shuffle=True, seed=5), loader(1, 1))
    seconds, elapsed_s = trained.metric_logger.time.seconds(), time.monotonic() - began
    assert seconds["training"] >= 4 * PAUSE_S
    assert seconds["data"] >= 4 * PAUSE_S
    assert seconds["evaluation"] >= 2 * PAUSE_S
    assert seconds["saving"] > 0
    assert seconds["loading"] == 0
    # The account begins when the trainer is made, after the model.
    assert 8 * PAUSE_S < sum(seconds.values()) <= elapsed_s + 0.01


def test_training_that_led_to_the_checkpoint_of_a_resume_is_kept(tmp_path: Path) -> None:
    first, second = saving(tmp_path / "x", 5), saving(tmp_path / "y", 4)
    first.fit(loader(8, 1))
    second.fit(loader(8, 1), ckpt_path=tmp_path / "x" / "step2")
    account = second.metric_logger.time
    assert account.seconds()["loading"] > 0
    # Two steps of the first training, and not the three after its checkpoint.
    before_s = account.kept_s() - account.seconds()["training"]
    assert 2 * PAUSE_S <= before_s < first.metric_logger.time.kept_s() - 2 * PAUSE_S


def test_of_a_checkpoint_of_an_earlier_version_all_counted_seconds_are_kept() -> None:
    trained = trainer()
    trained.metric_logger.load_state_dict(None, trained_s=7.0)
    assert trained.metric_logger.time.kept_s() == 7.0
    trained.metric_logger.load_state_dict({"": 3.5, "jsonl": {}}, trained_s=7.0)
    assert trained.metric_logger.time.kept_s() == 3.5


class GoesBack(Callback):
    """Asks once to go back from step 3."""

    went = False

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.progress.step == 3 and not self.went:
            self.went = True
            trainer.ask_to_roll_back()


def test_steps_that_a_training_goes_back_from_are_not_kept(tmp_path: Path) -> None:
    back = GoesBack()
    trained = saving(tmp_path, 4, callbacks=[back])
    trained.fit(loader(16, 1))
    account = trained.metric_logger.time
    assert back.went
    assert account.seconds()["training"] - account.kept_s() >= PAUSE_S


def test_the_duration_profiler_logs_the_seconds_of_saves_and_loads(tmp_path: Path) -> None:
    profiler = pytest.importorskip("trainer_cli.addons.inspect.profiling").DurationProfiler()
    saving(tmp_path, 2).fit(loader(8, 1))
    logger = ListLogger()
    saving(tmp_path, 7, log_interval=1, callbacks=[profiler], loggers=[logger]).fit(loader(8, 1))
    seconds = {record.step: record.metrics for record in logger.records}
    # In each record, so that a resumed run has the same names.
    assert logger.steps("train/time/loading") == logger.steps("train/time/saving") == list(seconds) == [3, 4, 5, 6, 7]
    assert [step for step, metrics in seconds.items() if metrics["train/time/loading"] > 0] == [3]
    # With the record after each save, of steps 4 and 6; the one of step 2 was in another process.
    assert {5, 7} <= {step for step, metrics in seconds.items() if metrics["train/time/saving"] > 0}


def test_the_save_before_the_first_step_counts_as_one(tmp_path: Path) -> None:
    class Slow(Callback):
        def on_save_opportunity(self, trainer: Trainer, occasion: Occasion) -> None:
            if occasion is Occasion.pre_train:
                time.sleep(5 * PAUSE_S)

    trained = saving(tmp_path, 1, callbacks=[Slow()])
    trained.fit(loader(4, 1))
    assert trained.metric_logger.time.seconds()["saving"] >= 5 * PAUSE_S
