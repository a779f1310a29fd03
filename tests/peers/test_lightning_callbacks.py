"""The claims of Lightning's tests about early stopping, timers and the states of callbacks."""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Net, Run, Script, fit, make_trainer, rows

from trainer_cli import (
    Callback,
    ConfigError,
    Duration,
    EarlyStopping,
    ThresholdStopper,
)


class Scores(Net):
    """Returns `score`: the next of the values at each training step."""

    values: Sequence[float] = ()

    def forward(self, batch: Any) -> Any:
        outputs = super().forward(batch)
        if self.training:
            self.count = getattr(self, "count", -1) + 1
            outputs["score"] = torch.tensor(float(self.values[min(self.count, len(self.values) - 1)]))
        return outputs


def fit_scored(scores: Sequence[float], stopper: Sequence[Callback], training: bool = False, **loop: Any) -> Run:
    """An epoch is one step with one evaluation or one log."""
    return fit(
        batches=1,
        model=type("ScoresNow", (Scores,), {"values": scores}) if training else Net,
        loop={"max_duration": 10, "eval_interval": None if training else 1, "log_interval": 1, **loop},
        callbacks=[*stopper, *([] if training else [Script(scores)])],
    )


def stopper_of(patience: int, training: bool = False, **more: Any) -> EarlyStopping:
    return EarlyStopping("train/score" if training else "val/score", patience=f"{patience}ep", **more)


@pytest.mark.parametrize(
    ("scores", "patience", "epoch", "training"),
    [
        *[([6, 5, 5, 5, 5, 5], 3, 4, training) for training in (False, True)],
        *[([6, 5, 4, 4, 3, 3], 1, 3, training) for training in (False, True)],
        *[([6, 5, 6, 5, 5, 5], 3, 4, training) for training in (False, True)],
        ([5, 5, 5], 1, 1, True),
        ([8, 4, 2, 3, 4, 5, 8, 10], 3, 5, False),
    ],
)
def test_early_stopping_waits_for_its_patience(
    scores: Sequence[float], patience: int, epoch: int, training: bool
) -> None:
    run = fit_scored(scores, [stopper_of(patience, training)], training)
    assert run.trainer.progress.step - 1 == epoch
    assert run.result.finished


@pytest.mark.parametrize(
    ("stopper", "scores", "epoch"),
    [
        (ThresholdStopper("val/score", 2.9), [9, 8, 7, 6, 5, 6, 4, 3, 2, 1], 8),
        (ThresholdStopper("val/score", 15.9, "max"), [9, 4, 2, 16, 32, 64], 3),
    ],
)
def test_a_value_past_a_threshold_ends_the_run(stopper: Callback, scores: Sequence[float], epoch: int) -> None:
    run = fit_scored(scores, [stopper])
    assert run.trainer.progress.step - 1 == epoch


@pytest.mark.parametrize("patiences", [(3, 3), (9, 3)])
def test_the_first_of_two_stoppers_ends_the_run(patiences: Sequence[int]) -> None:
    """`val/score` falls and rises, `val/flat` never changes: whichever runs out first stops."""
    stoppers = [EarlyStopping(f"val/{name}", patience=f"{patiences[name == 'flat']}ep") for name in ("score", "flat")]
    run = fit(
        batches=1,
        loop={"max_duration": 20, "eval_interval": 1},
        callbacks=[*stoppers, Script([8, 4, 2, 3, 4, 5, 8, 10]), Script([0], "val/flat")],
    )
    assert run.trainer.progress.step - 1 == 3


@pytest.mark.parametrize(("interval", "batches", "steps"), [("0.3ep", 10, [3, 6]), ("2ep", 2, [4, 8])])
def test_early_stopping_looks_at_each_evaluation(interval: str, batches: int, steps: Sequence[int]) -> None:
    run = fit(
        batches=batches,
        loop={"max_duration": 30, "eval_interval": interval},
        callbacks=[EarlyStopping("val/score", patience=1), Script([1])],
    )
    assert run.evaluated.steps == steps
    assert run.trainer.progress.step == steps[-1]


