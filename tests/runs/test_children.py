"""Children write their output into their logs, and none outlives its parent unnoticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer_cli.addons.jobs.supervise import Children

LIMIT_S = 500.0
ENV = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.defpath}


def ended(children: Children) -> dict[str, int]:
    """Wait until all have ended; their codes."""
    codes: dict[str, int] = {}
    until = time.monotonic() + LIMIT_S
    while children:
        assert time.monotonic() < until, "they never end"
        codes.update(children.wait())
    return codes


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_output_of_a_child_is_appended_to_its_log(tmp_path: Path) -> None:
    (tmp_path / "a=1").write_text("before\n")
    children = Children(tmp_path.joinpath)
    children.start("a=1", python("import sys; print('one', flush=True); sys.stderr.write('no end')"), ENV)
    children.start("b", python("import sys; print('é'); sys.exit(3)"), ENV)
    children.start("long", python("for i in range(20000): print(i)"), ENV)
    assert ended(children) == {"a=1": 0, "b": 3, "long": 0}
    logs = {name: (tmp_path / name).read_text("utf-8") for name in ("a=1", "b", "long")}
    assert logs == {"a=1": "before\none\nno end", "b": "é\n", "long": "".join(f"{i}\n" for i in range(20000))}


def test_without_logs_the_output_is_passed_through_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    children = Children()
    children.start("a", python("print('plain')"), ENV)
    assert ended(children) == {"a": 0}
    assert capfd.readouterr().out == "plain\n"


def test_a_grandchild_that_holds_the_output_open_does_not_hold_up_the_end(tmp_path: Path) -> None:
    children = Children(tmp_path.joinpath)
    children.start("a", ["bash", "-c", "sleep 600 & echo $!"], ENV)
    assert ended(children) == {"a": 0}
    os.kill(int((tmp_path / "a").read_text()), signal.SIGKILL)


def test_a_killed_child_is_gone() -> None:
    children = Children()
    children.start("a", ["bash", "-c", "trap '' TERM; exec sleep 600"], ENV)
    children.kill()
    assert not children


CHILD = """
import os, signal, sys, threading
from trainer_cli.processes.child import stop_with_parent
stopped = []
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
stop_with_parent()
assert os.read(0, 1) == b""
open("ready", "w").close()
signal.pause()
assert stopped == [signal.SIGTERM]
open("stopped", "w").close()
"""
PARENT = """
import os, sys
from trainer_cli.addons.jobs.supervise import Children
children = Children()
for name in "ab":
    os.makedirs(name)
    os.chdir(name)
    children.start(name, [sys.executable, "-c", sys.argv[1]], dict(os.environ))
    os.chdir("..")
while children:
    list(children.wait())
"""


def test_children_are_reported_to_stop_when_their_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], cwd=tmp_path, env=ENV)
    try:
        _wait_for(tmp_path / "a/ready", tmp_path / "b/ready")
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == -signal.SIGKILL
    _wait_for(tmp_path / "a/stopped", tmp_path / "b/stopped")


def _wait_for(*files: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < until
        time.sleep(0.01)
