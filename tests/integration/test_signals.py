"""A signal stops a run after its step, with a checkpoint, and the resumed run ends as if nothing had happened."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU
from typing import Any

import pytest
from command import LIMIT_S, ROOT, Result, environment, hold, make_project, names, records, running, train, weights

from trainer_cli.signals import StopSignals

FIT = ("fit", "experiment=mine")
REASONS = {
    SIGTERM: "SIGTERM",
    SIGUSR1: "SIGUSR1",
    SIGUSR2: "SIGUSR2",
    SIGXCPU: "SIGXCPU",
    SIGHUP: "SIGHUP",
    SIGINT: "Ctrl-C",
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that nobody stopped."""
    root = make_project(tmp_path_factory.mktemp("straight"))
    assert train("fit", *FIT[1:], cwd=root).code == 0
    return root / "runs/mine"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project, empty of runs."""
    return make_project(tmp_path)


def summary(project: Path) -> dict[str, Any]:
    """How the run ended, as it says."""
    found: dict[str, Any] = json.loads((project / "runs/mine/summary.json").read_text())
    return found


def assert_ends_as(straight: Path, project: Path) -> None:
    """A resume ends with the same bits and the same metrics as the run that nobody stopped."""
    done = train("fit", *FIT[1:], cwd=project)
    assert done.code == 0, done.err
    run = project / "runs/mine"
    assert weights(run / "checkpoints/step40") == weights(straight / "checkpoints/step40")
    assert records(run / "metrics.jsonl") == records(straight / "metrics.jsonl")
    assert summary(project)["status"] == "finished"


def step_of(project: Path) -> int:
    """The step at which the run stopped; its newest checkpoint is of that step."""
    step = summary(project)["step"]
    assert names(project / "runs/mine/checkpoints")[-1] == f"step{step}"
    assert isinstance(step, int)
    return step


@pytest.mark.parametrize("number", REASONS)
def test_a_signal_while_training_finishes_the_step_and_saves(
    straight: Path, project: Path, number: signal.Signals
) -> None:
    held = hold(project, "train")
    with running(*FIT, cwd=project) as run:
        run.reach("train")
        run.signal(number)
        run.notice()
        held.unlink()
        result = run.end()
    assert result.code == 75, result
    assert f"stopped at step 7: {REASONS[number]}" in result.out
    assert "run the same command again to resume from here" in result.out
    assert "Traceback" not in result.err
    assert step_of(project) == 7  # the 51st sample belongs to the seventh batch of eight
    assert_ends_as(straight, project)


def test_a_signal_during_an_evaluation_gives_it_up_and_the_resume_makes_it(straight: Path, project: Path) -> None:
    held = hold(project, "val")
    with running(*FIT, cwd=project) as run:
        run.reach("val")
        run.signal(SIGTERM)
        run.notice()
        held.unlink()
        result = run.end()
    assert result.code == 75
    assert "SIGTERM: stopping after this validation batch, and a resume makes the evaluation again;" in result.err
    assert step_of(project) == 16
    assert "val/loss" not in (project / "runs/mine/metrics.jsonl").read_text()
    assert_ends_as(straight, project)


@pytest.mark.parametrize(("number", "trained"), [(SIGTERM, 0), (SIGTERM, 32), (SIGHUP, 0), (SIGINT, 32)])
def test_a_signal_while_the_data_is_made_ends_at_once_and_leaves_the_run_as_it_was(
    straight: Path, project: Path, number: signal.Signals, trained: int
) -> None:
    if trained:
        assert train(*FIT, f"loop.max_duration={trained}st", cwd=project).code == 0
    before = (project / "runs/mine/summary.json").read_bytes() if trained else None
    held = hold(project, "start")
    with running(*FIT, cwd=project) as run:
        run.reach("start")
        run.signal(number)
        result = run.end()  # still held
    assert (result.code, result.out) == (75, "")
    assert result.err.endswith(f"{REASONS[number]}: stopped before the training began\n")
    if before is None:
        assert not (project / "runs").exists()
    else:
        assert (project / "runs/mine/summary.json").read_bytes() == before
    held.unlink()
    if number is SIGTERM:
        assert_ends_as(straight, project)


BEGUN = """
import sys

def look(event, arguments):
    if event == "import" and arguments[0] == "trainer_cli.commands":
        open("begun", "w").close()

