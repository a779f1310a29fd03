"""examples/autoresearch: the loop edits, compares and keeps, and goes on after a kill as if there was none."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import weights
from reader import ROOT, Reader, blocks, command_server, environment

pytestmark = [pytest.mark.slow, pytest.mark.addon("compare"), pytest.mark.addon("jobs")]
EXAMPLE = ROOT / "examples/autoresearch"
MOMENTS = (
    "runs/trial-0/metrics.jsonl", "trials/0/answer.json", "trials/1", "runs/compare/trial-1/compare.json",
    "runs/compare/trial-1/a-seed1/metrics.jsonl", "runs/compare/trial-1/pairs.jsonl",
    "runs/compare/trial-1/b-seed3/summary.json", "trials/1/answer.json", "trials/2",
    "runs/compare/trial-2/b-seed1/config.yaml", "trials/2/answer.json", "runs/compare/trial-3/b-seed2/metrics.jsonl",
)  # fmt: skip
"""Files and folders in the order in which they are made."""


@pytest.fixture(scope="module")
def commands() -> Iterator[Path]:
    with command_server() as folder:
        yield folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, commands: Path) -> tuple[Path, str]:
    """The folder of the example after the commands of its page, and what these printed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "autoresearch"
    shutil.copytree(EXAMPLE, folder)
    reader = Reader(folder, commands)
    reader.page(folder / "README.md")
    return folder, reader.output


def answers(folder: Path) -> list[dict[str, Any]]:
    """The answers that were recorded for the edits, in order."""
    files = [
        folder / "trials" / str(number) / "answer.json" for number in range(1, len([*folder.glob("trials/[0-9]*")]))
    ]
    return [json.loads(file.read_text()) for file in files]


def test_the_best_edit_is_kept_and_each_is_compared_with_the_best_before(undisturbed: tuple[Path, str]) -> None:
    folder, output = undisturbed
    wide, mistake, narrow = answers(folder)
    assert (wide["verdict"], narrow["verdict"]) == ("better", "worse")
    assert "has no attribute 'rely'" in mistake["error"]
    assert [line.split(" - ")[0] for line in output.splitlines() if " - " in line] == [
        "0 the beginning", "  1 a wide layer", "    2 a mistake", "    3 a narrow layer",
    ]  # fmt: skip
    # A is the source of the run that was kept, not that of the project, and is not trained again.
    assert narrow["a"] == narrow["pairs"][0]["a_run"] == wide["pairs"][0]["b_run"]
    assert narrow["source_differs"] == wide["source_differs"] == ["network.py"]
    assert (folder / "network.py").read_text() == (folder / "trials/1/network.py").read_text()


def test_each_run_keeps_the_source_of_its_trial(undisturbed: tuple[Path, str]) -> None:
    folder, _ = undisturbed
    for number, answer in enumerate(answers(folder), 1):
        for pair in answer.get("pairs", ()):
            if f"trial-{number}/" in pair["b_run"]:
                (kept,) = folder.joinpath(pair["b_run"]).glob("source/*/files/network.py")
                assert kept.read_text() == (folder / "trials" / str(number) / "network.py").read_text()


@pytest.mark.addon("view")
def test_the_live_page_lists_the_runs_of_all_trials(undisturbed: tuple[Path, str]) -> None:
    from serving import served

    folder, _ = undisturbed
    with served(folder / "runs") as server, urllib.request.urlopen(f"{server.url}api/runs") as response:
        listed = response.read().decode()
    for answer in answers(folder):
        for pair in answer.get("pairs", ()):
            assert pair["b_run"].removeprefix("runs/") in listed


def test_a_killed_loop_goes_on_to_the_trials_of_an_undisturbed_one(
    undisturbed: tuple[Path, str], commands: Path, tmp_path: Path
) -> None:
    wanted, output = undisturbed
    folder = tmp_path / "autoresearch"
    shutil.copytree(EXAMPLE, folder)
    env = environment(PATH=f"{commands}:{os.environ['PATH']}")
    command = [sys.executable, "research.py", "3"]
    moment, alone = random.choice(MOMENTS), random.random() < 0.5
    with subprocess.Popen(command, cwd=folder, env=env, start_new_session=True) as loop:
        while loop.poll() is None and not (folder / moment).exists():
            time.sleep(0.002)
        # The loop alone: its `train` goes on for a while. The group: all end at once.
        (os.kill if alone else os.killpg)(loop.pid, signal.SIGKILL)
    why = f"killed at {moment}, {'alone' if alone else 'with its commands'}"
    again = subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE)
    assert again.returncode == 0, why
    assert again.stdout.splitlines() == [line for line in output.splitlines() if " - " in line], why
    for number, (answer, undisturbed_answer) in enumerate(zip(answers(folder), answers(wanted), strict=True), 1):
        assert answer == undisturbed_answer, why
        for pair in answer.get("pairs", ()):
            for run in (pair["a_run"], pair["b_run"]):
                assert weights(folder / run / "checkpoints/step40") == weights(wanted / run / "checkpoints/step40"), why
        trials = [each / "trials" / str(number) / "network.py" for each in (folder, wanted)]
        assert trials[0].read_text() == trials[1].read_text(), why
    assert sorted(path.name for path in folder.glob("trials/*") if not path.name.startswith(".")) == [*"0123"]


def test_the_loop_is_short() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in EXAMPLE.rglob("*.*")}
    assert sizes.pop("research.py") <= 100
    assert max(sizes.values()) <= 30
    ((_, language, shown),) = blocks(EXAMPLE / "README.md")
    assert language == "sh"
    assert len(shown.splitlines()) <= 4