@pytest.mark.parametrize(
    ("make", "arguments", "match"),
    [
        (EarlyStopping, {"mode": "unknown"}, "min or max"),
        (EarlyStopping, {"patience": 0}, "patience"),
        (EarlyStopping, {"patience": "0s"}, "more than zero"),
    ],
)
def test_wrong_settings_of_early_stopping_are_refused(make: Any, arguments: Mapping[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make(**arguments)


@pytest.mark.parametrize(
    ("stopper", "scores", "reason"),
    [
        (stopper_of(2), [10] * 3, "has not been below 10"),
        (ThresholdStopper("val/score", 0.6), [5, 3, 1, 0.5], "0.6 was wanted"),
        (ThresholdStopper("val/score", 8, "max"), [1, 2, 5, 10], "8 was wanted"),
        (stopper_of(3), [1, 0.5, math.nan], "val/score is nan"),
    ],
)
def test_the_reason_of_the_stop_is_logged(stopper: Callback, scores: Sequence[float], reason: str) -> None:
    run = fit_scored(scores, [stopper], max_duration=len(scores) + 2)
    assert reason in run.result.reason


def test_a_run_that_is_not_stopped_ends_with_its_length() -> None:
    run = fit_scored([5, 4, 3], [stopper_of(3)], max_duration=3)
    assert run.result.finished
    assert "val/score" not in run.result.reason


def test_a_resumed_run_knows_the_best_value_and_its_step(folder: Path) -> None:
    first = stopper_of(9)
    fit(folder, batches=1, save={}, loop={"max_duration": 3, "eval_interval": 1}, callbacks=[first, Script([3, 2, 4])])
    second = stopper_of(9)
    state: list[Any] = []

    class Start(Callback):
        def on_train_start(self, *_: Any) -> None:
            state.append(copy.deepcopy(second.state_dict()))

    fit(
        folder,
        batches=1,
        save={},
        loop={"max_duration": 4, "eval_interval": 1},
        callbacks=[second, Script([1]), Start()],
    )
    assert state[0] == first.state_dict()
    assert (first.best, first.state_dict()["since"]["step"]) == (2.0, 2)


@pytest.mark.parametrize("value", [EarlyStopping("val/loss")])
def test_a_stopper_can_be_pickled(value: Any) -> None:
    other = pickle.loads(pickle.dumps(value))
    assert vars(other) == vars(value)


class Slow(Callback):
    """Each step takes 10 ms."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("22s", 22),
        ("12d 34h 56min 65s", 12 * 86400 + 34 * 3600 + 56 * 60 + 65),
        ("365d", 365 * 86400),
        ("6:00:00", None),
        ("60 minutes", None),
        ("00:00:00:22", None),
    ],
)
def test_durations_in_time_are_read(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ValueError, match="is not a duration"):
            Duration.parse(text)
    else:
        assert float(Duration.parse(text).value) == seconds


@pytest.mark.parametrize(("limit", "finished"), [({"max_duration": "0.05s"}, True), ({"max_time": "0.05s"}, False)])
def test_a_time_ends_the_run(limit: Mapping[str, Any], finished: bool) -> None:
    run = fit(loop={"max_duration": 10_000, **limit}, callbacks=[Slow()])
    assert 1 <= run.trainer.progress.step < 10_000
    assert run.result.finished is finished


@pytest.mark.parametrize(("minimum", "least"), [(3, 1), ("2ep", 1)])
def test_a_time_waits_for_the_least_length(minimum: int | str, least: int) -> None:
    run = fit(loop={"max_duration": "0.001s", "min_duration": minimum}, batches=2, callbacks=[Slow()])
    assert run.trainer.progress.step >= 1
    assert run.result.finished
    assert run.trainer.progress.step < least + 1


def test_the_time_of_earlier_processes_counts(folder: Path) -> None:
    steps = []
    for _ in range(2):
        run = fit(folder, save={}, loop={"max_duration": "0.05s"}, callbacks=[Slow()])
        steps.append((run.trainer.progress.step, len(run.trained.batches)))
    assert steps[1] == (steps[0][0], 0)
    assert run.trainer.progress.seconds >= 0.05


class Stateful(Callback):
    """A callback with a state."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([Stateful(111)], [Stateful(222)], [111]), ([Stateful(1)], [], []), ([], [Stateful(5)], [5])],
)
def test_states_of_callbacks_are_restored_by_name(folder: Path, first: Any, second: Any, expected: Any) -> None:
    fit(folder, save={}, loop={"max_duration": 2}, callbacks=first)
    run = fit(folder, save={}, loop={"max_duration": 3}, callbacks=second)
    assert run.trainer.progress.step == 3
    assert [one.value for one in run.trainer.get_callbacks(Stateful).values()] == expected


def test_two_callbacks_of_one_class_have_states_of_their_own(folder: Path) -> None:
    first = {"a": Stateful(1), "b": Stateful(2)}
    for callbacks in (first, {"b": Stateful(0), "a": Stateful(0)}):
        trainer = make_trainer(
            folder, save={}, callbacks=callbacks, loop={"max_duration": 2 + (callbacks is not first)}
        )
        trainer.fit(rows(4))
    assert [callbacks[name].value for name in "ab"] == [1, 2]
