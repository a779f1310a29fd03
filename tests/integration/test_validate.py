"""`train validate`: a row for each checkpoint and loader, the numbers of the run itself, and nothing of it touched."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, SMALL, flip_a_byte, hold, make_project, names, records, running, train, trained
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.manifest import FileEntry, Manifest
from trainer_cli.storage.local import LocalStorage

OWN_RECORDS = ("config.yaml", "metrics.jsonl", "train.log", "summary.json", "environment.json", ".lock", "tensorboard")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `base`: checkpoints at 0, 10 and 20, evaluations at 10 and 20."""
    folder = tmp_path_factory.mktemp("base")
    trained(*SMALL, "name=base", "data.val_fraction=0.3", cwd=folder)
    return folder


def validated(*arguments: str, cwd: Path, code: int = 0) -> tuple[list[dict[str, Any]], str, str]:
    """The rows of this validation, its output and its messages."""
    folder = next((a.split("=", 1)[1] for a in arguments if a.startswith("validate.folder=")), "runs/base/validation")
    file = cwd / folder / "validation.jsonl"
    before = len(records(file)) if file.exists() else 0
    result = train("validate", *arguments, cwd=cwd)
    assert result.code == code, result
    assert "Traceback" not in result.err
    return (records(file)[before:] if file.exists() else []), result.out, result.err


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of every event in a TensorBoard folder."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                number = value.simple_value or (value.tensor.float_val or [0.0])[0]
                found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_the_rows_are_the_runs_own_numbers_and_the_run_is_not_touched(place: Path) -> None:
    run = place / "runs/base"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    rows, out, _ = validated("ckpt=runs/base/checkpoints/step*", cwd=place)

    assert [(row["checkpoint"], row["step"], row["loader"]) for row in rows] == [
        (f"runs/base/checkpoints/step{step}", step, "val") for step in (0, 10, 20)
    ]
    logged = {one["step"]: one for one in records(run / "metrics.jsonl") if "val/loss" in one}
    for row in rows[1:]:
        assert row["val/loss"] == logged[row["step"]]["val/loss"]
        assert row["val/accuracy"] == logged[row["step"]]["val/accuracy"]
    manifest = json.loads((run / "checkpoints/step20/manifest.json").read_text())
    assert manifest["metrics"]["val/loss"] == rows[-1]["val/loss"]

    table = [line for line in out.splitlines() if "checkpoints/step" in line and "val" in line.split()]
    assert [line.split()[-4] for line in table] == ["0", "10", "20"]
    assert [line.startswith("*") for line in table] == [False, False, True]
    written = list(csv.DictReader((run / "validation/validation.csv").read_text().splitlines()))
    assert [(one["checkpoint"], int(one["step"]), float(one["loss"])) for one in written] == [
        (row["checkpoint"], row["step"], row["val/loss"]) for row in rows
    ]
    events = scalars(run / "validation/tensorboard/1")["val/loss"]
    assert [step for step, _ in events] == [0, 10, 20]
    assert [value for _, value in events] == pytest.approx([row["val/loss"] for row in rows])

    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if "validation" not in path.parts}
    assert {path for path in before if after[path] != before[path]} <= {run}  # it got the folder validation/


PATTERNS = {
    "classes and braces": (["ckpt=runs/base/checkpoints/step{2,3,}[0-9]"], [0, 20]),
    "a list in any order, with duplicates": (
        ["ckpt=[runs/base/checkpoints/step20,runs/../runs/base/checkpoints/step*,runs/base@step10]"],
        [0, 10, 20],
    ),
    "the latest": (["ckpt=runs/base@latest"], [20]),
    "the best, and one by its step": (["ckpt=[runs/base@best, runs/base@step0]"], [0, 20]),
    "given twice, once recursively": (["ckpt=runs/base@latest", "ckpt=**/step10"], [10, 20]),
}


