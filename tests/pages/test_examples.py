"""Each example runs by the commands of its README, in small, and is short enough to be read and copied."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from reader import ROOT, Reader, blocks, command_server, of_addon

from trainer_cli.config.composing import compose
from trainer_cli.running.fitting import fit

EXAMPLES = ROOT / "examples"
SHORT = "loop.max_duration=3 loop.eval_steps=2"
SHOWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fine-tuning": (SHORT, (r"weights from runs/pretrain/checkpoints/step\d+", r"(?s)(finished at step 3.*){3}")),
    "gan": (SHORT, (r"finished at step 3", r"val/distance", r"train/lr/generator")),
    "image-classifier": (SHORT, (r"finished at step 3", *of_addon("formats", r"exported: shapes\.pt"))),
    "language-model": (SHORT, (r"finished at step 3", r"^The value")),
    "preempted-job": ("data.count=320", (r"finished at step 100\b",)),
    "sweep": (SHORT, (r"(?s)(moons.*finished.*){8}", *of_addon("view", r"moons\.html: 8 runs"))),
}
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "recipes": (
        "loop.hard_stop=3 loop.eval_steps=1",
        (r"^vae +losses differ by \d\.\de-0\d, weights by \d\.\de-0\d after 60 steps$",),
    )
}


@pytest.fixture(scope="module")
def commands() -> Iterator[Path]:
    with command_server() as folder:
        yield folder


@pytest.mark.parametrize("name", SHOWS | RECIPES)
def test_an_example_runs_by_its_readme(name: str, tmp_path: Path, commands: Path) -> None:
    shutil.copytree(EXAMPLES / name, tmp_path / name)
    short, shows = (SHOWS | RECIPES)[name]
    reader = Reader(tmp_path / name, commands, short)
    reader.page(EXAMPLES / name / "README.md")
    for pattern in shows:
        assert re.search(pattern, reader.output, re.MULTILINE), f"{pattern} is not in the output:\n{reader.output}"


def test_the_tests_of_a_new_project_pass(tmp_path: Path, commands: Path) -> None:
    reader = Reader(tmp_path, commands)
    reader.sh("train new shapes && cd shapes")
    assert re.search(r"^2 passed", reader.sh("python -m pytest -q -p no:cacheprovider"), re.MULTILINE)


def test_the_gan_learns_to_draw_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and spread of its pixels come at least twice as near to those of real images."""
    shutil.copytree(EXAMPLES / "gan", tmp_path / "gan")
    monkeypatch.chdir(tmp_path / "gan")
    composed = compose(["+experiment=digit_gan", "logging.console=off", "loggers=jsonl", "checkpoint.enabled=false"])
    assert fit(composed) == 0
    records = [json.loads(line) for line in Path("runs/digit_gan/metrics.jsonl").read_text().splitlines()]
    distances = [record["val/distance"] for record in records if "val/distance" in record]
    assert len(distances) == 4
    assert distances[-1] < distances[0] / 2


def test_every_example_is_run_and_is_in_the_table() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    folders = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    # tests/addons/test_example.py runs the add-on, test_autoresearch.py the loop.
    assert (
        folders
        == sorted([*SHOWS, *RECIPES, "addon", "autoresearch"])
        == sorted(re.findall(r"^\| \[([\w-]+)\]\(\1/README\.md\)", text, re.MULTILINE))
    )


@pytest.mark.parametrize("name", [*SHOWS, "addon"])
def test_an_example_is_short(name: str) -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (EXAMPLES / name).rglob("*.*")}
    assert max(sizes.values()) <= 70
    ((_, language, commands),) = blocks(EXAMPLES / name / "README.md")
    assert language == "sh"
    assert len(commands.splitlines()) <= 4
    assert sizes[EXAMPLES / name / "README.md"] <= 14


@pytest.mark.parametrize(("codes", "calls", "code"), [([75, 75, 0], 3, 0), ([75, 1, 0], 2, 1), ([0], 1, 0)])
def test_the_preempted_job_is_started_again_while_it_exits_with_75(
    codes: list[int], calls: int, code: int, tmp_path: Path
) -> None:
    """With a `train` that exits with each of the codes in turn."""
    train = tmp_path / "train"
    train.write_text(
        f'#!/bin/sh\necho "$@" >>calls\nset -- {" ".join(map(str, codes))}\nshift $(($(wc -l <calls) - 1))\nexit $1\n'
    )
    train.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    job = [str(EXAMPLES / "preempted-job/job.sh"), "seed=1"]
    assert subprocess.run(job, cwd=tmp_path, env={"PATH": path}).returncode == code
    assert (tmp_path / "calls").read_text().splitlines() == ["fit waves seed=1"] * calls


def test_the_batch_script_of_the_preempted_job_is_shell() -> None:
    script = EXAMPLES / "preempted-job/job.sbatch"
    assert subprocess.run(["sh", "-n", script], capture_output=True, text=True).stderr == ""
