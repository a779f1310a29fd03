"""A run on a terminal: the bar keeps to the bottom line, and whatever is printed stays whole above it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from command import LIMIT_S, command, environment, hold, make_project, trained

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer

NOISY = """
import subprocess
import warnings

from mine.parts import Data as Quiet
from mine.parts import Line, Points, pass_by


class Noisy(Points):
    def __getitem__(self, index):
        if index == 7:
            print("a worker prints", flush=True)
            warnings.warn("a worker warns of something that is told in more words than the terminal has columns")
            subprocess.run(["echo", "a child of a worker prints"])
        return super().__getitem__(index)


class Data(Quiet):
    def __init__(self, size=160):
        super().__init__(size)
        self.train = Noisy(size, "train")


class Held(Line):
    # Waits in the seventh step: after evaluations, and after the sample that is printed for.

    steps = 0

    def forward(self, batch):
        self.steps += self.training
        if self.steps == 7:
            pass_by("step")
        return super().forward(batch)
"""
DRAWING = re.compile(r"\x1b7(?P<drawn>.*?)\x1b8", re.DOTALL)


class Terminal:
    """A command on a terminal of 80 columns; `shown` is all that came to it."""

    def __init__(self, arguments: list[str], cwd: Path) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.shown = ""
        self.process = subprocess.Popen(
            arguments, cwd=cwd, env=environment(TERM="xterm", NO_COLOR="1"), stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def press_ctrl_c(self) -> None:
        """As from the keyboard: the terminal shows ^C and sends the signal."""
        os.write(self._master, b"\x03")

    def end(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        os.close(self._master)
        return code

    def _read(self) -> None:
        while True:
            try:
                self.shown += os.read(self._master, 1 << 16).decode()
            except OSError:  # The last of the processes on it has ended.
                return


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    """Wait until a callable is true while the process lives."""
    for _ in range(int(LIMIT_S / 0.02)):
        if condition():
            return
        assert process.poll() is None, "it ended before"
        threading.Event().wait(0.02)
    raise AssertionError("never came true")


def test_lines_are_whole_above_a_bar_that_ctrl_c_takes_away(tmp_path: Path) -> None:
    project = make_project(tmp_path, **{"mine/noisy.py": NOISY})
    held = hold(project, "step")
    overrides = [
        "data._target_=mine.noisy.Data",
        "model._target_=mine.noisy.Held",
        "data.num_workers=1",
        "loop.eval_interval=2",
        "checkpoint.save_interval=2",
    ]
    run = Terminal(command("fit", "experiment=mine", *overrides), project)
    wait_for((project / "at-step").exists, run.process)
    wait_for(lambda: "a child of a worker prints" in run.shown, run.process)
    run.press_ctrl_c()
    wait_for(lambda: "stopping" in run.shown, run.process)
    held.unlink()
    assert run.end() == 75, run.shown

    drawn = [re.split(r"\x1b\[2[34];1H\x1b\[2K", text) for text in DRAWING.findall(run.shown)]
    assert drawn[0] == ["\x1b[1;22r"]
    assert "step 0/40  0%  epoch 0.0  waiting for the first step" in drawn[1][2]
    assert drawn[-1] == ["\x1b[r"]
    assert all(len(line) < 80 for lines in drawn for line in lines)
    printed = DRAWING.sub("", run.shown).replace("\x1b[2A", "").replace("\r\n", "\n")
    statuses, cleared, printed = printed.rpartition("…\x1b[K\r\x1b[K")
    assert statuses.startswith("loading torch …\x1b[K\r"), "the first line, which the next replaces"
    above, cleared, after = printed.partition("\x1b[J")
    assert cleared
    assert "\x1b" not in above + after
    lines = above.splitlines()
    assert all(len(line) < 80 for line in lines if " " in line.strip())
    assert {"a worker prints", "a child of a worker prints"} <= {*lines}
    assert "a worker warns of something that is told in more words" in " ".join(" ".join(lines).split())
    header = next(line.split() for line in lines if line.lstrip().startswith("step  epoch"))
    assert header[:5] == ["step", "epoch", "loss", "loss", "far"]
    assert any(re.match(r" +\d+ +\d\.\d\d( {9,}\d\S* +\d|( +\d\S*){3} )", line) for line in lines), (
        "an evaluation is a row"
    )
    assert "^C\nCtrl-C: stopping after this step; Ctrl-C again stops at once\n" in above
    assert "committed" not in above, "the status line shows it"
    assert re.match(r"\nstopped at step \d+: Ctrl-C ", after)


SLOW = """
from mine.parts import Line, pass_by