def test_norms_leave_random_states_out(place: Path) -> None:
    shown, norms = (train("ckpt", "show", "runs/base@latest", *flags, cwd=place).out for flags in ((), ("--norms",)))
    assert "\nrng " in shown
    assert "\nrng " not in norms
    assert "\nmodel" in norms


def test_json_has_the_rows_of_the_table(place: Path) -> None:
    done = train("validate", "ckpt=runs/base/checkpoints/step*", "--json", cwd=place)
    found = json.loads(done.out)
    written = records(place / found["folder"] / "validation.jsonl")
    assert [(row["step"], row["loader"], row["metrics"]["loss"]) for row in found["rows"]] == [
        (row["step"], row["loader"], row["val/loss"]) for row in written[-3:]
    ]


@pytest.mark.parametrize("case", PATTERNS)
def test_patterns_name_each_checkpoint_once_in_the_order_of_steps(base: Path, tmp_path: Path, case: str) -> None:
    arguments, expected = PATTERNS[case]
    rows, _, _ = validated(*arguments, f"validate.folder={tmp_path}", cwd=base)
    assert steps(rows) == expected


def test_order_is_numeric_and_directory_names_may_hold_anything(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/lr=0.1, wide [a] {b}"
    shutil.copytree(base / "runs/base", run)
    more = ["loop.max_duration=102", "checkpoint.save_interval=null", "checkpoint.fixed_steps=[9,100]"]
    trained(*SMALL, f"run_dir='{run}'", "name=base", "data.val_fraction=0.3", *more, cwd=tmp_path)
    assert names(run / "checkpoints") == ["step0", "step10", "step20", "step100", "step102"]
    quoted = str(run).replace("[a]", "[[]a[]]").replace("{b}", "*")
    folder = f"validate.folder={tmp_path}/results"
    rows, _, _ = validated(f"ckpt={quoted}/checkpoints/step*", folder, cwd=tmp_path)
    assert steps(rows) == [0, 10, 20, 100, 102]
    rows, _, _ = validated(f"ckpt={run}/checkpoints/step100", folder, cwd=tmp_path)
    assert steps(rows) == [100]
    rows, _, _ = validated(f"ckpt={run}@latest", folder, cwd=tmp_path)
    assert steps(rows) == [102]


def test_partial_ones_are_skipped_and_damaged_ones_reported_while_the_rest_goes_on(place: Path) -> None:
    checkpoints = place / "runs/base/checkpoints"
    (checkpoints / "step15").mkdir()
    (checkpoints / "step15/rank0.safetensors").write_bytes(b"half")
    rows, _, err = validated("ckpt=runs/base/checkpoints/step*", cwd=place)
    assert steps(rows) == [0, 10, 20]
    assert "warning: skipped runs/base/checkpoints/step15: it has no manifest, so it is partial" in err

    flip_a_byte(checkpoints / "step10/rank0.safetensors")
    rows, out, err = validated("ckpt=runs/base/checkpoints/step*", cwd=place, code=1)
    assert steps(rows) == [0, 20]
    assert "error: runs/base/checkpoints/step10: " in err
    assert "rank0.safetensors" in err
    assert "step20" in out

    flip_a_byte(checkpoints / "step0/config.yaml")
    rows, _, err = validated("ckpt=runs/base/checkpoints/step*", cwd=place, code=1)
    assert steps(rows) == [20]
    assert "step0/config.yaml" in err

    (checkpoints / "step10/rank0.json").unlink()
    rows, _, err = validated("ckpt=runs/base/checkpoints/step*", cwd=place, code=1)
    assert steps(rows) == [20]
    assert "error: runs/base/checkpoints/step10: rank0.json is missing" in err
    validated("ckpt=[runs/base/checkpoints/step10,runs/base/checkpoints/step15]", cwd=place, code=3)


def test_overrides_lie_on_top_of_the_recovered_config(base: Path, tmp_path: Path) -> None:
    def run(*overrides: str) -> dict[str, Any]:
        rows, _, _ = validated("ckpt=runs/base@latest", f"validate.folder={tmp_path}", *overrides, cwd=base)
        return rows[-1]

    whole, fifth = run(), run("data.val_fraction=0.2")
    assert run("data.batch_size=100")["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-5)
    assert fifth["val/loss"] != whole["val/loss"]
    assert run("data=digits")["val/loss"] == fifth["val/loss"]  # its own default, not the run's three tenths
    result = train("validate", "ckpt=runs/base@latest", "model=cnn", f"validate.folder={tmp_path}", cwd=base)
    assert result.code == 2
    assert "error: runs/base/checkpoints/step20 does not fit" in result.err


OWN = """# @package _global_
defaults: [digits_mlp]
vars: {part: 0.2}
data: {val_fraction: "${vars.part}"}
"""


@pytest.mark.parametrize("verb", ["validate", pytest.param("predict", marks=pytest.mark.addon("predict"))])
@pytest.mark.parametrize(
    ("more", "dropped"),
    [
        (["experiment=digits_mlp"], ["data.val_fraction: 0.3 -> 0.2"]),
        (["experiment=digits_mlp", "data.val_fraction=0.5"], []),
        (["experiment=own"], ["data.val_fraction: 0.3 -> 0.2"]),
        (["experiment=own", "vars.part=0.5"], []),
        ([], []),
    ],
)
def test_settings_of_the_run_that_an_experiment_leaves_out_are_listed(
    verb: str, more: list[str], dropped: list[str], place: Path
) -> None:
    (place / "configs/experiment").mkdir(parents=True, exist_ok=True)
    (place / "configs/experiment/own.yaml").write_text(OWN)
    done = train(verb, "ckpt=runs/base@latest", *more, cwd=place)
    assert done.code == 0, done
    line = "experiment= composes anew, without these settings of the run of runs/base/checkpoints/step20: "
    lines = [row.partition(line)[2] for row in done.err.splitlines() if line in row]
    assert lines == ([", ".join(dropped)] if dropped else [])


def test_random_weights_only_on_demand(tmp_path: Path) -> None:
    result = train("validate", "ckpt=none", "experiment=digits_mlp", cwd=tmp_path)
    assert result.code == 0, result
    rows = records(tmp_path / "runs/validation-none/validation.jsonl")
    assert [(row["checkpoint"], row["step"]) for row in rows] == [("random weights", 0)]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["validation-none"]


def test_several_runs_share_a_folder_beside_them(place: Path) -> None:
    shutil.copytree(place / "runs/base", place / "runs/other")
    result = train("validate", "ckpt=runs/*/checkpoints/step[12]0", cwd=place)
    assert result.code == 0, result
    (folder,) = (place / "runs").glob("validation-*")
    rows = records(folder / "validation.jsonl")
    assert [row["checkpoint"] for row in rows] == [
        f"runs/{run}/checkpoints/step{step}" for run in ("base", "other") for step in (10, 20)
    ]
    assert {row["val/loss"] for row in rows[:2]} == {row["val/loss"] for row in rows[2:]}
    assert not (place / "runs/base/validation").exists()


def test_a_checkpoint_explains_itself_in_another_place(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "runs/base/checkpoints/step20", tmp_path / "alone/step20")
    rows, _, _ = validated("ckpt=alone/step20", "validate.folder=out", cwd=tmp_path)
    assert rows[0]["val/loss"] == records(base / "runs/base/metrics.jsonl")[-1]["val/loss"]


def test_it_works_while_the_run_trains_and_takes_no_lock(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    trained("experiment=mine", "loop.max_duration=16st", cwd=root)
    held = hold(root, "train")
    with running("fit", "experiment=mine", cwd=root) as fit:
        fit.reach("train")
        before = {name: (root / "runs/mine" / name).stat().st_mtime_ns for name in OWN_RECORDS}
        result = train("validate", "ckpt=runs/mine/checkpoints/step*", cwd=root)
        assert result.code == 0, result
        assert {name: (root / "runs/mine" / name).stat().st_mtime_ns for name in OWN_RECORDS} == before
        held.unlink()
        assert fit.end().code == 0
    rows = records(root / "runs/mine/validation/validation.jsonl")
    assert steps(rows) == [0, 16]
    assert rows[-1]["val/loss"] == next(
        one["val/loss"] for one in records(root / "runs/mine/metrics.jsonl") if one["step"] == 16
    )


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Change a file of a checkpoint so that its manifest agrees."""
    manifest = Manifest.parse((checkpoint / "manifest.json").read_bytes())
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    files = {**manifest.files, name: FileEntry(len(content), digest)}
    (checkpoint / name).write_bytes(content)
    (checkpoint / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())


@pytest.mark.parametrize(
    ("target", "said"), [("os.system", "_target_ os.system"), ("elsewhere.Model", "add trust=[elsewhere]")]
)
def test_a_recovered_config_may_not_name_just_anything(place: Path, target: str, said: str) -> None:
    checkpoint = place / "runs/base/checkpoints/step20"
    text = (checkpoint / "config.yaml").read_text()
    forge(checkpoint, "config.yaml", text.replace("trainer_cli.MLP", target).encode())
    result = train("validate", "ckpt=runs/base@latest", "validate.folder=out", cwd=place)
    assert result.code == 2, result
    assert target in result.err
    assert said in result.err
    assert "Traceback" not in result.err
    assert not (place / "out").exists()


def test_a_projects_own_package_is_trusted_and_another_by_leave(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    trained("experiment=mine", "loop.max_duration=16st", cwd=root)
    assert train("validate", "ckpt=runs/mine@latest", cwd=root).code == 0

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    arguments = [f"ckpt={root}/runs/mine@latest", "validate.folder=out"]
    # The run keeps the package, and this user has signed it.
    result = train("validate", *arguments, "validate.folder=kept", cwd=elsewhere)
    assert result.code == 0, result
    assert "the source is the one that the run keeps" in result.err
    arguments.append("source=project")
    result = train("validate", *arguments, cwd=elsewhere)
    assert result.code == 2, result
    assert "mine.parts.Data" in result.err
    assert "add trust=[mine]" in result.err
    result = train("validate", *arguments, "trust=[mine]", cwd=elsewhere)
    assert result.code == 2, result
    assert "there is no package 'mine'" in result.err
    shutil.copytree(root / "mine", tmp_path / "site/mine")
    paths = f"{tmp_path}/site:{ROOT}"
    result = train("validate", *arguments, "trust=[mine]", cwd=elsewhere, PYTHONPATH=paths)
    assert result.code == 0, result
    assert steps(records(elsewhere / "out/validation.jsonl")) == [16]


def test_a_glob_is_evaluated_beside_a_run_that_saves_and_removes_every_step(place: Path) -> None:
    folder, ends = place / "runs/base/checkpoints", threading.Event()
    state, storage = make_sync_checkpointer().load(folder / "step20"), LocalStorage(folder)
    files = {"config.yaml": (folder / "step20/config.yaml").read_bytes()}

    def save_and_remove() -> None:
        for step in range(21, 100_000):
            if ends.is_set():
                return
            metadata = CheckpointMetadata(step=step, files=files)
            make_sync_checkpointer().save({**state}, folder / f"step{step}", metadata=metadata)
            for name in storage.names():
                if name != f"step{step}":
                    storage.remove(name)

    run = threading.Thread(target=save_and_remove)
    run.start()
    try:
        for _ in range(2):
            rows, _, err = validated("ckpt=runs/base/checkpoints/step*", cwd=place)
            assert rows, err
    finally:
        ends.set()
        run.join()


def test_a_checkpoint_that_is_named_and_not_there_is_exit_3(place: Path) -> None:
    _, _, err = validated("ckpt=runs/base/checkpoints/step77", cwd=place, code=3)
    assert "matches nothing" in err
