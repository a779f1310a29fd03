"""The README tells the truth: its commands and programs are run, in the order in which they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _blocks(language: str, containing: str = "") -> list[str]:
    return [text for kind, text in BLOCKS if kind == language and containing in text]


def _block(containing: str) -> str:
    """The one block of commands that has this in it."""
    (found,) = _blocks("sh", containing)
    return found


def _sh(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run shell lines as a reader would, with this environment's `train`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    body = f'train() {{ "{sys.executable}" -m trainer_cli "$@"; }}\nset -e\n{script}'
    done = subprocess.run(["bash", "-c", body], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done


def _python(program: str, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=cwd, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, f"{program}\n{done.stderr}"
    return done.stdout


def test_the_first_commands_are_the_scripts_that_are_there() -> None:
    names = re.findall(r"^(scripts/\w+)", _blocks("sh")[0], re.MULTILINE)
    assert names == ["scripts/quickstart", "scripts/test"]
    assert all(os.access(ROOT / name, os.X_OK) for name in names)


def test_the_commands_of_train_kill_go_on_evaluate_run_as_they_stand(tmp_path: Path) -> None:
    block = next(text for text in _blocks("sh") if "train list" in text)
    done = _sh(block, tmp_path)
    assert "is finished at step" in done.stdout, "the second fit finds the run finished"
    assert "smallest loss" in done.stdout, "the table of validate"
    weights = _python(f"{_blocks('python', 'load_file')[0]}\nprint(len(weights))", tmp_path)
    assert int(weights) > 0


def test_what_explains_the_config_and_looks_after_checkpoints_runs_as_it_stands(tmp_path: Path) -> None:
    _sh("train fit +experiment=digits_mlp loop.max_duration=3ep", tmp_path)
    explained = _sh(_block("--provenance"), tmp_path).stdout
    assert "command line: optimizer.lr=0.01" in explained
    assert "max_duration" in explained
    shown = _sh(_block("train ckpt ls"), tmp_path).stdout
    assert re.search(r"([2-9]) of \1 sound", shown)
    assert "pinned: runs/digits_mlp/checkpoints/step" in shown


def test_the_mistakes_shown_are_reported_as_shown(tmp_path: Path) -> None:
    command = _block("loop.max_step=3").strip().replace("train ", "", 1).split()
    done = subprocess.run(
        [sys.executable, "-m", "trainer_cli", *command],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == _blocks("text", "4 mistakes")[0]


@pytest.mark.timeout(580)
def test_a_new_project_trains_and_resumes_exactly(tmp_path: Path) -> None:
    done = _sh(_block("train new mine"), tmp_path)
    assert "finished at step" in done.stdout
    assert "exact" in done.stdout


@pytest.mark.timeout(580)
def test_the_sweep_runs_as_it_stands(tmp_path: Path) -> None:
    _sh(_block("train fit -m"), tmp_path)
    rows = (tmp_path / "runs/digits_mlp/sweep/sweep.csv").read_text().splitlines()
    assert len(rows) == 5
    assert all("finished" in row for row in rows[1:])
    assert (tmp_path / "runs/digits_mlp/sweep/optimizer.lr=0.001,seed=0/summary.json").exists()


def test_packing_averages_and_early_stopping_run_as_they_stand(tmp_path: Path) -> None:
    done = _sh(_block("data=documents"), tmp_path)
    assert done.stdout.count("finished at step") == 2


def test_the_users_project_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "shapes.py").write_text(_blocks("python", "# shapes.py")[0])
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(_blocks("yaml", "shapes.Net")[0])
    done = _sh(_block("experiment=mine model.width=64"), tmp_path)
    assert re.search(r"runs/mine/checkpoints/step80\s+80\s+large", done.stdout), done.stdout
    assert "My experiment" in _sh("train list experiment", tmp_path).stdout


def test_the_checkpoint_options_shown_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    body = "# @package _global_\n" + _blocks("yaml", "save_interval")[0]
    (tmp_path / "configs" / "experiment" / "shown.yaml").write_text(body)
    done = _sh("train config +experiment=shown", tmp_path)
    assert "fixed_steps:" in done.stdout


def test_the_library_example_runs_and_is_done_the_second_time(tmp_path: Path) -> None:
    program = _blocks("python", "TrainingLoop")[0]
    step, accuracy = _python(program, tmp_path).split()
    assert float(accuracy) > 0.5
    assert _python(program.replace('["val/accuracy"]', ""), tmp_path).split()[0] == step


@pytest.mark.parametrize("link", re.findall(r"\]\(((?!http)[^)]+)\)", README))
def test_links_into_the_repository_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_table_of_experiments_is_complete() -> None:
    shipped = {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == shipped
