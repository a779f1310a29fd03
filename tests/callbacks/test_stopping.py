"""EarlyStopping, ThresholdStopper and EarlyExit end the run by a rule, with its reason; the run then stays ended."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_parts import note
from tiny import ListLogger, Noisy, StopAt, StopInEvaluation, Unsized, everything, loader, same, trainer, without_clock
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyExit, EarlyStopping, ThresholdStopper
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.optim.scheduler_intervals import Scheduled
from trainer_cli.optim.schedulers import scheduler_factory
from trainer_cli.schema.checkpoint_config import KeepBestConfig
from trainer_cli.terminal import format_count
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop

NAN, INF = math.nan, math.inf


class Scores(Callback):
    """A downstream evaluation whose results are known beforehand; by default it is best at step 2."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        step, scores = trainer.progress.step, self.scores
        trainer.log_metrics({"task/score": scores[min(step, len(scores)) - 1] if scores else abs(step - 2.0)})


class ScoresInOrder(Scores):
    """The results of one evaluation after the other, then 9."""

    def __init__(self, scores: Sequence[float]) -> None:
        self.scores, self.steps = tuple(scores), list[int]()

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        step = trainer.progress.step
        if step not in self.steps and step:
            self.steps.append(step)
        trainer.log_metrics({"task/score": dict(enumerate(self.scores, 1)).get(len(self.steps), 9.0)})


def _stopping(**settings: Any) -> EarlyStopping:
    return EarlyStopping(**{"metric": "task/score", "mode": "min", "patience": 2, "check_finite": False, **settings})


def _fit(*callbacks: Any, scores: tuple[float, ...] = (), folder: Path | None = None, **settings: Any) -> Any:
    """Steps of which each is evaluated; epochs of three. What ends the run stands before what it watches."""
    logger = settings.pop("logger", None) or ListLogger()
    made = trainer(
        callbacks={**{str(number): each for number, each in enumerate(callbacks)}, "scores": Scores(*scores)},
        settings={"max_duration": 12, "eval_interval": 1, "log_interval": 3, **settings},
        loggers=[logger],
        run_dir=folder,
        checkpoint=None if folder is None else CheckpointerCallback(folder / "checkpoints", save_interval=3),
    )
    return made, made.fit(loader(10, 4))


@pytest.mark.parametrize(
    ("scores", "settings", "ends", "best", "reason"),
    [
        ((3, 2, 1, 1, 1), {}, 5, 1, "has not been below 1 (step 3) for 2 evaluations"),
        ((3, 2, 1, 1, 1), {"patience": "2st"}, 5, 1, "has not been below 1 (step 3) for 2 steps"),
        ((1, 2, 3, 4, 5), {"mode": "max"}, 7, 5, "has not been above 5 (step 5) for 2 evaluations"),
        ((5, 4, 3), {"mode": "max"}, 3, 5, "has not been above 5 (step 1)"),
        (
            (3, 2.9, 2.8, 2.7),
            {"min_delta": 0.5},
            3,
            3,
            "has not been below 3 (step 1) by more than 0.5 for 2 evaluations",
        ),
        ((3, 2.7, 2.4, 2.3, 2.2), {"min_delta": 0.5}, 5, 2.4, "has not been below 2.4"),
        ((3, 2.5, 2.5), {"min_delta": 0.5}, 3, 3, "has not been below 3 (step 1) by more than 0.5 for 2 evaluations"),
        ((3, 3.5, 3.5), {"min_delta": 0.5, "mode": "max"}, 3, 3, "above 3 (step 1) by more than 0.5 for 2 evaluations"),
        ((3, 2.6, 3.6, 3), {"min_delta": 0.5, "mode": "max"}, 5, 3.6, "above 3.6 (step 3)"),
        ((NAN, NAN, NAN), {}, 2, None, "has been no number for 2 evaluations"),
        ((NAN, NAN, NAN), {"patience": "2st"}, 3, None, "has been no number for 2 steps"),
        ((NAN, 5, NAN, 4, NAN), {}, 6, 4, "below 4"),
        ((INF, 5, NAN, 4, 5, 5), {}, 6, 4, "below 4"),
        ((1, 2), {"patience": "1ep"}, 4, 1, "below 1"),
        ((1, 2), {"patience": "0.5ep"}, 3, 1, "below 1"),
        ((1, 2), {"patience": "9sp"}, 4, 1, "below 1"),
        ((1, 2), {"patience": "30tok"}, 4, 1, "below 1"),
        ((1, 2), {"patience": "9h"}, 12, 1, "max_duration"),
        *((((3, value, 2, 4, 4)), {"check_finite": True}, 2, 3, f"is {value}") for value in (NAN, INF, -INF)),
        *((((3, value, 2, 4, 4)), {}, 5, 2, "below 2") for value in (NAN, INF, -INF)),
    ],
)
def test_it_ends_the_run_once_nothing_was_better_for_as_long_as_patience(
    scores: tuple[float, ...], settings: dict[str, Any], ends: int, best: float | None, reason: str
) -> None:
    stopping = _stopping(**settings)
    _, result = _fit(stopping, scores=scores)
    assert (result.step, result.finished, stopping.best) == (ends, True, best)
    assert reason in result.reason
    assert ends == 12 or result.reason.startswith("task/score ")


