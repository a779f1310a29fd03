"""What a watch names, and when it ends, by the state of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_cli.checkpoint.checkpointer import SyncCheckpointer
from trainer_cli.errors import CheckpointError
from trainer_cli.runs.run_dir import RunDir, RunStatus
from trainer_cli.runs.watch import watched


class Waited(Exception):
    """A watch waits, and would do so for good."""


def given_up(seconds: float) -> None:
    raise Waited


class Run:
    """A run directory whose state is written by hand."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "runs/x")
        self.pattern = f"{self.run.checkpoints_folder}/step*"

    def begin(self) -> None:
        self.run.checkpoints_folder.mkdir(parents=True)
        self.run.config_file.write_text("name: x\n")

    def save(self, *steps: int) -> None:
        for step in steps:
            SyncCheckpointer().save({"w": step}, self.run.checkpoints_folder / f"step{step}")

    def say(self, status: str) -> None:
        self.run.summary_file.write_text(json.dumps({"status": status}))

    def seen(self, wait: Callable[[float], object]) -> list[list[str]]:
        return [[path.name for path in selection.paths] for selection in watched([self.pattern], wait)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize(
    ("status", "ends"),
    [
        (RunStatus.finished, True),
        (RunStatus.failed, True),
        (RunStatus.interrupted, True),
        (RunStatus.running, False),
        (RunStatus.killed, False),
    ],
)
def test_a_watch_ends_when_the_run_has_ended(run: Run, status: RunStatus, ends: bool) -> None:
    run.begin()
    run.save(9, 10)
    run.say(status)
    if ends:
        assert run.seen(given_up) == [["step9", "step10"]]
    else:
        with pytest.raises(Waited):
            run.seen(given_up)


def test_each_checkpoint_is_named_once_and_a_partial_one_when_it_is_complete(run: Run) -> None:
    """The run does not exist at first, and the last checkpoint is there only when it has ended."""
    partial = run.run.checkpoints_folder / "step2"
    moments: list[Callable[[], object]] = [
        run.begin,
        lambda: (run.save(1), partial.mkdir()),
        lambda: None,
        lambda: (partial.rmdir(), run.save(2)),
        lambda: (run.save(3), run.say("finished")),
    ]
    assert run.seen(lambda seconds: moments.pop(0)()) == [["step1"], ["step2"], ["step3"]]
    assert moments == []


def test_a_pattern_that_matches_nothing_of_a_run_that_ended_is_refused(run: Run) -> None:
    run.begin()
    run.say("finished")
    with pytest.raises(CheckpointError, match="matches nothing"):
        run.seen(given_up)


def test_a_watch_that_is_stopped_looks_no_more(run: Run) -> None:
    run.begin()
    run.save(1)
    assert list(watched([run.pattern], given_up, lambda: True)) == []


def test_looking_at_the_lock_writes_nothing(run: Run) -> None:
    run.begin()
    assert not run.run.is_locked()
    assert not run.run.lock_file.exists()
    with run.run.lock():
        assert run.run.is_locked()
    assert not run.run.is_locked()
