"""EarlyStopping: when it ends a run, that this survives a resume, and that its metric is looked for beforehand."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ListLogger, Noisy, StopAt, StopInEvaluation, everything, loader, same, trainer, without_clock

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping
from trainer_cli.errors import UserError
from trainer_cli.trainer.hooks import Callback

NAN = math.nan


class Scores(Callback):
    """A downstream evaluation whose results are known beforehand."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        trainer.log_metrics({"task/score": self.scores[min(trainer.progress.step, len(self.scores)) - 1]})


def _stopping(**settings: Any) -> EarlyStopping:
    return EarlyStopping(**{"metric": "task/score", "patience": 2, "check_finite": False, **settings})


def _fit(scores: tuple[float, ...], stopping: EarlyStopping, folder: Path | None = None, **more: Any) -> Any:
    """Steps of which each is evaluated; epochs of three. The stopping stands before what it watches."""
    settings = {"max_duration": 12, "eval_interval": 1, **more.pop("settings", {})}
    callbacks = {"stopping": stopping, "scores": Scores(*scores), **more.pop("callbacks", {})}
    checkpoint = None if folder is None else CheckpointerCallback(folder, save_interval=None)
    made = trainer(callbacks=callbacks, settings=settings, checkpoint=checkpoint, **more)
    return made, made.fit(loader(10, 4))


@pytest.mark.parametrize(
    ("scores", "settings", "ends", "best"),
    [
        ((3, 2, 1, 1, 1), {}, 5, 1),
        ((1, 2, 3, 4, 5), {}, 3, 1),
        ((1, 2, 3, 4, 5), {"mode": "max"}, 7, 5),
        ((5, 4, 3), {"mode": "max"}, 3, 5),
        ((3, 2.9, 2.8, 2.7), {"min_delta": 0.5}, 3, 3),
        ((3, 2.7, 2.4, 2.3, 2.2), {"min_delta": 0.5}, 5, 2.4),
        ((NAN, NAN, NAN), {}, 3, None),
        ((NAN, NAN, 5, NAN, 4, NAN), {}, 7, 4),
        ((NAN, 5, NAN, 4, NAN), {}, 6, 4),
        ((math.inf, 5, NAN, 4, 5, 5), {}, 6, 4),
        ((1, 2), {"patience": "1ep"}, 4, 1),
        ((1, 2), {"patience": "0.5ep"}, 3, 1),
        ((1, 2), {"patience": "9sp"}, 4, 1),
        ((1, 2), {"patience": "30tok"}, 4, 1),
        ((1, 2), {"patience": "9h"}, 12, 1),
    ],
)
def test_it_ends_the_run_once_nothing_was_better_for_as_long_as_patience(
    scores: tuple[float, ...], settings: dict[str, Any], ends: int, best: float | None
) -> None:
    stopping = _stopping(**settings)
    _, result = _fit(scores, stopping)
    assert (result.step, result.finished, stopping.best) == (ends, True, best)
    if ends == 12:
        assert "max_duration" in result.reason
    elif best is not None:
        assert f"task/score has not been {'below' if stopping.mode == 'min' else 'above'} {best:g}" in result.reason
    else:
        assert result.reason == "task/score has been no number for 2 steps"


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("check_finite", [True, False])
def test_a_value_that_is_not_finite_ends_the_run_at_once_and_is_never_the_best(
    value: float, check_finite: bool
) -> None:
    stopping = _stopping(check_finite=check_finite)
    _, result = _fit((3, value, 2, 4, 4), stopping)
    assert (result.step, stopping.best) == ((2, 3) if check_finite else (5, 2))
    assert result.finished
    if check_finite:
        assert result.reason == f"task/score is {value}"


def test_the_default_is_to_end_at_once() -> None:
    assert EarlyStopping().check_finite


def test_the_reason_names_metric_value_and_step() -> None:
    assert _fit((3, 2, 1, 1, 1), _stopping())[1].reason == ("task/score has not been below 1 (step 3) for 2 steps")


def test_the_reason_says_by_how_much_it_had_to_be_better() -> None:
    reason = _fit((3, 2.9, 2.8, 2.7), _stopping(min_delta=0.5, mode="max"))[1].reason
    assert reason == "task/score has not been above 3 (step 1) by more than 0.5 for 2 steps"


SCORES = (9, 8, 7, 7.5, 6.9999, 7, NAN, 8, 9, 3)


@pytest.mark.parametrize("stop", [1, 3, 5, 6, 7])
def test_a_resume_stops_at_the_same_step_with_the_same_state(tmp_path: Path, stop: int) -> None:
    logs = [ListLogger(), ListLogger()]
    more: list[dict[str, Any]] = [
        {"loggers": [log], "run_dir": tmp_path, "settings": {"log_interval": 5}} for log in logs
    ]
    straight, ended = _fit(SCORES, _stopping(patience=3), tmp_path / "a", **more[0])
    wanted = everything(straight)
    _fit(SCORES, _stopping(patience=3), tmp_path / "b", callbacks={"stop": StopAt(stop)}, **more[1])
    resumed, again = _fit(SCORES, _stopping(patience=3), tmp_path / "b", **more[1])
    assert resumed.loaded_step == stop
    assert (again.step, again.reason) == (ended.step, ended.reason)
    assert ended.step == 8
    assert same(wanted, everything(resumed)) == []
    assert logs[0].stream == logs[1].stream