@pytest.mark.parametrize(
    ("metric", "settings"), [("task/score", {"eval_interval": 4}), ("train/loss", {"log_interval": 4, "mode": "max"})]
)
def test_a_value_that_there_is_only_because_the_run_ends_does_not_count(metric: str, settings: dict[str, Any]) -> None:
    stopping = _stopping(metric=metric, patience=1, mode=settings.pop("mode", "min"))
    logger = ListLogger()
    _, result = _fit(stopping, scores=(1, 1, 1, 1, 2), max_duration=5, logger=logger, **settings)
    values = {record.step: record.metrics[metric] for record in logger.records if metric in record.metrics}
    assert list(values) == [4, 5]
    assert (values[5] < values[4]) is (metric == "train/loss"), "it is no better"
    assert "max_duration" in result.reason
    assert stopping.since is not None
    assert stopping.since["step"] == 4


def test_a_part_of_an_epoch_passes_at_a_step_and_not_at_a_rounding_error_after_it() -> None:
    stopping = _stopping(patience="0.3ep")
    made = trainer(
        callbacks={"stopping": stopping, "scores": Scores(1, 2)}, settings={"max_duration": 12, "eval_interval": 1}
    )
    assert made.fit(loader(20, 2)).step == 4, "three of ten steps after the best"


def test_a_value_that_is_not_finite_ends_the_run_by_default() -> None:
    assert EarlyStopping().check_finite


@pytest.mark.parametrize("log_interval", [None, 2])
def test_an_evaluation_that_was_broken_off_ends_the_run_when_it_is_made_up(tmp_path: Path, log_interval: Any) -> None:
    logs, ends = [ListLogger(), ListLogger()], []
    for log, folder, stops in ((logs[0], "a", [None]), (logs[1], "b", [4, None])):
        for step in stops:
            stop = {} if step is None else {"stop": StopInEvaluation(step)}
            made = trainer(
                callbacks={"stopping": EarlyStopping(patience=1, min_delta=100), **stop},
                settings={"max_duration": 9, "eval_interval": 2, "log_interval": log_interval},
                checkpoint=CheckpointerCallback(tmp_path / folder),
                loggers=[log],
                run_dir=tmp_path,
            )
            result = made.fit(loader(), loader(6, 2))
        state = made.callbacks["stopping"].state_dict()
        ends.append((result.step, result.reason, without_clock(result.metrics), state))
    assert ends[0] == ends[1]
    assert ends[0][0] == 4
    assert logs[0].stream == logs[1].stream


def test_a_run_that_it_ended_is_finished_until_it_is_longer_or_more_patient(tmp_path: Path) -> None:
    def fit(patience: int = 2, **settings: Any) -> Any:
        return _fit(_stopping(patience=patience), scores=(3, 1, 2, 2, 2, 0.5, 2, 2, 2), folder=tmp_path, **settings)

    assert fit()[1].step == 4
    for _ in range(2):
        made, result = fit()
        assert (result.step, made.model.calls, result.finished) == (4, 0, True)
        assert result.reason == "task/score has not been below 1 (step 2) for 2 evaluations"
    made, result = fit(max_duration=20)
    assert (made.loaded_step, result.step) == (4, 5), "the next evaluation is no better either"
    made, result = fit(max_duration=21)
    assert (made.loaded_step, result.step) == (5, 8), "the next one is"
    made, result = fit(4, max_duration=21)
    assert (made.loaded_step, result.step) == (8, 10)


