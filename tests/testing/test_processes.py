"""Processes of a check: how they end is message, and none outlives the check."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from command import is_alive

from trainer_cli.addons.exact.attempts import Probes, freeze
from trainer_cli.addons.exact.trace import ProbePlan
from trainer_cli.config.composing import compose

PICKY = "class Picky(Line):\n    def __init__(self):\n        raise ValueError('not so')\n"
ENDLESS = """
class Endless(Line):
    def forward(self, batch):
        import os
        with open("pid.part", "w") as file:
            file.write(str(os.getpid()))
        os.rename("pid.part", "pid")
        while True:
            time.sleep(0.01)
"""
COMPILED = """
class Compiled(Line):
    def __init__(self):
        super().__init__()
        import sys
        with open("had", "a") as file:
            print("torch._dynamo" in sys.modules, file=file)
        import torch._dynamo
"""
# New interpreters are for systems where a fork is not safe.
KINDS = pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.campaign)])


def plan_of(folder: Path, *overrides: str) -> Path:
    """The plan of one straight process."""
    config = freeze(compose(["experiment=mine", *overrides], cwd=folder), folder, steps=6, plan=folder / "plan")
    ProbePlan(config, folder / "trace").write(folder / "plan")
    return folder / "plan"


@KINDS
def test_a_process_reports_how_it_ended_and_closing_kills_what_still_runs(
    forks: bool, project: Callable[[str], Path]
) -> None:
    folder = project(PICKY + ENDLESS)
    run = Probes(folder, forks=forks)
    codes: list[int] = []
    try:
        assert run(plan_of(folder, "model._target_=parts.Picky"), folder / "mistake") == 2
        assert "not so" in (folder / "mistake").read_text()
        assert run(plan_of(folder), folder / "output") == 0
        assert "finished at step 6" in (folder / "output").read_text()
        shutil.rmtree(folder / "run")
        plan = plan_of(folder, "model._target_=parts.Endless")
        thread = threading.Thread(target=lambda: codes.append(run(plan, folder / "endless")))
        thread.start()
        until = time.monotonic() + 500
        while not (folder / "pid").exists():
            assert thread.is_alive(), (folder / "endless").read_text()
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        run.close()
    thread.join(500)
    assert codes == [-9]
    while is_alive(int((folder / "pid").read_text())):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_compiler_is_imported_once_for_the_processes_that_need_it(
    project: Callable[[str], Path],
) -> None:
    folder = project(COMPILED)
    with closing(Probes(folder)) as run:
        for number in range(4):
            assert run(plan_of(folder, "model._target_=parts.Compiled"), folder / f"output{number}") == 0
            shutil.rmtree(folder / "run")
    # Each of the two interpreters learns it from the first of its processes.
    assert (folder / "had").read_text().split()[2:] == ["True", "True"]


def test_what_every_process_needs_is_imported_before_the_fork() -> None:
    code = "import sys; from trainer_cli.addons.exact.attempts import serve; serve(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=True, capture_output=True, text=True
    )
    needed = {"trainer_cli.running.build", "trainer_cli.running.fitting", "trainer_cli.addons.exact.recorder"}
    assert needed <= {*done.stdout.split()}
