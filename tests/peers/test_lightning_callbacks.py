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
from peer_claims import Claim, claims, each, try_claim
from small_runs import Net, Run, Script, fit, make_trainer, rows

from trainer_cli import (
    Callback,
    ConfigError,
    Duration,
    EarlyStopping,
    ThresholdStopper,
    UserError,
)

STOPPING, TIMER = "test_early_stopping: ", "test_timer: "


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


def check_stops(folder: Path, scores: Sequence[float], patience: int, epoch: int, training: bool, **more: Any) -> None:
    run = fit_scored(scores, [stopper_of(patience, training, **more)], training)
    assert run.trainer.progress.step - 1 == epoch
    assert run.result.finished


def check_threshold(folder: Path, stopper: Callback, scores: Sequence[float], epoch: int) -> None:
    run = fit_scored(scores, [stopper])
    assert run.trainer.progress.step - 1 == epoch


def check_not_finite(folder: Path, value: float) -> None:
    run = fit_scored([4, 3, value, 2, 1], [stopper_of(3)])
    assert run.trainer.progress.step - 1 == 2
    assert "val/score is" in run.result.reason


def check_minimum(folder: Path, batches: int, minimum: str | int, step: int) -> None:
    run = fit(
        batches=batches,
        loop={"max_duration": "9ep", "min_duration": minimum, "eval_interval": "1ep"},
        callbacks=[stopper_of(1), Script([math.inf])],
    )
    assert run.trainer.progress.step == step


def check_two_stoppers(folder: Path, patiences: Sequence[int]) -> None:
    """`val/score` falls and rises, `val/flat` never changes: whichever runs out first stops."""
    stoppers = [EarlyStopping(f"val/{name}", patience=f"{patiences[name == 'flat']}ep") for name in ("score", "flat")]
    run = fit(
        batches=1,
        loop={"max_duration": 20, "eval_interval": 1},
        callbacks=[*stoppers, Script([8, 4, 2, 3, 4, 5, 8, 10]), Script([0], "val/flat")],
    )
    assert run.trainer.progress.step - 1 == 3


def check_looks_at_evaluations(folder: Path, interval: str, batches: int, steps: Sequence[int]) -> None:
    run = fit(
        batches=batches,
        loop={"max_duration": 30, "eval_interval": interval},
        callbacks=[EarlyStopping("val/score", patience=1), Script([1])],
    )
    assert run.evaluated.steps == steps
    assert run.trainer.progress.step == steps[-1]