def _of_lightning(scores: Sequence[float], patience: int, min_delta: float) -> int | None:
    """The evaluation after which Lightning's EarlyStopping of mode=min stops, written as its plain loop."""
    best, waited = INF, 0
    for evaluation, score in enumerate(scores, start=1):
        if score + min_delta < best:
            best, waited = score, 0
        else:
            waited += 1
            if waited >= patience:
                return evaluation
    return None


@pytest.mark.parametrize("eval_interval", [1, 4, "1ep", "9sp"])
@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("min_delta", [0.0, 0.25])
def test_a_plain_patience_counts_evaluations_whatever_their_interval(
    patience: int, min_delta: float, eval_interval: Any
) -> None:
    generator = random.Random(patience)
    for _ in range(5):
        scores = [generator.choice([1.0, 0.75, 0.5, 0.375, NAN]) for _ in range(8)]
        made, evaluations = _stopping(patience=patience, min_delta=min_delta), ScoresInOrder(scores)
        result = trainer(
            callbacks={"stopping": made, "scores": evaluations},
            settings={"max_duration": 99, "eval_interval": eval_interval},
        ).fit(loader(10, 4))
        assert len(set(evaluations.steps)) == _of_lightning([*scores, *[9.0] * 9], patience, min_delta)
        assert result.reason.endswith(f"for {format_count(patience, 'evaluation')}")


def test_a_plain_patience_counts_the_evaluations_of_the_loader_of_its_metric() -> None:
    settings = {"max_duration": 99, "eval_interval": 1, "eval_loaders": {"slow": {"interval": 5}}}
    made = trainer(callbacks=[EarlyStopping("slow/loss", patience=2, min_delta=1e9)], settings=settings)
    assert made.fit(loader(10, 4), {"slow": loader(6), "quick": loader(6)}).step == 15