class Slow(Line):
    def __init__(self, **settings):
        super().__init__(**settings)
        pass_by("model")
"""


def test_nothing_is_left_of_the_status_where_no_message_follows(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    run = Terminal(
        command("fit", "experiment=mine", "loop.max_duration=1", "logging.level=error", "logging.console=off"), project
    )
    assert run.end() == 0, run.shown
    before, _, after = run.shown.rpartition("building the model …\x1b[K\r")
    assert "loading torch" in before
    assert after.startswith("\x1b[K")


def test_what_takes_long_before_the_first_message_is_named(tmp_path: Path) -> None:
    project = make_project(tmp_path, **{"mine/slow.py": SLOW})
    statuses = {"start": "reading the data …", "model": "building the model …"}
    held = {place: hold(project, place) for place in statuses}
    run = Terminal(command("fit", "experiment=mine", "model._target_=mine.slow.Slow", "loop.max_duration=1"), project)
    for place, status in statuses.items():
        wait_for((project / f"at-{place}").exists, run.process)
        wait_for(partial(lambda status: run.shown.endswith(f"{status}\x1b[K\r"), status), run.process)
        held[place].unlink()
    assert run.end() == 0, run.shown
    first = re.sub(r"[^\r\n]*\x1b\[K\r", "", run.shown).removeprefix("\x1b[K")
    assert first.startswith("run        runs/mine"), "nothing is left of the status"


def test_a_resume_names_the_search_for_its_checkpoint_and_its_reading(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    trained("experiment=mine", "loop.max_duration=1", cwd=project)
    run = Terminal(command("fit", "experiment=mine", "loop.max_duration=2"), project)
    assert run.end() == 0, run.shown
    assert re.findall(r"([a-z][^\r\n]*) …\x1b\[K\r", run.shown) == [
        "loading torch", "looking for a checkpoint", "loading torch", "reading the checkpoint", "reading the data",
        "building the model",
    ]  # fmt: skip


def test_a_closed_window_saves_and_ends_as_any_other_signal(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    held = hold(project, "train")
    master, slave = os.openpty()
    process = subprocess.Popen(
        command("fit", "experiment=mine"), cwd=project, env=environment(TERM="xterm"), stdin=slave, stdout=slave,
        stderr=slave, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    wait_for((project / "at-train").exists, process)
    os.close(master)  # Sends SIGHUP before it returns.
    held.unlink()
    assert process.wait(LIMIT_S) == 75
    summary = json.loads((project / "runs/mine/summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGHUP")
    assert summary["step"] > 0


def test_an_action_that_imports_torch_says_so_first(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(2)}}
    make_sync_checkpointer().save(
        state, tmp_path / "runs/x/checkpoints/step1", metadata=CheckpointMetadata(run_id="x", step=1)
    )
    run = Terminal(command("ckpt", "verify", "runs/x/checkpoints/step1"), tmp_path)
    assert run.end() == 0, run.shown
    assert run.shown.startswith("loading torch …\x1b[K\r\x1b[K")
    assert run.shown.endswith("1 of 1 valid\r\n")


def test_the_check_of_a_sweep_says_how_far_it_is(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    run = Terminal(command("plan", "-m", "experiment=mine", "seed=1,2,3"), project)
    assert run.end() == 0, run.shown
    assert re.findall(r"([a-z]+) job (\d) of 3 …\x1b\[K\r", run.shown) == [
        (verb, number) for verb in ("checking", "planning") for number in "123"
    ]
    assert re.match(r"\s*job ", run.shown.rpartition("\x1b[K")[2]), "nothing is left of the status"
