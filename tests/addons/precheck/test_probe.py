"""`train plan --probe` times some steps of the real training, writes nothing, and says how long the run will take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import SMALL, train

from trainer_cli.addons.precheck.probe import summarise

pytestmark = pytest.mark.slow


def probed(folder: Path, *words: str) -> dict[str, Any]:
    """The plan as JSON, made with scratch folders below `folder`."""
    scratch = folder / "scratch"
    scratch.mkdir()
    done = train("plan", *words, "--probe", "--json", cwd=folder, TMPDIR=str(scratch))
    assert done.code == 0, done.err
    assert not list(scratch.glob("train-probe-*")), "nothing is left"
    shutil.rmtree(scratch)
    return dict(json.loads(done.out))


def test_the_duration_is_that_of_the_start_the_steps_the_evaluations_and_the_saves(empty_folder: Path) -> None:
    plan = probed(empty_folder, *SMALL)
    times = plan["probed"]
    assert times["steps"] == 20
    parts = times["start_s"] + 20 * times["step_s"] + 2 * times["evaluation_s"] + 3 * times["save_s"]
    assert plan["duration_s"] == pytest.approx(parts)
    assert min(times[key] for key in ("start_s", "step_s", "memory_bytes")) > 0
    assert list(empty_folder.iterdir()) == [], "nothing is written"


def test_people_get_the_duration_what_was_measured_and_the_memory(empty_folder: Path) -> None:
    done = train("plan", *SMALL, "checkpoint.save_interval=1h", "--probe", cwd=empty_folder)
    assert done.code == 0, done.err
    labels = [line[:17].strip() for line in done.out.splitlines()]
    assert [label for label in labels if label in ("will take", "measured", "memory")] == [
        "will take", "measured", "memory",
    ]  # fmt: skip
    assert "checkpoint.save_interval (3600s): estimated from a step of " in done.out


def test_a_run_that_exists_is_left_alone_and_only_the_steps_that_are_left_count(empty_folder: Path) -> None:
    assert train("fit", *SMALL, "loop.max_duration=10", cwd=empty_folder).code == 0
    before = {path: path.stat().st_mtime_ns for path in (empty_folder / "runs").rglob("*")}
    plan = probed(empty_folder, *SMALL)
    times = plan["probed"]
    assert plan["from"]["step"] == 10
    parts = times["start_s"] + 10 * times["step_s"] + times["evaluation_s"] + times["save_s"]
    assert plan["duration_s"] == pytest.approx(parts)
    assert {path: path.stat().st_mtime_ns for path in (empty_folder / "runs").rglob("*")} == before


def test_a_finished_run_is_not_probed(empty_folder: Path) -> None:
    assert train("fit", *SMALL, cwd=empty_folder).code == 0
    plan = probed(empty_folder, *SMALL)
    assert (plan["does"], plan["probed"], plan["duration_s"]) == ("nothing", None, None)


def test_a_training_that_fails_shows_its_error(empty_folder: Path) -> None:
    done = train("plan", *SMALL, "model.hidden=[-3]", "--probe", cwd=empty_folder)
    assert done.code == 2
    assert "negative dimension -3" in done.err
    assert "--probe: the training failed, for the reason above" in done.err


SLOW = """
import time

from trainer_cli import Callback


class Slow(Callback):
    def on_train_batch_start(self, *arguments):
        time.sleep(0.3)


class StopAtOnce(Callback):
    def on_fit_start(self, trainer, *arguments):
        trainer.stop("enough")
"""


@pytest.mark.parametrize("steps", [1, 4])
def test_a_run_whose_last_step_ends_a_stretch_is_probed(empty_folder: Path, steps: int) -> None:
    empty_folder.joinpath("slow.py").write_text(SLOW)
    duration = f"loop.max_duration={steps}"
    times = probed(empty_folder, *SMALL, duration, "+callbacks.slow={_target_: slow.Slow}")["probed"]
    assert times["steps"] == steps
    assert times["step_s"] > 0.3


def test_a_training_without_a_step_measures_nothing(empty_folder: Path) -> None:
    empty_folder.joinpath("slow.py").write_text(SLOW)
    done = train("plan", *SMALL, "+callbacks.stop={_target_: slow.StopAtOnce}", "--probe", cwd=empty_folder)
    assert done.code == 2
    assert "--probe: the training ended before its first step, and nothing could be measured" in done.err


def test_a_sweep_is_not_probed(empty_folder: Path) -> None:
    done = train("plan", "-m", *SMALL, "seed=1,2", "--probe", cwd=empty_folder)
    assert (done.code, done.out) == (2, "")
    assert "--probe is for one run, and -m plans several" in done.err


def test_ranks_are_probed_as_they_train(empty_folder: Path) -> None:
    plan = probed(empty_folder, *SMALL, "parallel=ddp", "parallel.processes_per_node=2")
    assert plan["probed"]["steps"] == 20


PAUSES = ((2, 3.0), (1, 0.5))
"""Number and seconds of the evaluations, and of the saves."""


def test_what_comes_once_as_a_compilation_counts_as_start() -> None:
    marks = [(0, 0.0), (1, 60.0), *((10 * number, 60.0 + number) for number in range(1, 7))]
    times = summarise(80.0, 60, marks, *PAUSES, 1, None)
    assert times.step_s == pytest.approx(0.1)
    assert times.spread == pytest.approx(0.0, abs=1e-9)
    assert (times.evaluation_s, times.save_s) == (1.5, 0.5)
    assert times.start_s == pytest.approx(80 - 60 * 0.1 - 3.5)


def test_the_spread_is_that_of_the_stretches() -> None:
    marks = [(0, 0.0), (1, 9.0), (2, 10.0), (12, 11.0), (22, 13.0), (32, 14.0), (42, 16.0)]
    times = summarise(30.0, 42, marks, *PAUSES, 1, None)
    assert times.step_s == pytest.approx(0.15)
    assert times.spread == pytest.approx(0.385, rel=0.01)


def test_all_steps_of_a_short_run_count_and_no_spread_is_known() -> None:
    times = summarise(8.0, 5, [(0, 0.0), (5, 1.0)], *PAUSES, 1, None)
    assert (times.step_s, times.spread) == (0.2, None)