@pytest.mark.parametrize(
    ("metric", "patience", "settings", "warning"),
    [
        ("val/loss", 2, {}, None),
        ("val/loss", 1, {}, "1 evaluation is shorter than two evaluations (every step): the first val/loss that"),
        ("val/loss", "3ep", {"eval_interval": "1ep"}, None),
        ("val/loss", "2ep", {"eval_interval": "1ep"}, None),
        ("val/loss", "3ep", {"eval_interval": "5ep"}, "3 epochs is shorter than two evaluations (every 5 epochs): the"),
        ("val/loss", "3ep", {"eval_interval": "2ep"}, "the second val/loss that is no better ends the run"),
        ("val/loss", "5st", {"eval_interval": "1ep"}, "5 steps is shorter than two evaluations (every epoch): the sec"),
        ("val/loss", "6st", {"eval_interval": "1ep"}, None),
        ("val/loss", "0.5dur", {"eval_interval": 4}, "0.5dur is shorter than two evaluations (every 4 steps): the sec"),
        ("val/loss", "9h", {"eval_interval": 4}, None),
        ("val/loss", 5, {"eval_interval": None}, None),
        ("val/loss", "2st", {"eval_loaders": {"val": {"interval": 2}}}, "(every 2 steps): the first val/loss"),
        ("train/loss", "8st", {"log_interval": 5}, "8 steps is shorter than two logs (every 5 steps): the second"),
        ("train/loss", 1, {"log_interval": 5}, "1 log is shorter than two logs (every 5 steps): the first train/loss"),
    ],
)  # fmt: skip
def test_a_patience_that_is_shorter_than_two_evaluations_is_warned_of(
    metric: str, patience: Any, settings: dict[str, Any], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = EarlyStopping(metric, patience=patience)
    made = trainer(callbacks=[stopping], settings={"max_duration": 12, "eval_interval": 1, **settings})
    with caplog.at_level("WARNING"):
        made.fit(loader(10, 4), loader(6))
    messages = [message for message in caplog.messages if "patience" in message]
    assert len(messages) == (warning is not None)
    assert warning is None or warning in messages[0]


@pytest.mark.parametrize(("patience", "is_told"), [(2, True), ("2st", False)])
def test_a_checkpoint_whose_patience_counted_steps_is_loaded_and_the_change_is_said(
    patience: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = _stopping(patience=patience)
    stopping.load_state_dict({"best": 1.0, "since": {"step": 3}})
    assert (stopping.best, stopping.since, stopping.waited) == (1.0, {"step": 3}, 0)
    assert ("a patience of 2 is now 2 evaluations, from here on" in caplog.text) is is_told
    assert ("patience=2st" in caplog.text) is is_told


@pytest.mark.parametrize(("patience", "ends"), [("1ep", 3), ("2ep", 6)])
def test_a_patience_in_epochs_of_unknown_length_counts_their_ends(patience: str, ends: int) -> None:
    made = trainer(
        callbacks=[_stopping(patience=patience), Scores()], settings={"max_duration": 12, "eval_interval": 1}
    )
    assert made.fit(Unsized(3)).step == ends


def test_a_patience_in_another_unit_counts_from_when_it_is_first_asked(tmp_path: Path) -> None:
    _fit(_stopping(patience=4), scores=(1, 2, 3), folder=tmp_path, max_duration=3)
    assert _fit(_stopping(patience="8sp"), scores=(1, 2, 3), folder=tmp_path)[1].step == 7


@pytest.mark.parametrize(
    ("metric", "hint"),
    [
        ("val/los", r"Did you mean 'val/loss'\?"),
        ("task/scored", r"Did you mean 'task/score'\?"),
        ("x", r"Reported are task/score, val/loss, val/mae\."),
    ],
)
@pytest.mark.parametrize(
    "make", [lambda metric: EarlyStopping(metric, "min"), lambda metric: ThresholdStopper(metric, 1.0, "min")]
)
def test_a_metric_that_nothing_reports_is_refused_before_step_1(make: Any, metric: str, hint: str) -> None:
    logger = ListLogger()
    made = trainer(callbacks={"stopping": make(metric), "scores": Scores(1)}, loggers=[logger])
    with pytest.raises(UserError, match=rf"callbacks\.stopping\.metric is '{metric}', which no .* reports.*{hint}"):
        made.fit(loader(), loader(6))
    assert (made.progress.step, cast("Any", made.model).calls) == (0, 1), "one batch was all that was evaluated"
    assert logger.records == []


def test_without_validation_there_is_nothing_to_watch() -> None:
    with pytest.raises(UserError, match=r"is 'val/loss', which no .* reports\. There is no validation data"):
        trainer(callbacks={"stopping": EarlyStopping()}).fit(loader())


class Traces(Callback):
    """Everything in which the evaluation before the first step could leave a trace."""

    def __init__(self) -> None:
        self.batches = 0
        self.seen: list[str] = []

    def on_fit_start(self, trainer: Any, *args: Any) -> None:
        trainer.log_metrics(parameters=3)

    def on_validate_batch_end(self, trainer: Any, *args: Any) -> None:
        self.batches += 1
        random.random(), np.random.rand(), torch.rand(1)
        if trainer.sanity_checking:
            self.seen.append("batch")

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        if trainer.sanity_checking:
            self.seen.append("downstream")

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


@pytest.mark.parametrize("metric", ["val/loss", "task/score"])
def test_the_search_for_its_metric_before_the_first_step_leaves_no_trace(metric: str) -> None:
    logs, ends, traces = [ListLogger(), ListLogger()], [], [Traces(), Traces()]
    for log, trace, callbacks in zip(logs, traces, ({}, {"stopping": EarlyStopping(metric, "min")}), strict=True):
        made = trainer(
            Noisy,
            callbacks={**callbacks, "trace": trace, "scores": Scores(*range(9))},
            settings={"max_duration": 6, "eval_interval": 3, "log_interval": 2},
            loggers=[log],
        )
        made.fit(loader(), loader(6, 2))
        ends.append(everything(made))
        ends[-1]["callbacks"].pop("stopping", None)
    assert same(*ends) == []
    assert logs[0].stream == logs[1].stream
    assert logs[1].stream[0] == (0, {"parameters": 3.0})
    assert traces[0].seen == []
    assert traces[1].seen == (["batch"] if metric == "val/loss" else ["batch", "downstream"])


def test_without_a_metric_to_watch_no_batch_is_evaluated_beforehand() -> None:
    made = trainer(callbacks=[Scores(1)], settings={"max_duration": 1})
    made.fit(loader(), loader(6, 2))
    assert made.model.calls == 1 + 3


@pytest.mark.parametrize(
    ("metric", "mode", "threshold"),
    [
        ("task/score", "max", 5),
        ("task/score", "min", 0),
        ("train/loss", "min", 0.5),
        ("train/samples_per_s", "max", 1e-3),
    ],
)
def test_the_first_value_at_the_threshold_or_beyond_ends_the_run(metric: str, mode: str, threshold: float) -> None:
    logger = ListLogger()
    _, result = _fit(ThresholdStopper(metric, threshold, mode), logger=logger, max_duration=40)
    values = {record.step: record.metrics[metric] for record in logger.records if metric in record.metrics}
    beyond = [step for step, value in values.items() if (value <= threshold if mode == "min" else value >= threshold)]
    assert beyond == [result.step]
    assert result.finished
    assert result.reason.startswith(f"{metric} is ")


def test_the_first_function_that_answers_ends_the_run() -> None:
    asked: list[int] = []

    def never(trainer: Any) -> None:
        asked.append(trainer.progress.step)

    def at_seven(trainer: Any) -> str | bool:
        return "seven are enough" if trainer.progress.step == 7 else False

    _, result = _fit(EarlyExit([never, at_seven]), grad_accum_steps=2)
    assert (result.step, result.finished, result.reason) == (7, True, "seven are enough")
    assert asked == list(range(1, 8)), "once a step, and not once a batch"


def test_a_registered_function_is_asked_until_its_handle_is_removed() -> None:
    callback = EarlyExit()
    handle = callback.register(lambda trainer: trainer.progress.step >= 2)
    assert _fit(callback)[1].reason == "<lambda> asked for it"
    handle.remove()
    assert _fit(callback)[1].step == 12


def test_a_function_may_remove_itself_and_the_others_are_still_asked() -> None:
    callback, asked = EarlyExit(), list[str]()

    def ask_once(trainer: Trainer) -> None:
        asked.append("first")
        first.remove()

    first = callback.register(ask_once)
    callback.register(lambda trainer: (note(asked, "second"), len(asked) == 3)[1])
    assert _fit(callback)[1].step == 2
    assert asked == ["first", "second", "second"]


def _enough(trainer: Any) -> Any:
    return trainer.progress.step == 4 and "enough"


OWN = "a callback of the user's own"
# Callbacks that end the run at step 4, and ones with another rule.
ENDS: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
    "EarlyExit": (lambda: EarlyExit([_enough]), None),
    "EarlyStopping": (lambda: EarlyStopping("task/score", "min", 2), lambda: EarlyStopping("task/score", "min", 4)),
    "ThresholdStopper": (
        lambda: ThresholdStopper("task/score", 2.0, "max"),
        lambda: ThresholdStopper("task/score", 5.0, "max"),
    ),
    OWN: (lambda: StopAt(4, finished=True), None),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_a_callback_ended_stays_ended(name: str, tmp_path: Path) -> None:
    end, other = ENDS[name]
    made, first = _fit(end(), folder=tmp_path)
    assert (first.step, first.finished) == (4, True)
    for max_duration in (12, "12st", 8):
        again, result = _fit(end(), folder=tmp_path, max_duration=max_duration)
        assert (result.step, result.finished, result.reason) == (4, True, first.reason)
        assert same(everything(made)["model"], everything(again)["model"]) == []
    if name != OWN:
        shutil.copytree(tmp_path, tmp_path / "without")
        assert _fit(folder=tmp_path / "without", max_duration=8)[1].step == 8
    if other is not None:
        assert _fit(other(), folder=tmp_path, max_duration=8)[1].step > 4


STOPPING = {"metric": "task/score", "mode": "min", "patience": 2, "min_delta": 0.0, "check_finite": True}
THRESHOLD = {"metric": "task/score", "mode": "max", "threshold": 2.0}


@pytest.mark.parametrize(
    ("kind", "settings", "change"),
    [
        *(
            (EarlyStopping, STOPPING, change)
            for change in (
                {"metric": "val/loss"}, {"mode": "max"}, {"patience": "2ep"}, {"min_delta": 0.1},
                {"check_finite": False},
            )
        ),
        *(
            (ThresholdStopper, THRESHOLD, change)
            for change in ({"metric": "val/loss"}, {"mode": "min"}, {"threshold": 3.0})
        ),
    ],
)  # fmt: skip
def test_a_change_of_any_setting_is_another_rule(kind: Any, settings: dict[str, Any], change: dict[str, Any]) -> None:
    rule = kind(**settings).end_rule()
    assert kind(**settings).end_rule() == rule
    assert kind(**{**settings, **change}).end_rule() != rule


@pytest.mark.parametrize("change", [{"max_duration": 13}, {"max_duration": "9ep"}])
@pytest.mark.parametrize("name", ENDS)
def test_a_longer_run_goes_on(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    _fit(ENDS[name][0](), folder=tmp_path)
    assert _fit(ENDS[name][0](), folder=tmp_path, **change)[1].step > 4


LEAST = [(None, 4), (3, 4), ("2ep", 6), ("27sp", 8), (12, 12), ("90ep", 12), ("0.001s", 4)]


@pytest.mark.parametrize(
    ("name", "least", "step"), [*(("EarlyExit", *each) for each in LEAST), *((name, 6, 6) for name in ENDS)]
)
def test_no_callback_ends_a_run_before_its_least_duration(name: str, least: Any, step: int) -> None:
    _, result = _fit(ENDS[name][0](), min_duration=least)
    assert (result.step, result.finished) == (step, True)
    assert ("max_duration" in result.reason) == (step == 12)


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ({"hard_stop": 5}, 5),
        ({"hard_stop": "1ep"}, 3),
        ({"hard_stop": "8sp"}, 12),
        ({"hard_stop": 20}, 12),
        ({"max_duration": "30tok"}, None),
        ({"max_duration": "300tok", "hard_stop": 5}, 5),
    ],
)
def test_displays_count_to_the_step_at_which_the_run_ends(settings: dict[str, Any], total: int | None) -> None:
    logger = ListLogger()
    _fit(logger=logger, **settings)
    assert logger.facts[0].total_steps == total


class Derived(Callback):
    """Logs a metric after an evaluation, from a metric of it."""

    def on_after_evaluation(self, trainer: Any, metrics: Any) -> None:
        assert "val/perplexity" not in metrics
        trainer.log_metrics({"val/perplexity": math.exp(metrics["task/score"])})


class Declared(Derived):
    def logged_metrics(self) -> list[str]:
        return ["val/perplexity"]


@pytest.mark.parametrize("derived", [Derived, Declared])
def test_a_metric_that_a_callback_logs_after_an_evaluation_is_watched(derived: Any, tmp_path: Path) -> None:
    stopping = EarlyStopping("val/perplexity", patience=2)
    plateau = Scheduled(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0), metric="val/perplexity")
    saver = CheckpointerCallback(
        tmp_path,
        save_interval=None,
        pre_train_checkpoint=False,
        save_final=False,
        keep_best={"metric": "val/perplexity"},
    )
    made = trainer(
        # The one that watches stands first.
        callbacks={"stopping": stopping, "derived": derived(), "scores": Scores(3, 2, 1, 2, 2)},
        schedulers=plateau,
        settings={"max_duration": 9, "eval_interval": 1},
        checkpoint=saver,
    )
    result = made.fit(loader(10, 4), loader(6))
    assert (result.step, stopping.best) == (5, math.exp(1))
    assert "val/perplexity has not been below 2.71828 (step 3)" in result.reason
    assert made.optimizers["optimizer"].param_groups[0]["lr"] == 0.1 * 0.5**2, "reduced at steps 4 and 5"
    assert [path.name for path in tmp_path.glob("step*")] == ["step3"]