def check_refused(folder: Path, make: Any, arguments: Mapping[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make(**arguments)


def check_reason(folder: Path, stopper: Callback, scores: Sequence[float], reason: str) -> None:
    run = fit_scored(scores, [stopper], max_duration=len(scores) + 2)
    assert reason in run.result.reason


def check_not_stopped(folder: Path) -> None:
    run = fit_scored([5, 4, 3], [stopper_of(3)], max_duration=3)
    assert run.result.finished
    assert "val/score" not in run.result.reason


def check_state_restored(folder: Path) -> None:
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


def check_stays_finished(folder: Path) -> None:
    for _ in range(2):
        run = fit(
            folder, batches=1, save={}, loop={"max_duration": 9, "eval_interval": 1},
            callbacks=[stopper_of(1), Script([1])],
        )  # fmt: skip
    assert not run.trained.batches
    assert run.trainer.progress.step == 2


def check_pickled(folder: Path, value: Any) -> None:
    other = pickle.loads(pickle.dumps(value))
    assert vars(other) == vars(value)


def check_unknown_metric(folder: Path) -> None:
    with pytest.raises(UserError, match="val/nothing"):
        fit(loop={"eval_interval": 1}, callbacks=[EarlyStopping("val/nothing")])


class Slow(Callback):
    """Each step takes 10 ms."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.01)


def check_duration(folder: Path, text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ValueError, match="is not a duration"):
            Duration.parse(text)
    else:
        assert float(Duration.parse(text).value) == seconds


def check_time_ends_run(folder: Path, limit: Mapping[str, Any], finished: bool) -> None:
    run = fit(loop={"max_duration": 10_000, **limit}, callbacks=[Slow()])
    assert 1 <= run.trainer.progress.step < 10_000
    assert run.result.finished is finished


def check_time_held(folder: Path, minimum: int | str, least: int) -> None:
    run = fit(loop={"max_duration": "0.001s", "min_duration": minimum}, batches=2, callbacks=[Slow()])
    assert run.trainer.progress.step >= 1
    assert run.result.finished
    assert run.trainer.progress.step < least + 1


def check_time_resumed(folder: Path) -> None:
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


def check_callback_state(folder: Path, first: Any, second: Any, expected: Any) -> None:
    fit(folder, save={}, loop={"max_duration": 2}, callbacks=first)
    run = fit(folder, save={}, loop={"max_duration": 3}, callbacks=second)
    assert run.trainer.progress.step == 3
    assert [one.value for one in run.trainer.get_callbacks(Stateful).values()] == expected


def check_same_class_twice(folder: Path) -> None:
    first = {"a": Stateful(1), "b": Stateful(2)}
    for callbacks in (first, {"b": Stateful(0), "a": Stateful(0)}):
        trainer = make_trainer(
            folder, save={}, callbacks=callbacks, loop={"max_duration": 2 + (callbacks is not first)}
        )
        trainer.fit(rows(4))
    assert [callbacks[name].value for name in "ab"] == [1, 2]


PATIENCE = {
    "three epochs without a better value end it": ([6, 5, 5, 5, 5, 5], 3, 4),
    "one epoch without a better value ends it": ([6, 5, 4, 4, 3, 3], 1, 3),
    "an equal value is not better": ([6, 5, 6, 5, 5, 5], 3, 4),
}


CLAIMS: list[Claim] = [
    *claims(
        f"{STOPPING}test_early_stopping_patience",
        check_stops,
        {f"of evaluations, {text}": (*row, False) for text, row in PATIENCE.items()},
    ),
    *claims(
        f"{STOPPING}test_early_stopping_patience_train",
        check_stops,
        {f"of the training, {text}": (*row, True) for text, row in PATIENCE.items()},
    ),
    *claims(
        f"{STOPPING}test_early_stopping_no_val_step",
        check_stops,
        {"without validation, the training's metric is enough": ([5, 5, 5], 1, 1, True)},
    ),
    *claims(
        f"{STOPPING}test_early_stopping_thresholds",
        check_stops,
        {"without a threshold patience alone counts": ([8, 4, 2, 3, 4, 5, 8, 10], 3, 5, False)},
    ),
    *claims(
        f"{STOPPING}test_early_stopping_thresholds",
        check_threshold,
        {
            "a value below a threshold ends it": (
                ThresholdStopper("val/score", 2.9),
                [9, 8, 7, 6, 5, 6, 4, 3, 2, 1],
                8,
            ),
            "a value above another ends it": (ThresholdStopper("val/score", 15.9, "max"), [9, 4, 2, 16, 32, 64], 3),
        },
    ),
    *claims(
        f"{STOPPING}test_early_stopping_on_non_finite_monitor",
        check_not_finite,
        {"infinity ends it at once": (math.inf,), "NaN ends it at once": (math.nan,)},
    ),
    *claims(
        f"{STOPPING}test_min_epochs_min_steps_global_step",
        check_minimum,
        {
            "a stop in the first epoch of 3 waits for step 10": (3, 10, 10),
            "a stop in the first epoch of 5 waits for step 10": (5, 10, 10),
            "it waits for the second epoch of 3": (3, "2ep", 6),
            "it waits for the second epoch of 5": (5, "2ep", 10),
            "it waits for the third epoch of 5": (5, "3ep", 15),
        },
    ),
    *claims(
        f"{STOPPING}test_multiple_early_stopping_callbacks",
        check_two_stoppers,
        {
            "of two the one whose patience ends first stops": ((3, 3),),
            "a longer patience of the other changes nothing": ((9, 3),),
        },
    ),
    *claims(
        f"{STOPPING}test_check_on_train_epoch_end_smart_handling",
        check_looks_at_evaluations,
        {
            "with evaluations in an epoch each is looked at": ("0.3ep", 10, [3, 6]),
            "with evaluations every second epoch, these are": ("2ep", 2, [4, 8]),
        },
    ),
    *claims(
        f"{STOPPING}test_early_stopping_mode_options",
        check_refused,
        {"an unknown mode is refused": (EarlyStopping, {"mode": "unknown"}, "min or max")},
    ),
    *claims(
        f"{STOPPING}test_early_stopping_no_val_step",
        check_refused,
        {"a patience of 0": (EarlyStopping, {"patience": 0}, "patience")},
        difference="Patience is a duration, and those are above zero: one evaluation later is the earliest that a "
        "value can fail to improve, which is patience=1.",
    ),
    *claims(
        f"{STOPPING}test_early_stopping_reasons",
        check_reason,
        {
            "the reason tells that patience is used up": (stopper_of(2), [10] * 3, "has not been below 10"),
            "the reason tells the threshold": (ThresholdStopper("val/score", 0.6), [5, 3, 1, 0.5], "0.6 was wanted"),
            "the reason tells the divergence": (ThresholdStopper("val/score", 8, "max"), [1, 2, 5, 10], "8 was wanted"),
            "the reason tells a value that is not finite": (stopper_of(3), [1, 0.5, math.nan], "val/score is nan"),
        },
    ),
    *claims(
        f"{STOPPING}test_early_stopping_reasons",
        check_not_stopped,
        {"a run that is not stopped ends with its length": ()},
    ),
    *claims(
        f"{STOPPING}test_resume_early_stopping_from_checkpoint",
        check_state_restored,
        {"a resumed run knows the best value and its step": ()},
    ),
    *claims(
        f"{STOPPING}test_resume_early_stopping_from_checkpoint",
        check_stays_finished,
        {"a run that was stopped and is started again": ()},
        difference="Lightning refuses a checkpoint whose epoch is past max_epochs; here the run is finished, and "
        "starting it again does nothing.",
    ),
    *claims(f"{STOPPING}test_pickling", check_pickled, {"a stopper can be pickled": (EarlyStopping("val/loss"),)}),
    *claims(
        f"{TIMER}test_timer_parse_duration",
        check_duration,
        {
            "22 seconds are a duration": ("22s", 22),
            "days, hours, minutes and seconds are added": ("12d 34h 56min 65s", 12 * 86400 + 34 * 3600 + 56 * 60 + 65),
            "days alone are a duration": ("365d", 365 * 86400),
        },
    ),
    *claims(
        f"{TIMER}test_timer_parse_duration_misconfiguration",
        check_duration,
        {"a clock without units is refused": ("6:00:00", None), "words for minutes are refused": ("60 minutes", None)},
    ),
    *claims(
        f"{TIMER}test_timer_parse_duration",
        check_duration,
        {"a clock of four numbers": ("00:00:00:22", None)},
        difference="DD:HH:MM:SS is refused, as it is read in two ways easily; each number has its unit: 1d2h3min4s.",
    ),
    *claims(
        f"{TIMER}test_timer_stops_training",
        check_time_ends_run,
        {"a duration in time ends the run": ({"max_duration": "0.05s"}, True)},
    ),
    *claims(
        f"{TIMER}test_trainer_flag",
        check_time_ends_run,
        {"max_time stops this process before the run's length": ({"max_time": "0.05s"}, False)},
        difference="max_time ends this process with a checkpoint to resume, as a batch system wants; a run that is "
        "finished after a time has it as max_duration.",
    ),
    *claims(
        f"{TIMER}test_timer_zero_duration_stop",
        check_refused,
        {"a duration of zero": (EarlyStopping, {"patience": "0s"}, "more than zero")},
        difference="No step would be made, which is hardly ever meant: every duration is above zero.",
    ),
    *claims(
        f"{TIMER}test_timer_duration_min_steps_override",
        check_time_held,
        {
            "a least number of steps": (3, 1),
            "a least number of epochs": ("2ep", 1),
        },
        difference="min_duration holds callbacks' stops back, not the run's own length: a max_duration in time "
        "ends it.",
    ),
    *claims(f"{TIMER}test_timer_resume_training", check_time_resumed, {"the time of earlier processes counts": ()}),
    *claims(
        "test_callbacks: test_resume_callback_state_saved_by_type_stateful",
        check_callback_state,
        {"a callback's state is restored by its name": ([Stateful(111)], [Stateful(222)], [111])},
    ),
    *claims(
        "test_callbacks: test_resume_incomplete_callbacks_list_warning",
        check_callback_state,
        {
            "a state whose callback is gone stops no resume": ([Stateful(1)], [], []),
            "a callback without a saved state starts as it is": ([], [Stateful(5)], [5]),
        },
    ),
    *claims(
        "test_trainer: test_on_load_checkpoint_missing_callbacks",
        check_same_class_twice,
        {"two callbacks of one class have states of their own": ()},
    ),
    *claims(
        "callbacks/early_stopping.py: strict",
        check_unknown_metric,
        {"a metric that nothing reports is an error before the first step": ()},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
