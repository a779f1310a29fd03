"""`train check resume`: what it prints, and how it exits."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from command import LIMIT_S, is_alive, running
from exact_project import WarmProbes

from trainer_cli.addons.exact import resume
from trainer_cli.commands.command_line import main

CALLBACK = """
from trainer_cli import Callback


class Counting(Callback):
    def __init__(self):
        self.steps = 0

    def on_after_optimizer_step(self, trainer, model, optimizer):
        self.steps += 1
        if self.steps > 2:
            optimizer.param_groups[0]["lr"] = 0.1
"""
ENDLESS = """
import os
import time

from trainer_cli import Callback


class Endless(Callback):
    def on_train_start(self, trainer, model, train_loader, loop, loop_idx):
        with open("pid.part", "w") as file:
            file.write(str(os.getpid()))
        os.rename("pid.part", "pid")
        while True:
            time.sleep(0.01)
"""
LESS = ("+experiment=digits_mlp", "~scheduler", "--steps", "6")


@pytest.fixture
def _warm_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "Probes", WarmProbes)


@pytest.mark.usefixtures("_warm_probes")
def test_a_shipped_experiment_passes(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "resume", "+experiment=digits_mlp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] is True
    assert [row["result"] for row in found["rows"]] == ["exact"] * 5
    assert (found["steps"], found["finding"], found["remarks"]) == (12, None, [])
    assert not list(empty_folder.iterdir())


@pytest.mark.usefixtures("_warm_probes")
def test_a_callback_that_forgets_is_named(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty_folder / "configs").mkdir()
    (empty_folder / "counts.py").write_text(CALLBACK)
    assert main(["check", "resume", *LESS, "+callbacks.counting._target_=counts.Counting"]) == 1
    out = capsys.readouterr().out
    assert "not exact\n" in out
    assert "state  callbacks.counting.steps (an attribute of a callback)" in out
    assert "cure   Return it from the callback's state_dict()" in out


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.campaign),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.campaign),
    ],
)
def test_what_is_begun_goes_with_the_check(number: signal.Signals, code: int, empty_folder: Path) -> None:
    (empty_folder / "configs").mkdir()
    (empty_folder / "waits.py").write_text(ENDLESS)
    overrides = ("+experiment=digits_mlp", "+callbacks.endless._target_=waits.Endless")
    scratch = empty_folder / "scratch"
    scratch.mkdir()
    with running("check", "resume", *overrides, cwd=empty_folder, TMPDIR=str(scratch)) as check:
        check.wait_for((empty_folder / "pid").exists, "training")
        assert list(scratch.glob("train-check-*"))
        check.signal(number)
        assert check.end().code == code
        assert not list(scratch.glob("train-check-*"))
        until = time.monotonic() + LIMIT_S
        while is_alive(int((empty_folder / "pid").read_text())):
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume", "+experiment=digits_mlp", "--steps", "3"], "a check of 3 steps proves nothing"),
        (["resume", "+experiment=digit_mlp"], "digits_mlp"),
        (["resume", "optimizer.lrr=1"], "lr"),
        (["+experiment=digits_mlp"], "resume"),
        ([], "resume"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    arguments: list[str], message: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