@pytest.mark.parametrize(
    ("callback", "metric", "step"),
    [(Derived, "val/perplexitty", 2), (Declared, "val/perplexitty", 0), (Declared, "val/loss2", 0)],
)
def test_a_metric_that_no_callback_logs_is_refused_at_the_latest_after_the_first_evaluation(
    callback: Any, metric: str, step: int
) -> None:
    made = trainer(
        callbacks={"stopping": EarlyStopping(metric, "min"), "derived": callback(), "scores": Scores(1)},
        settings={"max_duration": 6, "eval_interval": 2},
    )
    cure = "Did you mean 'val/perplexity'" if "perplex" in metric else "Did you mean 'val/loss'"
    with pytest.raises(UserError, match=rf"stopping\.metric is '{metric}', which no .* reports.*{cure}"):
        made.fit(loader(10, 4), loader(6))
    assert made.progress.step == step


def test_a_metric_that_a_callback_only_claims_to_log_is_refused_after_the_first_evaluation() -> None:
    class Claims(Callback):
        def logged_metrics(self) -> list[str]:
            return ["val/perplexity"]

    made = trainer(
        callbacks={"stopping": EarlyStopping("val/perplexity"), "claims": Claims()},
        settings={"max_duration": 6, "eval_interval": 2},
    )
    with pytest.raises(UserError, match="which no validation loader or callback reports"):
        made.fit(loader(10, 4), loader(6))
    assert made.progress.step == 2


