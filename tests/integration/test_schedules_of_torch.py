"""Schedules of torch that ship as configs, by the real command: they change the rate, and a resume is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import train
from compare import assert_same_state, metrics


@pytest.mark.parametrize(
    "schedule",
    [
        ("scheduler=one_cycle", "optimizer.lr=0.01"),
        ("scheduler=reduce_on_plateau", "scheduler.patience=0", "+scheduler.threshold=0.9"),
    ],
    ids=["one_cycle", "reduce_on_plateau"],
)
def test_a_schedule_of_torch_that_ships_goes_on_bit_for_bit(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    often = ("loop.max_duration=12", "loop.eval_interval=2", "loop.eval_steps=1", "loop.log_interval=1")
    own = ("model=mlp", "data=digits", "optimizer=adamw", *schedule, *often, "checkpoint.save_async=false")
    for folder, *more in (("straight",), ("parts", "loop.hard_stop=6"), ("parts",)):
        done = train("fit", *own, *more, f"run_dir={folder}", cwd=tmp_path)
        assert done.code == 0, done.err
    assert "from step6" in done.err
    straight, parts = (
        [(record["step"], record["train/lr"]) for record in metrics(tmp_path / folder) if "train/lr" in record]
        for folder in ("straight", "parts")
    )
    assert straight == parts
    assert len({rate for step, rate in straight if step > 6}) > 2
    assert_same_state(tmp_path / "parts", tmp_path / "straight")
