"""The wheel alone is enough: installed without the network, it trains what ships and what a user brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

MINE_MODEL = '''
from torch import nn


class Line(nn.Module):
    """A weight and a bias, which must find y = 3 x + 1."""

    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, batch):
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x), y)
        return {"loss": loss, "error": loss.detach().sqrt()}
'''
MINE_DATA = """
import torch


class Points:
    def __init__(self, count: int):
        x = torch.linspace(-1, 1, count)[:, None]
        self.train = torch.utils.data.TensorDataset(x, 3 * x + 1)
        self.val = {"held_out": torch.utils.data.TensorDataset(x[::7], 3 * x[::7] + 1)}
"""
MINE_CONFIGS = {
    "model/line.yaml": "# A straight line\n_target_: mine.model.Line\nwidth: 1\n",
    "data/points.yaml": "# Points on a line\n_target_: mine.data.Points\ncount: 64\nbatch_size: 8\n",
    "experiment/my_line.yaml": (
        "# @package _global_\n# My own experiment\n"
        "defaults:\n  - override /model: line\n  - override /data: points\n  - override /optimizer: sgd\n"
        "loop:\n  max_duration: 20\n  eval_interval: 10\n"
    ),
}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout's reach; its output is shown where it fails."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=outside, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def train(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a new environment that has the wheel, and borrows what it depends on from this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-index",
        "--no-deps",
        "--quiet",
    ]
    run(*pip, wheel, cwd=home)
    # Only now, so that pip does not take a checkout that is installed there for this wheel.
    (site,) = home.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
    where = run(python, "-c", "import trainer_cli; print(trainer_cli.__file__)", cwd=home).stdout
    assert where.startswith(str(home)), "the command must run the wheel, not the checkout"
    return home / "bin" / "train"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project: configs, and a package that nobody installed."""
    files = {f"configs/{name}": text for name, text in MINE_CONFIGS.items()}
    files |= {"mine/__init__.py": "", "mine/model.py": MINE_MODEL, "mine/data.py": MINE_DATA}
    for name, text in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


def test_the_wheel_carries_code_configs_data_and_licence_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.*")}
    assert {f"trainer_cli/{name}" for name in tracked} <= names
    of_addons = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trainer_cli/addons").rglob("*.yaml")}
    assert of_addons
    assert {*of_addons, "trainer_cli/addons/shipped.json", "trainer_cli/addons/__init__.pyi"} <= names
    assert {"trainer_cli/py.typed", "trainer_cli/data/digits.npz"} <= names
    assert {"trainer_cli/addons/view/report_page.html", "trainer_cli/addons/view/report_page.js"} <= names
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {f"trainer_cli/{name}" for name in pages} <= names
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trainer_cli/scaffold").rglob("*.tmpl")}
    assert templates
    assert templates <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(name.startswith(("trainer_cli/", "trainer_cli-")) for name in names)


def test_list_and_config_show_what_ships_and_fit_trains_it_from_an_empty_directory(
    train: Path, empty_folder: Path, wheel: Path
) -> None:
    assert run(train, "--version", cwd=empty_folder).stdout.split()[-1] == wheel.name.split("-")[1]
    assert "digits_mlp" in run(train, "list", cwd=empty_folder).stdout
    printed = run(train, "config", "+experiment=digits_mlp", cwd=empty_folder).stdout
    assert yaml.safe_load(printed)["model"]["_target_"] == "trainer_cli.MLP"
    assert list(empty_folder.iterdir()) == []
    run(train, "fit", "+experiment=digits_mlp", "loop.max_duration=20", cwd=empty_folder)
    assert [path.name for path in empty_folder.iterdir()] == ["runs"]
    home = empty_folder / "runs" / "digits_mlp"
    summary = json.loads((home / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("finished", 20)
    assert (home / "checkpoints" / "step20" / "manifest.json").is_file()


def test_a_users_project_trains_resumes_and_validates_without_being_installed(train: Path, project: Path) -> None:
    shown = run(train, "list", cwd=project).stdout
    assert "My own experiment" in shown
    assert "digits_mlp" in shown
    run(train, "fit", "+experiment=my_line", cwd=project)
    run(train, "fit", "+experiment=my_line", "loop.max_duration=30", cwd=project)
    home = project / "runs" / "my_line"
    summary = json.loads((home / "summary.json").read_text())
    assert [attempt["step"] for attempt in summary["attempts"]] == [20, 30]
    records = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    errors = {record["step"]: record["held_out/error"] for record in records if "held_out/error" in record}
    assert list(errors) == [10, 20, 30]
    assert errors[30] < errors[10]
    table = run(train, "validate", "ckpt=runs/my_line/checkpoints/step30", cwd=project).stdout
    assert "held_out" in table


EVERY_OPTION = """
from trainer_cli.config.composing import compose
from trainer_cli.config.search_path import SearchPath

search = SearchPath.without_own()
for group in search.groups():
    for option in search.options(group):
        compose([f"{group}={option}"], missing_ok=True)
        print(f"{group}={option}")
"""


def test_a_new_project_composes_all_that_is_its_own_and_all_that_ships(train: Path, empty_folder: Path) -> None:
    run(train, "new", "shapes", cwd=empty_folder)
    done = run(train.with_name("python"), "-P", "-c", EVERY_OPTION, cwd=empty_folder / "shapes").stdout.split()
    assert {"experiment=shapes", "model=large", "experiment=digits", "optimizer=adamw"} <= set(done)
    shown = run(train, "config", "+experiment=shapes", cwd=empty_folder / "shapes").stdout
    assert yaml.safe_load(shown)["model"]["_target_"] == "shapes.model.Net"
