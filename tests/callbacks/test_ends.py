"""Every callback that ends a run: it stays ended when started again, and no run ends before `loop.min_duration`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import ListLogger, StopAt, everything, loader, same, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyExit, EarlyStopping, ThresholdStopper
from trainer_cli.trainer.hooks import Callback


class Scores(Callback):
    """A downstream evaluation that is best at step 2."""

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        trainer.log_metrics({"task/score": abs(trainer.progress.step - 2.0)})


def _enough(trainer: Any) -> Any:
    return trainer.progress.step == 4 and "enough"


# Callbacks that end the run at step 4, and ones with another rule.
ENDS: dict[str, tuple[Any, Any]] = {
    "EarlyExit": (lambda: EarlyExit([_enough]), None),
    "EarlyStopping": (lambda: EarlyStopping("task/score", patience=2), lambda: EarlyStopping("task/score", patience=4)),
    "ThresholdStopper": (
        lambda: ThresholdStopper("task/score", 2.0, "max"), lambda: ThresholdStopper("task/score", 5.0, "max")
    ),
    "a callback of the user's own": (lambda: StopAt(4, finished=True), None),
}  # fmt: skip


def _fit(folder: Path | None, *callbacks: Any, logger: Any = None, **settings: Any) -> Any:
    made = trainer(
        callbacks={"scores": Scores(), **{str(number): callback for number, callback in enumerate(callbacks)}},
        settings={"max_duration": 9, "eval_interval": 1, "log_interval": 3, **settings},
        loggers=[logger or ListLogger()], run_dir=folder,
        checkpoint=None if folder is None else CheckpointerCallback(folder / "ckpt", save_interval=3),
    )  # fmt: skip
    return made, made.fit(loader())


@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_a_callback_ended_stays_ended(name: str, tmp_path: Path) -> None:
    end, _ = ENDS[name]
    made, first = _fit(tmp_path, end())
    assert (first.step, first.finished) == (4, True)
    for max_duration in (9, "9st", 8):
        again, result = _fit(tmp_path, end(), max_duration=max_duration)
        assert (result.step, result.finished, result.reason) == (4, True, first.reason)
        assert same(everything(made)["model"], everything(again)["model"]) == []


@pytest.mark.parametrize("change", [{"max_duration": 12}, {"max_duration": "9ep"}, {"hard_stop": 6}])
@pytest.mark.parametrize("name", ENDS)
def test_a_longer_run_goes_on(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    end, _ = ENDS[name]
    _fit(tmp_path, end())
    _, result = _fit(tmp_path, end(), **change)
    assert result.step > 4


@pytest.mark.parametrize("name", [name for name, (_, other) in ENDS.items() if other is not None])
def test_a_run_goes_on_under_another_rule(name: str, tmp_path: Path) -> None:
    end, other = ENDS[name]
    _fit(tmp_path, end())
    assert _fit(tmp_path, other())[1].step > 4


@pytest.mark.parametrize("name", [name for name in ENDS if name != "a callback of the user's own"])
def test_a_run_goes_on_without_the_callback_that_ended_it(name: str, tmp_path: Path) -> None:
    _fit(tmp_path, ENDS[name][0]())
    assert _fit(tmp_path)[1].step == 9


@pytest.mark.parametrize(
    ("least", "step"), [(None, 4), (3, 4), (6, 6), ("2ep", 6), ("27sp", 8), (9, 9), ("90ep", 9), ("0.001s", 4)]
)
@pytest.mark.parametrize("name", ENDS)
def test_no_callback_ends_a_run_before_its_least_duration(name: str, least: Any, step: int) -> None:
    _, result = _fit(None, ENDS[name][0](), min_duration=least)
    assert (result.step, result.finished) == (step, True)
    assert ("max_duration" in result.reason) == (step == 9)


@pytest.mark.parametrize("stop", [2, 4, 5, 6])
@pytest.mark.parametrize("name", ENDS)
def test_a_request_that_is_held_outlives_a_stop(name: str, stop: int, tmp_path: Path) -> None:
    end, _ = ENDS[name]
    logs = [ListLogger(), ListLogger()]
    straight, ended = _fit(tmp_path / "a", end(), logger=logs[0], min_duration=7)
    _, stopped = _fit(tmp_path / "b", end(), StopAt(stop), logger=logs[1], min_duration=7)
    assert (stopped.step, stopped.finished) == (stop, False), "a signal ends the process at once"
    resumed, result = _fit(tmp_path / "b", end(), logger=logs[1], min_duration=7)
    assert (result.step, result.reason) == (ended.step, ended.reason)
    assert ended.step == 7
    assert same(everything(straight), everything(resumed)) == []
    assert logs[0].stream == logs[1].stream


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ({}, 9), ({"hard_stop": 5}, 5), ({"hard_stop": "1ep"}, 3), ({"hard_stop": "8sp"}, 9), ({"hard_stop": 20}, 9),
        ({"max_duration": "30tok"}, None), ({"max_duration": "300tok", "hard_stop": 5}, 5),
    ],
)  # fmt: skip
def test_displays_count_to_the_step_at_which_the_run_ends(settings: dict[str, Any], total: int | None) -> None:
    logger = ListLogger()
    _fit(None, logger=logger, **settings)
    assert logger.facts[0].total_steps == total
