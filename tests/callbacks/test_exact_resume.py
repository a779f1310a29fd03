"""Callbacks with a state: a training that is stopped and resumed ends bit for bit as one that went through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny import ListLogger, Noisy, StopAt, StopInEvaluation, everything, loader, same, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyExit, EarlyStopping, ThresholdStopper
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.callbacks.validation_callback import ValidationCallback
from trainer_cli.trainer.hooks import Callback

SCORES = (9, 8, 7, 7.5, 6.9999, 7, float("nan"), 8, 9, 3)


class Scores(Callback):
    """An evaluation whose results are known beforehand."""

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        trainer.log_metrics({"task/score": SCORES[min(trainer.progress.step, len(SCORES)) - 1]})


class Downstream(ValidationCallback):
    scope = "downstream"

    def evaluate(self, trainer: Any) -> dict[str, float]:
        return {"step": float(trainer.progress.step)}


class Row(NamedTuple):
    callbacks: Callable[[], list[Callback]]
    ends: int = 9
    """The last step of the training."""
    stops: tuple[int, ...] = (1, 4, 6)
    min_duration: int | None = None
    """Until which a request to end is held."""


def _patient(patience: int | str) -> list[Callback]:
    return [EarlyStopping("task/score", "min", patience=patience, check_finite=False), Scores()]


def _selective_grad() -> list[Callback]:
    return [pytest.importorskip("trainer_cli.addons.sparsity.selective_grad").SelectiveGrad(0.25, ["body.0.*"])]


ROWS = {
    "an EMA of each step": Row(lambda: [EMA(0.8)]),
    "an EMA of every third step": Row(lambda: [EMA(0.8, every=3)]),
    "an EMA from the second epoch on": Row(lambda: [EMA(0.8, start="1ep", every=2)]),
    "an SWA": Row(lambda: [SWA("1ep", 2)]),
    "some elements of a matrix": Row(_selective_grad, stops=(4,)),
    "an evaluation every second time": Row(lambda: [Downstream(2)], stops=(3, 5, 7)),
    "an evaluation every third time": Row(lambda: [Downstream(3)], stops=(3, 5, 7)),
    "early stopping": Row(lambda: _patient(3), ends=8, stops=(1, 3, 5, 6, 7)),
    "early stopping by steps": Row(lambda: _patient("3st"), ends=8, stops=(5, 7)),
    "early stopping, held": Row(lambda: [EarlyStopping("task/score", "min", patience=1), Scores()], 7, (5, 6), 7),
    "a threshold, held": Row(lambda: [ThresholdStopper("task/score", 7.2, "min"), Scores()], 7, (2, 3, 5), 7),
    "a function, held": Row(lambda: [EarlyExit([lambda trainer: trainer.progress.step == 4])], 7, (2, 4, 6), 7),
    "a callback of the user's own, held": Row(lambda: [StopAt(4, finished=True)], 7, (2, 5, 6), 7),
}


def _fit(row: Row, folder: Path, log: ListLogger, *more: Callback) -> Any:
    callbacks = {str(number): callback for number, callback in enumerate([*row.callbacks(), *more])}
    made = trainer(
        Noisy,
        callbacks=callbacks,
        settings={"max_duration": 9, "eval_interval": 1, "log_interval": 4, "min_duration": row.min_duration},
        checkpoint=CheckpointerCallback(folder, save_interval=2),
        loggers=[log],
        run_dir=folder,
    )
    return made, made.fit(loader(), loader(6, shuffle=False))


@pytest.mark.parametrize("name", ROWS)
def test_a_resume_ends_where_going_through_ends(name: str, tmp_path: Path) -> None:
    row, log = ROWS[name], ListLogger()
    straight, result = _fit(row, tmp_path / "straight", log)
    assert result.step == row.ends
    stops = {str(step): StopAt(step) for step in row.stops}
    for stop, callback in {**stops, "evaluation 2": StopInEvaluation(2)}.items():
        resumed_log, folder = ListLogger(), tmp_path / stop
        _, stopped = _fit(row, folder, resumed_log, callback)
        assert (str(stopped.step), stopped.finished) == (stop.removeprefix("evaluation "), False)
        resumed, again = _fit(row, folder, resumed_log)
        assert resumed.loaded_step == stopped.step
        assert (again.step, again.reason) == (result.step, result.reason), stop
        assert same(everything(straight), everything(resumed)) == [], stop
        assert resumed_log.stream == log.stream, stop