def checked(callback: Any) -> Any:
    """As before the first step, once it is known that its metric exists."""
    callback.check_wanted_metrics("callbacks.mine")
    return callback


WATCHERS: dict[str, Callable[..., Any]] = {
    "EarlyStopping": lambda metric, **mode: checked(EarlyStopping(metric, **mode)).mode,
    "ThresholdStopper": lambda metric, **mode: checked(ThresholdStopper(metric, 1.0, **mode)).mode,
    "keep_best": lambda metric, **mode: KeepBestConfig(metric=metric, **mode).mode,
    "ReduceLROnPlateau": lambda metric, **mode: (
        scheduler_factory(ReduceLROnPlateau, TrainingLoop(max_duration=3), metric=metric, **mode)(
            SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        ).mode
    ),
}


@pytest.mark.parametrize("kind", WATCHERS)
@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *((f"val/{name}", "max") for name in ("accuracy", "Accuracy", "auc", "f1", "bleu", "map/map_50", "recall@10")),
        *((f"val/{name}", "min") for name in ("loss", "error", "perplexity", "mse", "parts/nll")),
        ("train/accuracy", "max"),
    ],
)
def test_without_a_mode_the_direction_is_the_usual_one_of_the_metric(kind: str, metric: str, mode: str) -> None:
    assert WATCHERS[kind](metric) == mode
    other = "max" if mode == "min" else "min"
    assert WATCHERS[kind](metric, mode=other) == other, "what is written decides"


