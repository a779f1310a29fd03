"""Texts, images and histograms: logged at their step, once, in the form that every logger takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ListLogger, StopAt, StopInEvaluation, loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import UserError
from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.tensorboard import TensorBoardLogger
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.metric_logger import histogram_medium, image_medium
from trainer_cli.trainer.train_step import TrainStep

RAMP = [[0.0, 0.5, 1.0]]


@pytest.mark.parametrize(
    ("value", "shape", "expected"),
    [
        (np.array(RAMP), (1, 3, 1), [0, 127, 255]),
        (torch.tensor(RAMP, dtype=torch.bfloat16), (1, 3, 1), [0, 127, 255]),
        (torch.tensor(RAMP, requires_grad=True)[None], (1, 3, 1), [0, 127, 255]),
        (torch.tensor([[-1.0, 2.0, torch.nan, torch.inf]]), (1, 4, 1), [0, 255, 0, 255]),
        (torch.tensor([[0, 7, 300, -5]]), (1, 4, 1), [0, 7, 255, 0]),
        (np.array([[0, 200]], dtype=np.uint8), (1, 2, 1), [0, 200]),
        (torch.tensor([[True, False]]), (1, 2, 1), [255, 0]),
        (np.arange(6, dtype=np.uint8).reshape(3, 1, 2), (1, 2, 3), [0, 2, 4, 1, 3, 5]),
        (np.zeros((4, 2, 5)), (2, 5, 4), [0] * 40),
    ],
)
def test_an_image_becomes_bytes_with_its_channels_last(value: Any, shape: tuple[int, ...], expected: list[int]) -> None:
    found = image_medium("x", value).value
    assert (found.dtype, found.shape, found.reshape(-1).tolist()) == (np.uint8, shape, expected)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (8, 8, 3), (1, 1, 3, 3), (0, 5), (3, 0, 4)])
def test_what_is_no_image_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        UserError, match=r"image 'x' has shape \(.*Give \(height, width\) or \(channels, height, width\)"
    ):
        image_medium("x", torch.zeros(shape))


def test_a_histogram_holds_the_finite_values_of_the_moment() -> None:
    values = torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]])
    found = histogram_medium("x", values).value
    values.zero_()
    assert found.tolist() == [1.0, 3.0]
    assert histogram_medium("x", torch.arange(3)).value.tolist() == [0.0, 1.0, 2.0]


class Shows(Callback):
    """Logs a text of each kind of hook, with the step that was made or is being made."""

    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        trainer.log_text("before", str(trainer.progress.step + 1))
        trainer.log_histogram("weights", model.linear.weight)

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.log_text("train", "gone")
        trainer.log_text("train", str(trainer.progress.step))

    def on_validate_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.log_image("val/image", torch.full((2, 3), 1 / 255 * trainer.progress.step))


def texts(records: list[Record], name: str) -> list[tuple[int, str]]:
    return [(record.step, record.texts[name]) for record in records if name in record.texts]


def test_what_hooks_log_belongs_to_the_step_that_they_are_called_for() -> None:
    logger = ListLogger()
    made = trainer(callbacks=[Shows()], loggers=[logger], settings={"eval_interval": 2, "log_interval": 3})
    made.fit(loader(), loader())
    steps = [(step, str(step)) for step in range(1, 7)]
    assert texts(logger.records, "before") == texts(logger.records, "train") == steps
    assert [(one.step, one.images["val/image"].tolist()) for one in logger.records if one.images] == [
        (step, [[[step]] * 3] * 2) for step in (2, 4, 6)
    ]
    assert [one.histograms["weights"].size for one in logger.records if one.histograms] == [2] * 6
    assert logger.steps("train/loss") == [3, 6]
    assert [record.has_media for record in logger.records] == [True] * 6


def test_a_step_logs_for_the_step_that_it_makes() -> None:
    class Telling(TrainStep):
        def train_batch(self, batch: Any) -> Any:
            self.trainer.log_text("step", str(self.trainer.progress.step + 1))
            return super().train_batch(batch)

    logger = ListLogger()
    trainer(step=Telling(), loggers=[logger], settings={"grad_accum_steps": 2}).fit(loader())
    assert texts(logger.records, "step") == [(step, str(step)) for step in range(1, 7)]


def test_a_medium_and_a_metric_may_have_the_same_name_and_an_evaluation_reports_metrics_alone() -> None:
    class Same(Callback):
        seen: Any = None

        def on_validate_end(self, trainer: Any, model: Any, loop: Any) -> None:
            trainer.log_text("val/loss", "small")

        def on_after_evaluation(self, trainer: Any, metrics: Any) -> None:
            self.seen = dict(metrics)

    logger, same = ListLogger(), Same()
    made = trainer(callbacks=[same], loggers=[logger], settings={"eval_interval": 6})
    made.fit(loader(), loader())
    assert texts(logger.records, "val/loss") == [(6, "small")]
    assert isinstance(same.seen["val/loss"], float)
    assert set(same.seen) == {"val/loss", "val/mae"}
    assert set(made.validate(loader())["val"]) == {"loss", "mae"}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [StopAt(4), StopAt(5), StopInEvaluation(4), StopInEvaluation(2, 1)])
def test_a_stop_and_a_resume_show_each_medium_and_each_metric_once(tmp_path: Path, stop: Callback) -> None:
    """Also a stop before or in an evaluation, which the next attempt makes: its step's texts are not made again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for callbacks in ([stop, Shows()], [Shows()]):
        trainer(
            callbacks=callbacks,
            loggers=[TensorBoardLogger()],
            checkpoint=CheckpointerCallback(tmp_path / "checkpoints", save_interval=100),
            run_dir=tmp_path,
            settings={"eval_interval": 2, "log_interval": 1},
        ).fit(loader(), loader())
    all_of_them = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)
    shown = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance=all_of_them).Reload()
    assert [(one.step, one.tensor_proto.string_val[0].decode()) for one in shown.Tensors("train/text_summary")] == [
        (step, str(step)) for step in range(1, 7)
    ]
    assert [one.step for one in shown.Histograms("weights")] == list(range(1, 7))
    assert [one.step for one in shown.Images("val/image")] == [2, 4, 6]
    assert [one.step for one in shown.Scalars("train/loss")] == list(range(1, 7))
    assert [one.step for one in shown.Scalars("val/loss")] == [2, 4, 6]


def test_loggers_are_told_what_the_run_is() -> None:
    logger = ListLogger()
    trainer(loggers=[logger], config="a: 1\n", hparams={"lr": 0.1}).fit(loader())
    (facts,) = logger.facts
    assert isinstance(facts, RunFacts)
    assert (facts.config, facts.hparams) == ("a: 1\n", {"lr": 0.1})
