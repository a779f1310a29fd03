"""`train validate validate.watch=true`: each checkpoint as it is committed, until the run ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from command import CODE, hold, make_project, records, running, train

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
    assert "runs/mine/checkpoints/step40 on val: loss " in result.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_results(tmp_path: Path, number: signal.Signals) -> None:
    make_project(tmp_path)
    assert train("fit", "experiment=mine", "loop.max_duration=16", cwd=tmp_path).code == 0
    summary = tmp_path / "runs/mine/summary.json"
    summary.write_text(summary.read_text().replace('"status": "finished"', '"status": "running"'))
    with running("validate", *WATCH, cwd=tmp_path) as watching:
        done = tmp_path / "out/validation.jsonl"
        watching.wait_for(lambda: done.exists() and len(records(done)) == 2, "done with two")
        watching.signal(number)
        result = watching.end()
    assert (result.code, "results: out/validation.jsonl" in result.out) == (0, True)


def test_a_finished_run_is_evaluated_and_not_waited_for(tmp_path: Path) -> None:
    make_project(tmp_path)
    assert train("fit", "experiment=mine", "loop.max_duration=16", cwd=tmp_path).code == 0
    assert train("validate", *WATCH, cwd=tmp_path).code == 0
    assert [row["step"] for row in records(tmp_path / "out/validation.jsonl")] == [0, 16]


def test_a_checkpoint_that_was_removed_before_its_turn_is_passed_over(tmp_path: Path) -> None:
    make_project(tmp_path)
    assert train("fit", "experiment=mine", "loop.max_duration=16", cwd=tmp_path).code == 0
    held = hold(tmp_path, "start")
    with running("validate", *WATCH, cwd=tmp_path) as watching:
        watching.reach("start")
        assert train("ckpt", "rm", "runs/mine/checkpoints/step0", "--yes", cwd=tmp_path).code == 0
        held.unlink()
        result = watching.end()
    assert result.code == 0, result.err
    assert "runs/mine/checkpoints/step0 was removed before it was evaluated" in result.err
    assert [row["step"] for row in records(tmp_path / "out/validation.jsonl")] == [16]


def test_data_is_made_once_and_a_run_may_be_named_by_rank(tmp_path: Path) -> None:
    counting = CODE.replace('pass_by("start")', 'open("made", "a").write("x"); pass_by("start")')
    make_project(tmp_path, **{"mine/parts.py": counting})
    assert train("fit", "experiment=mine", "run_dir=runs/r2", cwd=tmp_path).code == 0
    (tmp_path / "made").unlink()
    pattern = "ckpt=runs/r{rank}/checkpoints/step*"
    assert train("validate", pattern, *WATCH[1:], cwd=tmp_path, RANK="2").code == 0
    assert [row["step"] for row in records(tmp_path / "out/validation.jsonl")] == [0, 16, 32, 40]
    assert (tmp_path / "made").read_text() == "x"
