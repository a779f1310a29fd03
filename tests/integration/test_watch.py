"""`train validate validate.watch=true`: each checkpoint as it is committed, until the run ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from command import make_project, records, running, train

pytestmark = pytest.mark.slow
WATCH = ("ckpt=runs/mine/checkpoints/step*", "validate.watch=true", "validate.folder=out")


def test_each_checkpoint_is_evaluated_once_until_the_run_ends(tmp_path: Path) -> None:
    make_project(tmp_path)
    with running("validate", *WATCH, cwd=tmp_path) as watching:
        with running("fit", "experiment=mine", cwd=tmp_path) as training:
            assert training.end().code == 0
        result = watching.end()
    assert result.code == 0, result.err
    assert "waiting: ckpt=runs/mine/checkpoints/step* matches nothing" in result.err
    rows = records(tmp_path / "out/validation.jsonl")
    assert [row["step"] for row in rows] == [0, 16, 32, 40]
    own = {one["step"]: one["val/loss"] for one in records(tmp_path / "runs/mine/metrics.jsonl") if "val/loss" in one}
    assert {row["step"]: row["val/loss"] for row in rows if row["step"] in own} == own
    assert result.out.count("step40") == 1


def test_ctrl_c_ends_it_with_its_results(tmp_path: Path) -> None:
    make_project(tmp_path)
    assert train("fit", "experiment=mine", "loop.max_duration=16", cwd=tmp_path).code == 0
    summary = tmp_path / "runs/mine/summary.json"
    summary.write_text(summary.read_text().replace('"status": "finished"', '"status": "running"'))
    with running("validate", *WATCH, cwd=tmp_path) as watching:
        done = tmp_path / "out/validation.jsonl"
        watching.wait_for(lambda: done.exists() and len(records(done)) == 2, "done with two")
        watching.signal(signal.SIGINT)
        result = watching.end()
    assert (result.code, "results: out/validation.jsonl" in result.out) == (0, True)


def test_a_finished_run_is_evaluated_and_not_waited_for(tmp_path: Path) -> None:
    make_project(tmp_path)
    assert train("fit", "experiment=mine", "loop.max_duration=16", cwd=tmp_path).code == 0
    assert train("validate", *WATCH, cwd=tmp_path).code == 0
    assert [row["step"] for row in records(tmp_path / "out/validation.jsonl")] == [0, 16]