@pytest.mark.parametrize("log_interval", [None, 2, 4])
def test_an_evaluation_that_was_broken_off_ends_the_run_when_it_is_made_up(tmp_path: Path, log_interval: Any) -> None:
    logs, ends = [ListLogger(), ListLogger()], []
    for log, folder, breaks in ((logs[0], "a", ()), (logs[1], "b", (4, None))):
        for step in breaks or (None,):
            callbacks: dict[str, Any] = {"stopping": EarlyStopping(patience=2, min_delta=100)}
            if step is not None:
                callbacks["stop"] = StopInEvaluation(step)
            made = trainer(
                callbacks=callbacks,
                settings={"max_duration": 9, "eval_interval": 2, "log_interval": log_interval},
                checkpoint=CheckpointerCallback(tmp_path / folder),
                loggers=[log],
                run_dir=tmp_path,
            )
            result = made.fit(loader(), loader(6, 2))
        ends.append(
            (result.step, result.reason, without_clock(result.metrics), made.callbacks["stopping"].state_dict())
        )
    assert ends[0] == ends[1]
    assert ends[0][0] == 4
    assert logs[0].stream == logs[1].stream


def test_a_run_that_it_ended_is_finished_until_it_is_reported_to_be_longer_or_more_patient(tmp_path: Path) -> None:
    scores = (3, 1, 2, 2, 2, 0.5, 2, 2, 2)
    assert _fit(scores, _stopping(), tmp_path)[1].step == 4
    for _ in range(2):
        made, result = _fit(scores, _stopping(), tmp_path)
        assert (result.step, made.model.calls, result.finished) == (4, 0, True)
        assert result.reason == "task/score has not been below 1 (step 2) for 2 steps"
    longer = {"settings": {"max_duration": 20}}
    made, result = _fit(scores, _stopping(), tmp_path, **longer)
    assert (made.loaded_step, result.step) == (4, 5), "the next evaluation is no better either"
    assert result.reason == "task/score has not been below 1 (step 2) for 2 steps"
    made, result = _fit(scores, _stopping(), tmp_path, settings={"max_duration": 21})
    assert (made.loaded_step, result.step) == (5, 8), "the next one is"
    made, result = _fit(scores, _stopping(patience=4), tmp_path, settings={"max_duration": 21})
    assert (made.loaded_step, result.step) == (8, 10)


def test_a_patience_in_another_unit_counts_from_when_it_is_first_asked(tmp_path: Path) -> None:
    _fit((1, 2, 3), _stopping(patience=4), tmp_path, settings={"max_duration": 3})
    assert _fit((1, 2, 3), _stopping(patience="8sp"), tmp_path)[1].step == 7


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "least"}, "mode is 'least', but it is min or max"),
        ({"min_delta": -1}, "min_delta is -1"),
        ({"min_delta": NAN}, "min_delta is nan"),
        ({"patience": "soon"}, "'soon' is not a duration"),
        ({"patience": 0}, "more than zero"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        EarlyStopping(**settings)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("val/los", r"callbacks\.stopping\.metric is 'val/los', which no validation loader or callback reports"),
        ("val/los", r"Did you mean 'val/loss'\?"),
        ("task/scored", r"Did you mean 'task/score'\?"),
        ("x", r"Reported are task/score, val/loss, val/mae\."),
    ],
)
def test_a_metric_that_nothing_reports_is_refused_before_step_1(metric: str, said: str) -> None:
    logger = ListLogger()
    made = trainer(callbacks={"stopping": EarlyStopping(metric), "scores": Scores(1)}, loggers=[logger])
    with pytest.raises(UserError, match=said):
        made.fit(loader(), loader(6))
    assert made.progress.step == 0
    assert made.model.calls == 1, "one batch was all that was evaluated"
    assert logger.records == []


def test_without_validation_there_is_nothing_to_watch() -> None:
    with pytest.raises(UserError, match=r"is 'val/loss', which no .* reports\. There is no validation data"):
        trainer(callbacks={"stopping": EarlyStopping()}).fit(loader())


class Traces(Callback):
    """Everything in which a rehearsal could leave a trace."""

    def __init__(self) -> None:
        self.batches = 0
        self.rehearsed: list[str] = []

    def on_fit_start(self, trainer: Any, *args: Any) -> None:
        trainer.log_metrics(parameters=3)

    def on_validate_batch_end(self, trainer: Any, *args: Any) -> None:
        self.batches += 1
        random.random(), np.random.rand(), torch.rand(1)
        if trainer.sanity_checking:
            self.rehearsed.append("batch")

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        if trainer.sanity_checking:
            self.rehearsed.append("downstream")

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


@pytest.mark.parametrize("metric", ["val/loss", "task/score"])
def test_the_rehearsal_leaves_no_trace(metric: str) -> None:
    settings = {"max_duration": 6, "eval_interval": 3, "log_interval": 2}
    logs, ends, traces = [ListLogger(), ListLogger()], [], [Traces(), Traces()]
    for log, trace, callbacks in zip(logs, traces, ({}, {"stopping": EarlyStopping(metric)}), strict=True):
        made = trainer(
            Noisy,
            callbacks={**callbacks, "trace": trace, "scores": Scores(*range(9))},
            settings=settings,
            loggers=[log],
        )
        made.fit(loader(), loader(6, 2))
        ends.append(everything(made))
        ends[-1]["callbacks"].pop("stopping", None)
    assert same(*ends) == []
    assert logs[0].stream == logs[1].stream
    assert logs[1].stream[0] == (0, {"parameters": 3.0})
    assert traces[0].rehearsed == []
    assert traces[1].rehearsed == (["batch"] if metric == "val/loss" else ["batch", "downstream"])


def test_who_waits_for_nothing_costs_no_batch() -> None:
    made = trainer(callbacks=[Scores(1)], settings={"max_duration": 1})
    made.fit(loader(), loader(6, 2))
    assert made.model.calls == 1 + 3
