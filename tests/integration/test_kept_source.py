"""A run keeps the source that made it, and later commands compute with it as if nothing had been edited since."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command import train

pytestmark = pytest.mark.slow

NET = """
import torch
from mine.layers import Scaled


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, batch):
        from mine.late import shift

        logits = Scaled.apply_to(self.layer(batch[0])) + shift()
        return {"loss": torch.nn.functional.cross_entropy(logits, batch[1]), "logits": logits}
"""
LAYERS = """
FACTOR = 1


class Scaled:
    @staticmethod
    def apply_to(values):
        return values * FACTOR
"""
LATE = "import mine.deeper as deeper\n\n\ndef shift():\n    return deeper.SHIFT\n"
POINTS = """
import csv
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("points.csv")


class Points(torch.utils.data.Dataset):
    def __init__(self, first, last):
        rows = list(csv.reader(TABLE.open()))[first:last]
        self.points = torch.tensor([[float(cell) for cell in row] for row in rows])

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], (self.points[index][1] > 0.5).long()


class Data:
    def __init__(self):
        self.train, self.val = Points(0, 32), Points(32, 40)
"""
EXPERIMENT = """# @package _global_
model: {_target_: mine.net.Net}
data: {_target_: mine.points.Data, batch_size: 8}
optimizer: {lr: 0.1}
loop: {max_duration: 8, log_interval: 1, eval_interval: 4}
checkpoint: {save_interval: 4, max_checkpoints: 10}
device: cpu
"""
MINE = "+experiment=mine"
OWN = "with the source that the run keeps"


def write_project(folder: Path) -> Path:
    rows = [f"{(i * 37 % 41) / 41:.4f},{(i * 17 % 41) / 41:.4f}" for i in range(40)]
    for name, text in {
        "mine/__init__.py": "", "mine/net.py": NET, "mine/layers.py": LAYERS, "mine/late.py": LATE,
        "mine/deeper.py": "SHIFT = 0.5\n", "mine/points.py": POINTS, "mine/points.csv": "\n".join(rows) + "\n",
        "mine/unused.py": "", "configs/experiment/mine.yaml": EXPERIMENT,
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = write_project(tmp_path_factory.mktemp("kept") / "project")
    done = train("fit", MINE, cwd=project)
    assert done.code == 0, done.err
    return project


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy of the project with its run."""
    return Path(shutil.copytree(trained, tmp_path / "project"))


def edit(project: Path, factor: int = 3) -> None:
    """Change what the model computes, in a file that it imports."""
    (project / "mine/layers.py").write_text(LAYERS.replace("FACTOR = 1", f"FACTOR = {factor}"))


def attempts(project: Path, name: str = "mine") -> list[dict[str, Any]]:
    summary = json.loads((project / f"runs/{name}/summary.json").read_text())
    return list(summary["attempts"])


def sources(project: Path, name: str = "mine") -> list[Path]:
    return sorted(path for path in (project / f"runs/{name}/source").glob("*") if not path.name.startswith("."))


def records(project: Path, name: str = "mine") -> list[dict[str, Any]]:
    """What the run computed, without times."""
    rows = map(json.loads, (project / f"runs/{name}/metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key == "step" or "loss" in key} for row in rows]


def test_a_run_keeps_the_files_that_it_imports_now_or_later(trained: Path) -> None:
    (folder,) = sources(trained)
    files = {str(path.relative_to(folder / "files")) for path in (folder / "files").rglob("*") if path.is_file()}
    assert files == {f"mine/{name}.py" for name in ("__init__", "net", "layers", "late", "deeper", "points")}
    assert (folder / "files/mine/net.py").read_text() == NET
    assert (folder / "config.yaml").read_text() == (trained / "runs/mine/config.yaml").read_text()
    assert [attempt["source"] for attempt in attempts(trained)] == [folder.name]


def test_a_resume_with_the_same_source_writes_nothing_more(project: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (project / "runs/mine/source").rglob("*")}
    # A longer run, on other workers, is made from the same source.
    done = train("fit", MINE, "loop.max_duration=10", "data.num_workers=1", cwd=project)
    assert done.code == 0, done.err
    assert {path: path.stat().st_mtime_ns for path in (project / "runs/mine/source").rglob("*")} == before
    assert [attempt["source"] for attempt in attempts(project)] == [sources(project)[0].name] * 2


def test_a_resume_with_edited_source_keeps_both(project: Path) -> None:
    edit(project)
    done = train("fit", MINE, "loop.max_duration=10", cwd=project)
    assert done.code == 0, done.err
    first, second = (attempt["source"] for attempt in attempts(project))
    assert {first, second} == {path.name for path in sources(project)}
    assert "FACTOR = 3" in (project / f"runs/mine/source/{second}/files/mine/layers.py").read_text()


def test_no_secret_of_the_environment_is_kept(project: Path) -> None:
    done = train("fit", MINE, "name=secret", "+vars.token=${oc.env:MY_TOKEN}", cwd=project, MY_TOKEN="s3cr3t-value")
    assert done.code == 0, done.err
    kept = b"".join(path.read_bytes() for path in sources(project, "secret")[0].rglob("*") if path.is_file())
    assert b"MY_TOKEN" in kept
    assert b"s3cr3t-value" not in kept


def test_what_git_ignores_is_named_unless_it_is_imported(project: Path) -> None:
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / ".gitignore").write_text("mine/layers.py\nmine/deeper.py\nruns\n")
    done = train("fit", MINE, "name=ignored", cwd=project)
    assert done.code == 0, done.err
    (folder,) = sources(project, "ignored")
    assert (folder / "files/mine/layers.py").exists()
    assert not (folder / "files/mine/deeper.py").exists()
    assert json.loads((folder / "source.json").read_text())["not_kept"] == {"mine/deeper.py": "ignored by git"}


def test_a_large_source_is_told(project: Path) -> None:
    (project / "mine/deeper.py").write_text("SHIFT = 0.5\n" + f"#{'x' * 999}\n" * 21_000)
    done = train("fit", MINE, "name=large", cwd=project)
    assert done.code == 0, done.err
    assert "the source of the run has 21 MB in 6 files" in done.err


def test_a_source_that_cannot_be_kept_is_a_warning_and_the_run_is_the_same(project: Path) -> None:
    (project / "runs/broken").mkdir()
    (project / "runs/broken/source").write_text("a file where a folder should be")
    done = train("fit", MINE, "name=broken", cwd=project)
    assert done.code == 0, done.err
    assert done.err.count("the source of the run is not kept: ") == 1
    assert "source" not in attempts(project, "broken")[-1]
    assert records(project, "broken") == records(project)


def test_a_run_that_is_begun_anew_takes_its_source_to_the_trash(project: Path) -> None:
    kept = sources(project)[0].name
    edit(project)
    done = train("fit", MINE, "resume=anew", cwd=project)
    assert done.code == 0, done.err
    assert (project / f"runs/.trash/mine-1/source/{kept}/source.json").exists()
    assert [path.name for path in sources(project)] == [attempts(project)[0]["source"]] != [kept]


def test_without_a_project_of_its_own_a_run_keeps_config_and_versions(tmp_path: Path) -> None:
    done = train("fit", "digits_mlp", "loop.max_duration=2", cwd=tmp_path)
    assert done.code == 0, done.err
    (folder,) = sources(tmp_path, "digits_mlp")
    assert json.loads((folder / "source.json").read_text())["files"] == {}