@pytest.mark.parametrize("kind", WATCHERS)
@pytest.mark.parametrize(
    ("metric", "hint"), [("val/score", ""), ("val/neg_mse", ""), ("val/los", "Did you mean 'loss'")]
)
def test_a_metric_of_unknown_direction_asks_for_the_mode(kind: str, metric: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"{metric}.*mode=min or .*mode=max\. ?{hint}"):
        WATCHERS[kind](metric)
    assert WATCHERS[kind](metric, mode="max") == "max"


@pytest.mark.parametrize(
    ("metric", "cause"),
    [
        ("val/rsq", r"callbacks\.stopping\.metric is 'val/rsq', which no validation loader or callback reports"),
        ("vall/loss", r"there is no validation loader 'vall'.* Write val/loss\.$"),
        ("vall/rsq", r"there is no validation loader 'vall'.* Write val/rsq\.$"),
        (
            "val/own",
            r"does not tell .*callbacks\.stopping\.mode.* Set mode: min or .* \+\+callbacks\.stopping\.mode=min or ",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["EarlyStopping", "ThresholdStopper"])
def test_a_metric_that_does_not_exist_is_the_mistake_before_its_mode(kind: str, metric: str, cause: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, batch: Any) -> dict[str, torch.Tensor]:
            loss = self.layer.weight.sum()
            return {"loss": loss, "own": loss.detach()}

    callback = EarlyStopping(metric) if kind == "EarlyStopping" else ThresholdStopper(metric, 1.0)
    made = trainer(Own(), callbacks={"stopping": callback}, settings={"max_duration": 4})
    with pytest.raises(UserError, match=cause):
        made.fit(loader(10, 4), loader(6))
    assert made.progress.step == 0
