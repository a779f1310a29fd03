"""Samples and source that are not those of the checkpoint: refused or reported by a resume, `validate` and `ckpt=`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import Result, train

from trainer_cli.commands.command_line import listed_verbs

MODULE = """
import os
import numpy
import torch
import part


class Points(torch.utils.data.Dataset):
    def __init__(self, size, noisy):
        self.points = torch.rand(size, 2) + float(os.environ.get("SHIFT", "0"))
        self.noise = numpy.random.default_rng() if noisy else None

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        noise = self.noise is not None and self.noise.random() < 0.9
        return self.points[index] + noise, (self.points[index][1] > 0.5).long()


class Data:
    def __init__(self, size=32, noisy=False, split=False):
        self.train, self.val = Points(size, noisy), Points(8, noisy)
        if split:
            self.train, self.val = torch.utils.data.random_split(Points(size, noisy), [24, 8])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, batch):
        logits = self.layer(batch[0]) * part.FACTOR
        return {"loss": torch.nn.functional.cross_entropy(logits, batch[1]), "logits": logits}
"""
EXPERIMENT = """# @package _global_
model: {_target_: shapes.Net}
data: {_target_: shapes.Data, batch_size: 8}
optimizer: {lr: 0.01}
loop: {max_duration: 4}
device: cpu
"""
MINE = "+experiment=mine"
LONGER = (MINE, "loop.max_duration=6")
OTHER_DATA = "the data is not what {} was trained with: "


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("trained") / "project"
    (project / "configs/experiment").mkdir(parents=True)
    (project / "configs/experiment/mine.yaml").write_text(EXPERIMENT)
    (project / "shapes.py").write_text(MODULE)
    (project / "part.py").write_text("FACTOR = 1\n")
    for name, more in (
        ("mine", ()),
        ("noisy", ("+data.noisy=true", "name=noisy")),
        ("split", ("+data.split=true", "name=split")),
    ):
        done = train("fit", MINE, *more, cwd=project)
        assert done.code == 0, (name, done.err)
    return project


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy of the project in which the runs were trained, in its place as far as the runs know."""
    copy = tmp_path / "project"
    shutil.copytree(trained, copy)
    for run in (copy / "runs").iterdir():
        facts = json.loads((run / "environment.json").read_text())
        (run / "environment.json").write_text(json.dumps({**facts, "project_root": str(copy)}))
    return copy


def _manifest(project: Path, step: int = 4) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(
        (project / f"runs/mine/checkpoints/step{step}/manifest.json").read_text()
    )
    return found


def _validate(cwd: Path, run: Path, *overrides: str, verb: str = "validate", **env: Any) -> Result:
    return train(verb, f"ckpt={run / 'checkpoints/step4'}", *overrides, cwd=cwd, **env)


def test_a_manifest_has_digests_of_samples_and_of_the_imported_files_of_the_project(project: Path) -> None:
    manifest = _manifest(project)
    assert sorted(manifest["source"]) == ["part.py", "shapes.py"]
    assert {name: len(digests) for name, digests in manifest["samples"].items()} == {"train": 8, "val": 8}


def test_the_same_data_and_source_are_reported_by_no_word(project: Path) -> None:
    assert (project / "part.py").write_bytes(b"FACTOR = 1\r\n")
    for done in (train("fit", *LONGER, cwd=project), _validate(project, project / "runs/mine")):
        assert done.code == 0, done.err
        assert "differ" not in done.err
        assert "not what" not in done.err
    assert _manifest(project, 6)["samples"] == _manifest(project)["samples"]


def test_a_resume_with_other_samples_is_refused_before_anything_is_written(project: Path) -> None:
    before = {path: path.read_bytes() for path in (project / "runs/mine").rglob("*") if path.is_file()}
    refused = train("fit", *LONGER, cwd=project, SHIFT="1")
    assert refused.code == 2
    assert OTHER_DATA.format("step4") + "sample 0 of train, sample 0 of val differ" in refused.err
    assert "'resume_allow=[data]'" in refused.err
    after = {path: path.read_bytes() for path in (project / "runs/mine").rglob("*") if path.is_file()}
    assert {path.name for path in before if before[path] != after.get(path)} <= {"train.log", ".lock"}
    allowed = train("fit", *LONGER, "resume_allow=[data]", cwd=project, SHIFT="1")
    assert allowed.code == 0, allowed.err
    assert "warning: " + OTHER_DATA.format("step4") in allowed.err
    # From here on these are the run's.
    assert train("fit", MINE, "loop.max_duration=8", cwd=project, SHIFT="1").code == 0


def test_a_changed_config_explains_other_samples(project: Path) -> None:
    other = "+data.noisy=false"
    done = train("fit", *LONGER, other, "resume_allow=[data.noisy]", cwd=project, SHIFT="1")
    assert done.code == 0, done.err
    assert "not what" not in done.err
    # A batch size changes no sample.
    more = "data.batch_size=4", "resume_allow=[data.batch_size]"
    assert train("fit", MINE, "loop.max_duration=8", other, *more, cwd=project, SHIFT="2").code == 2


def test_a_dataset_that_draws_numbers_of_its_own_is_never_refused(project: Path) -> None:
    # It may by chance have given the same samples twice, and then has digests.
    done = train("fit", *LONGER, "+data.noisy=true", "name=noisy", cwd=project)
    assert done.code == 0, done.err


def test_other_library_versions_make_other_samples_a_warning(project: Path) -> None:
    manifest = project / "runs/mine/checkpoints/step4/manifest.json"
    from trainer_cli.manifest import Manifest

    known = Manifest.parse(manifest.read_bytes())
    object.__setattr__(known, "versions", {**known.versions, "torch": "2.0.0"})
    manifest.write_bytes(known.to_bytes())
    done = train("fit", *LONGER, cwd=project, SHIFT="1")
    assert done.code == 0, done.err
    assert "warning: " + OTHER_DATA.format("step4") in done.err


