"""What is read of a run once, from its files: checkpoints, places of values, texts, jobs of a sweep, best metrics."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from reported import BEGAN, make_run, write_metrics

from trainer_cli.addons.view.report_sweep import rank_metrics
from trainer_cli.catalog.history import CheckpointHistory
from trainer_cli.manifest import Manifest
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.runs.record import RunRecord
from trainer_cli.runs.run import Run
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.sweep_file import SweepJob, read_jobs

HEADER = "KEY,optimizer.lr,model.width,status,step,reason,run_dir\n"


def read(run: RunDir) -> RunRecord:
    return Run(run.path).record(BEGAN + 5000)


def reasons(run: RunDir) -> dict[str, str]:
    return {saved.life.name: saved.why_kept for saved in read(run).checkpoints if saved.why_kept}


def test_the_record_of_a_run_that_is_gone_says_so(tmp_path: Path) -> None:
    record = Run(tmp_path / "gone").record(BEGAN)
    assert (record.view.state, record.problems) == ("unreadable", ["its directory is gone"])


@pytest.mark.parametrize(
    ("text", "jobs"),
    [
        (HEADER, []),
        (f"{HEADER}a,0.1,8,failed,3,no memory,far/a\n",
         [SweepJob("a", {"optimizer.lr": "0.1", "model.width": "8"}, Path("far/a"), "failed", "no memory", "3")]),
        (f"{HEADER}here,0.1,,finished,3,,far/here\n",
         [SweepJob("here", {"optimizer.lr": "0.1"}, Path("SWEEP/here"), "finished", "", "3")]),
        (f"{HEADER}a,0.1\n{HEADER.replace('KEY', 'b')}", [
            SweepJob("b", {"optimizer.lr": "optimizer.lr", "model.width": "model.width"}, Path("run_dir"), "status",
                     "reason", "step")]),
        ("KEY,status,run_dir\na,running,far/a\n", [SweepJob("a", {}, Path("far/a"), "running", "")]),
        (f"{HEADER}a,0.1,8,failed,3,,\n", []),
        ("NAME,optimizer.lr,status,run_dir\na,0.1,failed,far/a\n", []),
        ("KEY,optimizer.lr,run_dir\na,0.1,far/a\n", []),
        ("", []),
    ],
    ids=["no job", "a job", "moved", "a row cut off", "no reason", "no place", "no key", "no status", "empty"],
)  # fmt: skip
def test_a_job_of_a_sweep_is_a_row_of_its_file(text: str, jobs: list[SweepJob], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "sweep.csv").write_text(text)
    here = [job._replace(run_dir=tmp_path / "here") if job.key == "here" else job for job in jobs]
    assert [*read_jobs(tmp_path).values()] == here


def test_a_folder_without_a_sweep_has_no_jobs(tmp_path: Path) -> None:
    assert read_jobs(tmp_path) == {}


def test_values_of_a_config_are_texts_as_in_yaml(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=10)
    run.config_file.write_text("name: x\na: [1, [true, null], b]\nb: false\nc: null\nd: 1.0\n")
    assert read(run).config == {"name": "x", "a": "[1, [true, null], b]", "b": "false", "c": "null", "d": "1.0"}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["optimizer.lr=0.2"], {"optimizer.lr"}),
        (["+optimizer.lr=0.2"], {"optimizer.lr"}),
        (["++optimizer.lr=0.2", "name=x=y"], {"optimizer.lr", "name"}),
        (["optimizer=adamw"], {"optimizer.lr"}),
        (["optim=adamw", "~model.note", "model.hid=[8]"], set()),
        ([], set()),
        (None, set()),
    ],
)
def test_without_places_the_overrides_name_the_values_that_the_command_line_set(
    overrides: list[str] | None, named: set[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "x", steps=10)
    run.write_config(run.read_config(), overrides or [], {})
    run.provenance_file.unlink()
    if overrides is None:
        run.overrides_file.unlink()
    assert read(run).places == dict.fromkeys(named, "command line")


def test_the_places_that_a_run_has_noted_decide_over_its_overrides(tmp_path: Path) -> None:
    places = {"optimizer.lr": "command line", "model.hidden": "configs/model/mlp.yaml:3"}
    assert read(make_run(tmp_path / "x", steps=10)).places == places


@pytest.mark.parametrize(
    ("sections", "first"),
    [
        ([{"metric": "val/accuracy"}, {"metric": "val/accuracy"}], "val/accuracy"),
        ([{"metric": "val/accuracy"}, {"metric": "val/loss"}], "val/loss"),
        ([{}, {}], "val/loss"),
        ([{"metric": "val/unmeasured"}, {"metric": "val/unmeasured"}], "val/loss"),
    ],
    ids=["shared", "differ", "none", "not measured"],
)
def test_the_metric_by_which_runs_are_ranked_comes_first(
    sections: list[Mapping[str, str]], first: str, tmp_path: Path
) -> None:
    records = []
    for at, section in enumerate(sections):
        run = make_run(tmp_path / f"run{at}", steps=20)
        lines = "".join(f"\n    {key}: {value}" for key, value in section.items())
        run.config_file.write_text(f"name: x\ncheckpoint:\n  keep_best: {lines or 'null'}\n")
        # Not in the order of the ranks: the loss is measured last.
        write_metrics(
            run, [{"step": 10, "epoch": 0, "time": BEGAN, "val/score": 1.0, "val/accuracy": 0.5, "val/loss": 2.0}]
        )
        records.append(read(run))
    assert rank_metrics(records) == [first, *(name for name in records[0].best if name != first)]


def test_without_a_loss_metrics_keep_the_order_in_which_they_were_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=20)
    write_metrics(run, [{"step": 10, "epoch": 0, "time": BEGAN, "val/map": 1.0, "val/accuracy": 0.5}])
    assert rank_metrics([read(run)]) == ["val/map", "val/accuracy"]


def _remove_folder(run: RunDir, name: str) -> None:
    shutil.rmtree(run.checkpoints_folder / name)


def _hide_folder(run: RunDir) -> None:
    run.config_file.write_text("name: x\ncheckpoint: {folder: '${oc.env:SET_NOWHERE}/x'}\n")


def _replace_folder(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints_folder)
    run.checkpoints_folder.touch()


def _pin(run: RunDir) -> None:
    run.catalog(run.checkpoints_folder).storage.pin("step20", pinned=True)


def _save_again(run: RunDir) -> None:
    CheckpointHistory(run.history_file).removed("step20", "replaced")
    CheckpointHistory(run.history_file).saved("step20", 20, "permanent", "requested")


def _claim_otherwise(run: RunDir) -> None:
    """The manifest has the kind and the reason that a promotion has given it; the history was not written."""
    manifest = Manifest(run_id="x", attempt=1, step=20, epoch=0, kind=CheckpointKind.ephemeral, reason="promoted")
    (run.checkpoints_folder / "step20" / "manifest.json").write_bytes(manifest.to_bytes())


def _forget(run: RunDir) -> None:
    run.history_file.unlink()
    for step in (20, 40):
        os.utime(run.checkpoints_folder / f"step{step}" / "manifest.json", (BEGAN + step, BEGAN + step))


def _leave_partial(run: RunDir) -> None:
    (run.checkpoints_folder / "step50").mkdir()


KEPT = {"step10": [False], "step20": [True], "step30": [False], "step40": [True]}
ON_DISK = {"step20": [True], "step40": [True]}


@pytest.mark.parametrize(
    ("change", "on_disk", "why"),
    [
        (lambda run: None, KEPT, {}),
        (lambda run: _remove_folder(run, "step20"), {**KEPT, "step20": [False]}, {}),
        (_leave_partial, KEPT, {}),
        (_pin, KEPT, {"step20": "pinned"}),
        (_save_again, {**KEPT, "step20": [False, True]}, {}),
        (_forget, ON_DISK, {}),
        (lambda run: [change(run) for change in (_forget, _pin)], ON_DISK, {"step20": "pinned"}),
        # Where the folder is not known or cannot be read, the history decides.
        (_hide_folder, KEPT, {}),
        (_replace_folder, KEPT, {}),
    ],
    ids=[
        "as saved", "removed by hand", "partial", "pinned", "saved again", "no history", "pinned, no history",
        "unknown folder", "unreadable folder",
    ],
)  # fmt: skip
def test_a_checkpoint_is_on_the_disk_where_it_was_not_removed_since(
    change: Callable[[RunDir], object], on_disk: dict[str, list[bool]], why: dict[str, str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "x", steps=40)
    change(run)
    found: dict[str, list[bool]] = {}
    for checkpoint in read(run).checkpoints:
        found.setdefault(checkpoint.life.name, []).append(checkpoint.on_disk)
    assert found == on_disk
    assert reasons(run) == why


def test_checkpoints_stand_in_the_order_of_their_saves_and_those_of_unknown_ones_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=10, every=20)
    events = [
        {"time": BEGAN, "event": "saved", "name": "step9", "step": 9, "reason": "requested"},
        {"time": BEGAN, "event": "saved", "name": "step8", "step": 8, "reason": "requested"},
        {"time": BEGAN, "event": "removed", "name": "step3", "reason": "its save is not recorded"},
        {"time": BEGAN - 1, "event": "saved", "name": "step10", "step": 10, "reason": "requested"},
    ]
    run.history_file.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert [saved.life.name for saved in read(run).checkpoints] == ["step3", "step10", "step8", "step9"]


def test_the_manifest_decides_over_the_history_of_what_kind_a_checkpoint_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=40)
    _claim_otherwise(run)
    (life,) = (saved.life for saved in read(run).checkpoints if saved.life.name == "step20")
    assert (life.step, life.kind, life.reason) == (20, "ephemeral", "promoted")


def test_without_a_history_the_disk_tells_of_its_checkpoints_in_the_order_of_their_saves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=120, every=20)
    run.history_file.unlink()
    for at, step in enumerate((120, 40, 80)):
        os.utime(run.checkpoints_folder / f"step{step}" / "manifest.json", (BEGAN + at, BEGAN + at))
    lives = [saved.life for saved in read(run).checkpoints]
    assert [(life.name, life.step, life.saved_at) for life in lives] == [
        ("step120", 120, BEGAN), ("step40", 40, BEGAN + 1), ("step80", 80, BEGAN + 2),
    ]  # fmt: skip
    assert [life.reason for life in lives] == ["every 120 steps", "every 40 steps", "every 80 steps"]


def test_the_summary_says_why_checkpoints_were_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=100)
    assert reasons(run) == {"step100": "final"}
    run.history_file.unlink()
    assert reasons(run) == {"step100": "final"}
    summary = {**run.read_summary(), "checkpoints": ["step100", {"name": "step80", "why": "requested"}]}
    run.summary_file.write_text(json.dumps(summary))
    assert reasons(run) == {"step80": "requested"}


def test_a_run_began_with_its_first_attempt_or_a_record_before_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=20)
    assert read(run).began == BEGAN
    write_metrics(run, [{"step": 1, "epoch": 0, "time": BEGAN - 5, "train/loss": 1.0}])
    assert read(run).began == BEGAN - 5
    run.summary_file.unlink()
    assert read(run).began == BEGAN - 5
    run.metrics_file.unlink()
    assert read(run).began == 0.0
