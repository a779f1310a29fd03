"""Saves that follow one another within a budget: the real callback in a real training."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import Line, assert_resumes_exactly, loader, trainer

from trainer_cli import CheckpointerCallback
from trainer_cli.callbacks.save_budget import SaveBudget
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.errors import ConfigError
from trainer_cli.steps.progress import Progress

STEP_S = 0.005


class SlowLine(Line):
    def forward(self, batch: Any) -> Any:
        time.sleep(STEP_S)
        return super().forward(batch)


def fit(folder: Path, *callbacks: Any, model: Any = Line, steps: int = 12, **settings: Any) -> Any:
    identity = RunIdentity(run_id="x", history_file=folder.parent / f"{folder.name}.jsonl")
    fields = {"save_interval": None, "ephemeral_save_interval": "auto", **settings}
    checkpoint = CheckpointerCallback(folder, identity=identity, **fields)
    trained = trainer(model, checkpoint=checkpoint, callbacks=callbacks, settings={"max_duration": steps})
    trained.fit(loader(40, 2))
    return trained


def saves(folder: Path) -> list[dict[str, Any]]:
    lines = (folder.parent / f"{folder.name}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "saved"]


@pytest.mark.parametrize("save_async", [False, True])
def test_saves_follow_one_another_and_take_their_share_of_the_time(save_async: bool, tmp_path: Path) -> None:
    trained = fit(tmp_path / "x", model=SlowLine, steps=60, budget=0.5, save_async=save_async, save_final=False)
    automatic = [save for save in saves(tmp_path / "x") if save["reason"].startswith("auto")]
    assert len(automatic) >= 3
    assert {save["kind"] for save in automatic} == {"ephemeral"}
    seconds = trained.metric_logger.time.seconds()
    # The last save may not be paid for yet.
    last_s = seconds["saving"] - automatic[-1]["time_s"]["saving"]
    assert seconds["saving"] - last_s <= 0.5 * (seconds["training"] + seconds["data"] + seconds["saving"]) + 0.1
    assert len(list((tmp_path / "x").glob("step*"))) == 2, "that before the first step, and the newest"


def test_a_small_budget_saves_seldom(tmp_path: Path) -> None:
    fit(tmp_path / "x", model=SlowLine, steps=30, budget=0.0001, save_async=False)
    # A save of a millisecond is paid for after ten seconds.
    assert [save["step"] for save in saves(tmp_path / "x")] == [0, 30]


def test_a_resume_is_exact_whenever_the_saves_come(tmp_path: Path) -> None:
    def fit_there(folder: Path, *callbacks: Any) -> Any:
        return fit(folder, *callbacks, budget=1.0)

    assert_resumes_exactly(fit_there, tmp_path, 3, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0.1, "ephemeral_save_interval": None}, "checkpoint.budget is 0.1, but checkpoint.ephemeral_save"),
        ({"budget": 0.0}, "above 0 and at most 1"),
        ({"budget": 1.5}, "above 0 and at most 1"),
        ({"budget": float("nan")}, "above 0 and at most 1"),
        ({"remove": "never"}, "would keep all of them"),
        ({"ephemeral_save_interval": "aut"}, "30min, 1h30m, or auto"),
        ({"keep_by_age": {"1h": 24}}, "checkpoint.max_checkpoints is null"),
        ({"keep_by_age": {"1h": 0}, "max_checkpoints": 1}, "finite number of at least 1"),
        ({"keep_by_age": {"3ep": 1}, "max_checkpoints": 1}, "counted in seconds"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointerCallback(tmp_path, **{"ephemeral_save_interval": "auto", **settings})


def test_a_failed_save_counts_as_a_second_until_the_next_one() -> None:
    budget, progress = SaveBudget(), Progress()
    with budget.measure():
        budget.begin_save(progress)
    budget.fail_save()
    cost = budget.cost()
    assert cost is not None
    assert 45 < cost.wait_s(0.02) <= 50
    with budget.measure():
        budget.begin_save(progress)
    cost = budget.cost()
    assert cost is not None
    assert cost.wait_s(0.02) < 5