def test_a_resume_with_other_source_names_the_files_in_one_line(project: Path) -> None:
    (project / "part.py").write_text("FACTOR = 2\n")
    done = train("fit", *LONGER, cwd=project)
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if "the source is not what" in line]
    assert [line.partition("warning: ")[2] for line in lines] == [
        "the source is not what step4 was trained with: part.py (changed); metrics before and after step4 may not be "
        "comparable: name=OTHER ckpt=runs/mine/checkpoints/step4 begins another run with these weights, resume=anew "
        "begins this one anew"
    ]


def test_new_runs_from_weights_report_other_source_and_samples(project: Path) -> None:
    (project / "part.py").write_text("FACTOR = 2\n")
    fork = "ckpt=runs/mine@latest"
    done = train("fit", MINE, "name=fork", fork, cwd=project, SHIFT="1")
    assert done.code == 0, done.err
    assert "runs/mine/checkpoints/step4 was trained with: part.py (changed)" in done.err
    assert "runs/mine/checkpoints/step4 was trained with: sample 0 of train, sample 0 of val differ" in done.err
    other_data = train("fit", MINE, "name=other", fork, "+data.size=64", cwd=project, SHIFT="1")
    assert other_data.code == 0, other_data.err
    assert "sample 0 of" not in other_data.err


def test_validate_refuses_other_samples_unless_they_are_allowed_or_asked_for(project: Path) -> None:
    run = project / "runs/mine"
    refused = _validate(project, run, SHIFT="1")
    assert refused.code == 2
    assert f"{OTHER_DATA.format(run / 'checkpoints/step4')}sample 0 of val differs" in refused.err
    assert _validate(project, run, "resume_allow=[data]", SHIFT="1").code == 0
    assert _validate(project, run, "+data.size=64", SHIFT="1").code == 0


def test_another_seed_that_splits_the_data_of_the_run_anew_is_refused(project: Path) -> None:
    run, fork = project / "runs/split", (MINE, "+data.split=true", "name=fork", "ckpt=runs/split@latest")
    assert _validate(project, run).code == 0
    for refused in (
        _validate(project, run, "seed=1"),
        train("fit", *fork, "seed=1", cwd=project),
    ):
        assert refused.code == 2
        assert "step4 was trained with: sample 0 of" in refused.err
        assert "seed: 0 -> 1 splits it anew, unless the split has a generator with a seed of its own" in refused.err
    assert not (project / "runs/fork").exists()
    allowed = train("fit", *fork, "seed=1", "resume_allow=[data]", cwd=project)
    assert allowed.code == 0, allowed.err
    assert "warning: the data is not what" in allowed.err


def test_validate_in_the_run_s_project_reports_other_source_once(project: Path) -> None:
    (project / "shapes.py").write_text(MODULE.replace("self.layer(batch[0])", "-self.layer(batch[0])"))
    done = train("validate", "ckpt=runs/mine/checkpoints/step*", "source=project", cwd=project)
    assert done.code == 0, done.err
    assert done.err.count("the source is not what") == 1
    assert "shapes.py (changed)" in done.err


@pytest.mark.parametrize(
    ("verb", "written"),
    [("validate", "validation"), pytest.param("predict", "predictions/step4", marks=pytest.mark.addon("predict"))],
)
def test_the_run_of_checkpoints_in_another_folder_is_found(project: Path, verb: str, written: str) -> None:
    shutil.move(project / "runs/mine/checkpoints", project / "elsewhere")
    (project / "shapes.py").write_text(MODULE.replace("self.layer(batch[0])", "-self.layer(batch[0])"))
    done = train(verb, "ckpt=elsewhere/step4", cwd=project)
    assert done.code == 0, done.err
    assert "shapes.py (changed)" in done.err
    assert (project / "runs/mine" / written).is_dir()


@pytest.mark.parametrize("edited", ["shapes.py", "part.py", None])
def test_validate_from_another_project_refuses_another_model(project: Path, tmp_path: Path, edited: str | None) -> None:
    other, run = tmp_path / "other", project / "runs/mine"
    # As that of an older version, which kept none.
    shutil.rmtree(run / "source")
    other.mkdir()
    shutil.copy(project / "shapes.py", other)
    shutil.copy(project / "part.py", other)
    if edited is not None:
        with (other / edited).open("a") as file:
            file.write("# another\n")
    done = _validate(other, run)
    if edited != "shapes.py":
        assert done.code == 0, done.err
        assert ("part.py (changed)" in done.err) is (edited is not None)
        return
    for refused in (done, *(_validate(other, run, verb=verb) for verb in ["predict"] if verb in listed_verbs())):
        assert refused.code == 2
        assert (
            f"shapes.Net of {other} is not the class that {run / 'checkpoints/step4'} was trained with" in refused.err
        )
    assert f"Run the command in {project}, which has the source of the run." in done.err
    assert not (run / "validation").exists()
    assert _validate(other, run, "resume_allow=[source]").code == 0


def test_a_checkpoint_without_these_digests_is_read(project: Path) -> None:
    from trainer_cli.manifest import Manifest

    for file in (project / "runs/mine/checkpoints").glob("step*/manifest.json"):
        known = Manifest.parse(file.read_bytes())
        object.__setattr__(known, "samples", {})
        object.__setattr__(known, "source", {})
        file.write_bytes(known.to_bytes())
    assert _validate(project, project / "runs/mine", SHIFT="1").code == 0
    assert train("fit", *LONGER, cwd=project, SHIFT="1").code == 0