sys.addaudithook(look)
"""
"""A sitecustomize.py that tells when the command begins to import more than its entry point."""


@pytest.mark.parametrize("number", REASONS)
def test_a_signal_before_the_config_is_composed_stops_at_once_and_writes_nothing(
    project: Path, number: signal.Signals
) -> None:
    (project / "observer").mkdir()
    (project / "observer/sitecustomize.py").write_text(BEGUN)
    with running(*FIT, cwd=project, PYTHONPATH=f"{project}/observer:{ROOT}") as run:
        run.wait_for((project / "begun").exists, "begun")
        run.signal(number)
        result = run.end()
    assert result == Result(75, "", f"{REASONS[number]}: stopped before the training began\n")
    assert not (project / "runs").exists()


@pytest.mark.parametrize("argv", [["fit", "a=1"], ["_job", "file"]])
def test_signals_are_handled_before_anything_else_is_imported(argv: list[str]) -> None:
    code = (
        "import signal, sys\n"
        "before = set(sys.modules)\n"
        "signal.signal = lambda *_: sys.exit(print(*set(sys.modules) - before))\n"
        f"sys.argv = ['train', *{argv}]\n"
        "from trainer_cli.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    ours = {name for name in done.stdout.split() if name.startswith("trainer_cli")}
    allowed = {"lazy", "__main__", "signals"}
    assert ours == {"trainer_cli", *(f"trainer_cli.{name}" for name in allowed)}
    assert not {"argparse", "typing", "pathlib", "hydra", "omegaconf", "torch"} & set(done.stdout.split())


LATE = """
import atexit, os, signal, sys
from trainer_cli.__main__ import main

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    atexit.register(os.kill, os.getpid(), number)  # Called after all exit handlers that are registered later.
sys.argv = ["train", "fit", "--help"]
sys.exit(main())
"""
"""Signals that come when all threads have ended. Python then takes its modules apart, for a quarter of a second where
torch is among them."""


def test_signals_at_the_end_of_the_process_do_not_replace_its_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def fail_to_measure(descriptor: int) -> os.terminal_size:
    raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))


@pytest.mark.parametrize(
    "measure", [fail_to_measure, lambda _: os.terminal_size((0, 0)), lambda _: os.terminal_size((80, 24))]
)
def test_a_message_is_written_whatever_the_terminal_says_of_its_size(
    measure: Callable[[int], os.terminal_size], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch, StopSignals():
        patch.setattr(os, "isatty", lambda descriptor: True)
        patch.setattr(os, "get_terminal_size", measure)
        signal.raise_signal(SIGTERM)
    assert capfd.readouterr().err.startswith("SIGTERM: stopping after this step;")


def test_a_second_ctrl_c_ends_it_at_once(project: Path) -> None:
    hold(project, "train")
    with running(*FIT, cwd=project) as run:
        run.reach("train")
        run.signal(SIGINT)
        run.notice()
        run.signal(SIGINT)
        result = run.end()  # still held
    assert result.code == 130
    assert re.search(r"\ninterrupted\nlost: \d+ steps?, as no checkpoint was saved after step 0\n$", result.err)
    assert "Traceback" not in result.err
    assert summary(project)["status"] == "interrupted"
    assert names(project / "runs/mine/checkpoints") == ["step0"]


def _twice_during_a_call() -> None:
    # Blocked for Python, as during a long operation of torch: its handler runs once for both.
    kill = ctypes.PyDLL(None).kill
    for _ in range(2):
        kill(os.getpid(), SIGINT)


def _one_by_one() -> None:
    for _ in range(2):
        signal.raise_signal(SIGINT)


class _Ends:
    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()


def _call_in_del(act: Callable[[], None]) -> None:
    _Ends(act)
    # Short calls: the interrupt comes between two of them.
    for _ in range(int(LIMIT_S / 0.01)):
        time.sleep(0.01)


@pytest.mark.parametrize("act", [_twice_during_a_call, _one_by_one])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_second_ctrl_c_counts_wherever_it_comes(act: Callable[[], None], dropped: bool) -> None:
    stop = StopSignals(quiet=True)
    with stop, pytest.raises(KeyboardInterrupt):
        _call_in_del(act) if dropped else act()
    assert stop.stop_request == "Ctrl-C"


def test_one_ctrl_c_is_counted_once_though_a_forked_process_gets_it_too() -> None:
    with StopSignals(quiet=True) as stop:
        if (child := os.fork()) == 0:
            signal.raise_signal(SIGINT)
            os._exit(0)
        os.waitpid(child, 0)
        signal.raise_signal(SIGINT)
        signal.raise_signal(SIGTERM)
    assert stop.stop_request == "Ctrl-C"


def test_signals_to_the_whole_group_leave_the_workers_to_finish_the_step(straight: Path, project: Path) -> None:
    text = (project / "mine/parts.py").read_text()
    (project / "mine/parts.py").write_text(text.replace("fetched > 50", "fetched > 40"))
    held = hold(project, "train")
    with running(*FIT, "data.num_workers=2", cwd=project) as run:
        run.reach("train")
        for number in (SIGINT, SIGTERM, SIGUSR1):
            run.signal(number, group=True)
        held.unlink()
        result = run.end()
    assert result.code == 75, result
    assert "worker" not in result.err.replace("data.num_workers=2", "")
    step = step_of(project)
    assert 0 < step < 40
    assert_ends_as(straight, project)


def test_time_that_is_used_up_stops_it_like_a_signal(project: Path) -> None:
    result = train(*FIT, "loop.max_time=1s", "loop.max_duration=100000st", "checkpoint.save_interval=null", cwd=project)
    assert result.code == 75
    assert "max_time of 1s used up" in result.out
    step = step_of(project)
    assert step > 0
    result = train(*FIT, f"loop.max_duration={step}st", "checkpoint.save_interval=null", cwd=project)
    assert result.code == 0
    assert summary(project)["status"] == "finished"
