"""How runs stand, from their files: state, step, rate, loss, remaining time, newest checkpoint, sign of life."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_parts import note
from unprivileged import nobody

from trainer_cli.addons.view.report_sweep import short_keys
from trainer_cli.runs.find_runs import FoundRun, RunFinder
from trainer_cli.runs.record import RunView
from trainer_cli.runs.run import Run, RunsBelow
from trainer_cli.runs.run_dir import Outcome, RunDir
from trainer_cli.runs.run_lock import RunLock
from trainer_cli.steps.run_status import RunStatus

NOW = 1.5e9
"""Before any of these files is written, so that they are new unless `last_written` says otherwise."""
CONFIG = "name: x\ncheckpoint:\n  folder: {folder}\n"


def created(path: Path, folder: str = "null") -> RunLock:
    """A new run whose process is alive, as long as the lock is held."""
    return RunDir(path).create(CONFIG.format(folder=folder), [], {"run_id": "x"})


def begun(path: Path, *, total: int | None = 100, start_step: int = 0, at: float = NOW - 1000) -> RunLock:
    run = RunDir(path)
    lock = run.lock() if run.exists_as_run() else created(path)
    run.begin_attempt(name="x", start_step=start_step, now=at, environment={})
    run.record_total_steps(total)
    return lock


def record(path: Path, step: int, time: float, **metrics: Any) -> None:
    line = {"step": step, "epoch": 0.0, "time": time, "train/loss": 1 / step if step else 1.0, **metrics}
    with open(path / "metrics.jsonl", "a") as file:
        file.write(f"{json.dumps(line)}\n")


def last_written(path: Path, at: float) -> None:
    for file in path.iterdir():
        os.utime(file, (at, at))


def look(path: Path) -> RunView:
    view = Run(path).look(NOW)
    assert view is not None
    return view


def test_a_running_run_shows_step_rate_loss_remaining_time_and_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with begun(path):
        for step in (10, 20, 30):
            record(path, step, NOW - 100 + 2 * step)
        last_written(path, NOW - 40)
        view = look(path)
    assert view == RunView(
        path, "running", step=30, total_steps=100, steps_per_s=0.5, loss=1 / 30, eta_s=100.0, age_s=40.0,
    )  # fmt: skip


def test_what_is_not_known_yet_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with created(path):
        assert look(path) == RunView(path, "running")
    with begun(path, total=None, start_step=7):
        view = look(path)
        assert (view.state, view.step) == ("running", 7)
        assert (view.total_steps, view.steps_per_s, view.eta_s) == (None, None, None)
        record(path, 8, NOW - 10)
        record(path, 9, NOW - 9)
        view = look(path)
        assert (view.total_steps, view.steps_per_s, view.eta_s) == (None, 1.0, None)


@pytest.mark.parametrize("status", [RunStatus.finished, RunStatus.failed])
def test_a_run_that_ended_says_how_and_has_no_rate(status: RunStatus, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with begun(path):
        record(path, 10, NOW - 20)
        record(path, 20, NOW - 10)
        RunDir(path).end_attempt(Outcome(status=status, reason="because", step=23, wall_time_s=1.0), now=NOW)
    view = look(path)
    assert (view.state, view.reason, view.step, view.total_steps) == (status, "because", 23, 100)
    assert (view.steps_per_s, view.eta_s, view.loss) == (None, None, 1 / 20)


@pytest.mark.parametrize("summary", ["running", None, "damaged"])
def test_a_process_that_ended_without_a_summary_was_killed(summary: str | None, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with begun(path, at=0.0) if summary else created(path):
        record(path, 10, NOW - 20)
    if summary == "damaged":
        RunDir(path).summary_file.write_text("{")
    view = look(path)
    assert (view.state, view.step, view.steps_per_s) == ("killed", 10, None)


@pytest.mark.parametrize(
    ("age_s", "interval_s", "state"),
    [(500, 1, "running"), (700, 1, "stale"), (700, 100, "running"), (1100, 100, "stale")],
)
def test_a_running_process_without_a_sign_of_life_is_stale(
    age_s: float, interval_s: float, state: str, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    with begun(path, at=NOW - 5000):
        for step in (1, 2):
            record(path, step, NOW - 4000 + step * interval_s)
        last_written(path, NOW - age_s)
        assert look(path).state == state


def test_after_a_resume_only_its_own_records_count_for_step_and_rate(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with begun(path, at=NOW - 1000):
        record(path, 10, NOW - 900)
        record(path, 20, NOW - 890)
    reader = Run(path)
    assert (view := reader.look(NOW)) is not None
    assert (view.state, view.step) == ("killed", 20)
    with begun(path, start_step=10, at=NOW - 100):
        assert (view := reader.look(NOW)) is not None
        assert (view.state, view.step, view.steps_per_s) == ("running", 10, None)
        RunDir(path).metrics_file.write_text(RunDir(path).metrics_file.read_text().splitlines(keepends=True)[0])
        record(path, 12, NOW - 90)
        record(path, 14, NOW - 89)
        assert (view := reader.look(NOW)) is not None
        assert (view.step, view.steps_per_s, view.loss) == (14, 2.0, 1 / 14)


@pytest.mark.parametrize("newest", ["metrics.jsonl", "train.log", "summary.json", "checkpoints"])
def test_the_file_that_was_written_last_is_the_sign_of_life(newest: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with begun(path):
        record(path, 1, NOW - 900)
        (path / "train.log").touch()
        (path / "checkpoints").mkdir()
        last_written(path, NOW - 700)
        os.utime(path / newest, (NOW - 20, NOW - 20))
        view = look(path)
        assert (view.state, view.age_s) == ("running", 20.0)


def test_a_loss_that_is_seldom_logged_is_shown_until_its_record_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "runs/x"
    runs = RunsBelow(tmp_path / "runs")
    with begun(path):
        record(path, 1, NOW - 900, **{"train/loss": 0.5})
        assert [view.loss for view in runs.look(NOW)] == [0.5]
        with open(path / "metrics.jsonl", "a") as file:
            file.writelines(f'{{"step": {step}, "time": {NOW - 900 + step}}}\n' for step in range(2, 102))
        assert [(view.step, view.loss) for view in runs.look(NOW)] == [(101, 0.5)]
        (path / "metrics.jsonl").write_text("")
        assert [(view.step, view.loss, view.steps_per_s) for view in runs.look(NOW)] == [(0, None, None)]


def test_what_a_reader_has_seen_is_forgotten_with_its_file(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "x", tmp_path / "elsewhere"
    begun(path).release()
    reader = Run(path)
    assert (view := reader.look(NOW)) is not None
    assert (view.total_steps, view.checkpoint) == (100, None)
    (path / "summary.json").unlink()
    (elsewhere / "step3").mkdir(parents=True)
    (elsewhere / "step3" / "manifest.json").touch()
    (path / "config.yaml").write_text(CONFIG.format(folder=elsewhere))
    os.utime(path / "config.yaml", (1, 1))
    assert (view := reader.look(NOW)) is not None
    assert (view.total_steps, view.checkpoint) == (None, "step3")


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({"goodput": "most"}, ("stopped", "because", 23, None)),
        ({"goodput": 0.5}, ("stopped", "because", 23, 0.5)),
        ({"reason": None}, ("stopped", "", 23, None)),
        ({"step": "many", "total_steps": [3]}, ("stopped", "because", None, None)),
        ({"attempts": [3, {"started": "yesterday"}]}, ("stopped", "because", 23, None)),
    ],
)
def test_values_of_a_summary_that_are_none_of_ours_are_unknown(
    facts: dict[str, Any], shown: tuple[Any, ...], tmp_path: Path
) -> None:
    path = tmp_path / "x"
    with begun(path):
        RunDir(path).end_attempt(Outcome(status=RunStatus.stopped, reason="because", step=23, wall_time_s=1.0), now=NOW)
    summary = {**RunDir(path).read_summary(), "goodput": None, **facts}
    RunDir(path).summary_file.write_text(json.dumps(summary))
    view = look(path)
    assert (view.state, view.reason, view.step, view.goodput) == shown


@pytest.mark.parametrize("torn", ['{"step": 3', "\0\0\0\n", "[1]\n", '{"step": null, "time": 3}\n', "{}\n"])
def test_lines_that_are_torn_or_no_records_are_passed_over(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with begun(path):
        record(path, 1, NOW - 9)
        record(path, 2, NOW - 8, **{"train/loss": "nan"})
        with open(path / "metrics.jsonl", "a") as file:
            file.write(torn)
        view = look(path)
        assert view.step == 2
        assert math.isnan(view.loss or 0)


def test_the_newest_checkpoint_has_the_highest_step_and_a_manifest(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "x", tmp_path / "elsewhere"
    with created(path), created(tmp_path / "y", str(elsewhere)):
        for name in ("step2", "step10", "step9"):
            (path / "checkpoints" / name).mkdir(parents=True)
            (path / "checkpoints" / name / "manifest.json").touch()
            (elsewhere / f"ep{name[4:]}").mkdir(parents=True)
            (elsewhere / f"ep{name[4:]}" / "manifest.json").touch()
        for partial in ("step11", ".tmp.step12.x.1"):
            (path / "checkpoints" / partial).mkdir()
        assert look(path).checkpoint == "step10"
        assert look(tmp_path / "y").checkpoint == "ep10"


@pytest.mark.parametrize(
    "oldest_first",
    [
        ["step9", "step10"],
        ["ep1-step200", "ep2-step1000"],
        ["before", "ep2", "ep10"],
        ["best", "step0"],
        ["a-first", "b-second"],
    ],
)
@pytest.mark.parametrize("folder", ["null", "s3://bucket/x"])
def test_the_newest_checkpoint_is_known_by_the_numbers_of_its_name(
    oldest_first: list[str], folder: str, tmp_path: Path
) -> None:
    with created(tmp_path / "x", folder):
        for name in reversed(oldest_first):
            (tmp_path / "x/checkpoints" / name).mkdir(parents=True)
            (tmp_path / "x/checkpoints" / name / "manifest.json").touch()
        assert look(tmp_path / "x").checkpoint == oldest_first[-1]


def test_without_a_folder_that_is_known_there_is_no_newest_checkpoint(tmp_path: Path) -> None:
    with created(tmp_path / "x", "${oc.env:SET_NOWHERE}/x"):
        assert look(tmp_path / "x") == RunView(tmp_path / "x", "running")


@pytest.mark.parametrize(
    ("records", "steps_per_s"),
    [
        ([], None), ([(1, 1.0)], None), ([(1, 1.0), (3, 2.0)], 2.0), ([(1, 1.0), (2, 2.0)], 1.0),
        ([(1, 1.0), (3, 1.0)], None), ([(1, 2.0), (3, 1.0)], None), ([(3, 1.0), (3, 2.0)], None),
        ([(0, 1.0), (1, 1.5)], 2.0),
    ],
)  # fmt: skip
def test_a_rate_is_of_steps_and_seconds_that_have_passed(
    records: list[tuple[int, float]], steps_per_s: float | None, tmp_path: Path
) -> None:
    with begun(tmp_path / "x"):
        for step, at in records:
            record(tmp_path / "x", step, NOW - 100 + at, **{"train/loss": 1.0})
        assert look(tmp_path / "x").steps_per_s == steps_per_s


def test_nothing_is_written_or_held(tmp_path: Path) -> None:
    path = tmp_path / "x"
    begun(path).release()
    record(path, 1, NOW)
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in [path, *path.iterdir()]}
    for view in (RunsBelow(tmp_path).look(NOW), [Run(path).look(NOW)]):
        assert len(view) == 1
    assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in [path, *path.iterdir()]} == before
    RunDir(path).lock().release()


def test_runs_are_shown_while_they_are_there_the_running_ones_first_then_those_that_ended_last(tmp_path: Path) -> None:
    runs = RunsBelow(tmp_path / "runs")
    assert runs.look(NOW) == []
    for name, age_s in (("a/deep/er", 30), ("b", 10), ("c", 20)):
        created(tmp_path / "runs" / name).release()
        record(tmp_path / "runs" / name, 1, NOW)
        last_written(tmp_path / "runs" / name, NOW - age_s)
    with created(tmp_path / "runs/e"), created(tmp_path / "runs/d"):
        last_written(tmp_path / "runs/d", NOW - 100)
        assert [view.path.name for view in runs.look(NOW)] == ["d", "e", "b", "c", "er"]
    reader = Run(tmp_path / "runs/b")
    shutil.rmtree(tmp_path / "runs/b")
    assert {view.path.name for view in runs.look(NOW)} == {"d", "e", "c", "er"}
    assert reader.look(NOW) is None
    shutil.rmtree(tmp_path / "runs")
    assert runs.look(NOW) == []


def test_runs_are_found_below_folders_links_and_sweeps_but_not_in_a_runs_own_folders(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for name in ("plain", "group/inner", "plain/sweep/lr=1", "plain/checkpoints/step1", ".hidden", "empty"):
        created(root / name).release()
    (root / "empty" / "config.yaml").unlink()
    (root / "loop").symlink_to(root)
    created(tmp_path / "far").release()
    (root / "linked").symlink_to(tmp_path / "far")
    (root / "gone").symlink_to(tmp_path / "nowhere")
    found = [str(one.path.relative_to(root)) for one in RunFinder(root).find()]
    assert found == ["group/inner", "linked", "plain", "plain/sweep/lr=1"]
    assert RunFinder(root / "group/inner").find() == [FoundRun(root / "group/inner")]


def test_a_folder_is_listed_again_only_after_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created(tmp_path / "a/run").release()
    for folder in (tmp_path / "a/run", tmp_path / "a", tmp_path):
        os.utime(folder, (1e9, 1e9))
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: note(listed, folder.name) or scandir(folder))
    finder = RunFinder(tmp_path)
    assert len(finder.find()) == 1
    assert listed == [tmp_path.name, "a", "run"]
    assert len(finder.find()) == 1
    assert len(listed) == 3
    created(tmp_path / "a/second").release()
    assert len(finder.find()) == 2
    assert listed[3:] == ["a", "second"]
    # Before the folder of the test is removed.
    monkeypatch.undo()


@pytest.mark.root
@pytest.mark.parametrize("closed", ["", "summary.json", "metrics.jsonl", ".lock"])
def test_a_run_without_permission_is_shown_as_unreadable_beside_the_others(closed: str) -> None:
    with nobody() as root:
        for name in ("fine", "shut"):
            begun(root / name).release()
            record(root / name, 1, NOW)
        (root / "shut" / closed).chmod(0)
        views = RunsBelow(root).look(NOW)
        assert {view.path.name: (view.state, view.reason) for view in views} == {
            "fine": ("killed", "the process ended without a summary"),
            "shut": ("unreadable", f"{closed or 'its directory'} cannot be read: Permission denied"),
        }
        (root / "shut" / closed).chmod(0o700)


@pytest.mark.parametrize(
    ("keys", "labels"),
    [
        (["optimizer.lr", "seed"], ["lr", "seed"]),
        (["optimizer.lr", "scheduler.lr"], ["optimizer.lr", "scheduler.lr"]),
        (["optimizer._target_", "model._target_"], ["optimizer", "model"]),
        (["scheduler", "scheduler._target_"], ["scheduler", "scheduler._target_"]),
    ],
)
def test_a_key_is_labelled_by_its_last_part_and_a_class_by_its_component(keys: list[str], labels: list[str]) -> None:
    assert list(short_keys(keys).values()) == labels
