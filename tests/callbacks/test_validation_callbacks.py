"""Callbacks that evaluate: called every n-th time, at the last evaluation, and for each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny import ListLogger, StopAt, loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.validation_callback import ValidationCallback
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.trainer import Trainer


class Downstream(ValidationCallback):
    """Reports where it was called, and whether gradients and train mode were off."""

    scope = "task"

    def evaluate(self, trainer: Trainer) -> Mapping[str, float]:
        assert not torch.is_grad_enabled()
        assert not trainer.model.training
        assert "val" in self.val_loaders
        torch.rand(3)
        return {"score": float(trainer.progress.step)}


@pytest.mark.parametrize(("every", "steps"), [(1, [2, 4, 6, 7]), (2, [4, 7]), (3, [6, 7]), (9, [7])])
def test_it_is_called_every_nth_time_and_the_last(every: int, steps: list[int]) -> None:
    logger = ListLogger()
    settings = {"max_duration": 7, "eval_interval": 2}
    made = trainer(callbacks=[Downstream(every)], loggers=[logger], settings=settings)
    made.fit(loader(), loader(4, shuffle=False))
    assert logger.steps("task/score") == steps
    assert made.model.training


def test_the_count_survives_a_resume_and_an_early_end_has_its_last_call(tmp_path: Any) -> None:
    logger, settings = ListLogger(), {"max_duration": 9, "eval_interval": 2}

    def fit(*more: Any) -> None:
        saver = CheckpointerCallback(tmp_path, save_interval=2)
        made = trainer(callbacks=[Downstream(2), *more], loggers=[logger], checkpoint=saver, settings=settings)
        made.run_dir = tmp_path
        made.fit(loader(), loader(4, shuffle=False))

    with StopAt(2):
        fit()
    fit()
    assert logger.steps("task/score") == [4, 8, 9]
    early = ListLogger()

    class Ends(ValidationCallback):
        def on_after_evaluation(self, trainer: Trainer, metrics: Any) -> None:
            trainer.stop("enough")

        def evaluate(self, trainer: Trainer) -> None:
            return None

    made = trainer(callbacks=[Ends(5), Downstream(5)], loggers=[early], settings=settings)
    made.fit(loader(), loader(4, shuffle=False))
    assert early.steps("task/score") == [2]


def test_it_is_called_for_each_checkpoint_and_needs_a_count() -> None:
    rows = trainer(optimizer=None, callbacks=[Downstream(7)]).validate_all(loader(4), [None, None])
    assert [row.metrics for row in rows if row.loader == "task"] == [{"score": 0.0}, {"score": 0.0}]
    with pytest.raises(ConfigError, match="every is 0"):
        Downstream(0)
