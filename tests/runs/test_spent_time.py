"""The goodput of a run from its files: attempts that ended, that were killed, and one that trains."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trainer_cli.catalog.history import CheckpointHistory, Spent
from trainer_cli.runs.run import Run
from trainer_cli.runs.run_dir import Outcome, RunDir
from trainer_cli.runs.run_lock import RunLock
from trainer_cli.steps.run_status import RunStatus

NOW = 1.5e9
STOPPED = {"start": 1.0, "training": 10.0, "saving": 1.0}


def created(path: Path) -> RunLock:
    lock = RunDir(path).create("name: x\n", [], {"run_id": "x"})
    RunDir(path).begin_attempt(name="x", start_step=0, now=NOW, environment={})
    return lock


def end(run: RunDir, time_s: dict[str, float], kept_s: float, now: float = NOW + 12) -> None:
    outcome = Outcome(
        status=RunStatus.stopped, reason="SIGTERM", step=5, wall_time_s=11.0, time_s=time_s, kept_s=kept_s
    )
    run.end_attempt(outcome, now=now)


def save(run: RunDir, at: float, time_s: dict[str, float], kept_s: float) -> None:
    CheckpointHistory(run.history_file).saved("step5", 5, "permanent", "every 5 steps", Spent(time_s, kept_s))
    line = {**json.loads(run.history_file.read_text().splitlines()[-1]), "time": at}
    run.history_file.write_text(f"{json.dumps(line)}\n")
    os.utime(run.history_file, (at, at))


def record(run: RunDir, at: float) -> None:
    run.metrics_file.write_text(json.dumps({"step": 8, "epoch": 0.0, "time": at, "train/loss": 1.0}) + "\n")
    os.utime(run.metrics_file, (at, at))


def test_the_summary_has_the_time_of_all_attempts_and_what_was_lost(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    with created(run.path):
        end(run, STOPPED, 10.0)
        assert run.read_summary()["goodput"] == round(10 / 12, 4)
        run.begin_attempt(name="x", start_step=5, now=NOW + 20, environment={})
        end(run, STOPPED, 14.0, NOW + 32)
    summary = run.read_summary()
    assert (summary["time_s"]["training"], summary["time_s"]["lost"], summary["goodput"]) == (14.0, 6.0, 0.5833)
    assert [attempt["time_s"] for attempt in summary["attempts"]] == [STOPPED, STOPPED]


def test_of_a_killed_attempt_all_after_its_newest_save_is_lost(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    with created(run.path):
        save(run, NOW + 12, STOPPED, 10.0)
        record(run, NOW + 30)
        run.begin_attempt(name="x", start_step=5, now=NOW + 100, environment={})
        assert run.attempts[0]["time_s"] == {
            "start": 1.0, "loading": 0.0, "training": 28.0, "data": 0.0, "evaluation": 0.0, "saving": 1.0,
        }  # fmt: skip
        end(run, STOPPED, 20.0, NOW + 112)
    assert run.read_summary()["time_s"]["lost"] == 18.0


def test_without_any_save_all_of_a_killed_attempt_is_lost(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    with created(run.path):
        record(run, NOW + 30)
        run.begin_attempt(name="x", start_step=0, now=NOW + 100, environment={})
        end(run, STOPPED, 10.0, NOW + 112)
    assert run.read_summary()["time_s"]["lost"] == 30.0


def test_a_running_run_has_the_goodput_of_its_newest_save_and_a_killed_one_that_of_its_newest_record(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path / "x")
    reader = Run(run.path)
    with created(run.path):
        assert (view := reader.look(NOW + 1)) is not None
        assert view.goodput is None
        save(run, NOW + 12, STOPPED, 10.0)
        record(run, NOW + 24)
        assert (view := reader.look(NOW + 24)) is not None
        assert (view.state, view.goodput) == ("running", round(10 / 12, 4))
    assert (view := reader.look(NOW + 30)) is not None
    assert (view.state, view.goodput) == ("killed", round(10 / 24, 4))
    with run.lock():
        run.begin_attempt(name="x", start_step=5, now=NOW + 40, environment={})
        assert (view := reader.look(NOW + 41)) is not None
        assert view.goodput is None, "nothing was saved in this attempt"
        end(run, STOPPED, 16.0, NOW + 52)
    assert (view := reader.look(NOW + 60)) is not None
    assert (view.state, view.goodput) == ("stopped", round(16 / 36, 4))


def test_the_goodput_of_an_attempt_that_has_not_ended_is_of_all_before_it_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    with created(run.path):
        end(run, {**STOPPED, "training": 30.0}, 10.0)
        run.begin_attempt(name="x", start_step=5, now=NOW + 40, environment={})
        save(run, NOW + 52, STOPPED, 20.0)
        assert (view := Run(run.path).look(NOW + 53)) is not None
        assert (view.state, view.goodput) == ("running", round(20 / 44, 4))
    assert (view := Run(run.path).look(NOW + 60)) is not None
    assert (view.state, view.goodput) == ("killed", round(20 / 44, 4)), "without a record until its newest save"


def test_an_attempt_of_an_earlier_version_counts_as_training(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    with created(run.path):
        end(run, STOPPED, 10.0)
        summary = run.read_summary()
        del summary["attempts"][0]["time_s"]
        run.summary_file.write_text(json.dumps(summary))
        run.begin_attempt(name="x", start_step=5, now=NOW + 20, environment={})
        end(run, STOPPED, 21.0, NOW + 32)
    assert run.read_summary()["time_s"]["training"] == 21.0


def test_a_removal_by_hand_and_a_copy_of_the_files_add_no_time_to_a_killed_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    with created(run.path):
        save(run, NOW + 12, STOPPED, 10.0)
        record(run, NOW + 30)
        CheckpointHistory(run.history_file).removed("step5", "by hand")
        for file in (run.metrics_file, run.history_file):
            os.utime(file, (NOW + 3e5, NOW + 3e5))
        run.begin_attempt(name="x", start_step=5, now=NOW + 4e5, environment={})
    assert sum(run.attempts[0]["time_s"].values()) == 30.0
