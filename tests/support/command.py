"""The real command in processes of its own, and a user's project whose model and data wait where they are asked to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import warm
from printed import untimed

import trainer_cli
from trainer_cli.processes.child import own_command

if TYPE_CHECKING:
    import pytest

ROOT = Path(trainer_cli.__file__).resolve().parents[1]
EXPERIMENTS = sorted(
    file.stem
    for folder in (ROOT / "configs", *ROOT.glob("trainer_cli/addons/*/configs"))
    for file in folder.glob("experiment/*.yaml")
)
"""The names of the experiments that ship."""
LIMIT_S = 600.0
"""A guard against hanging. It holds on a machine that is busy with other things, and measures nothing."""
SMALL = (
    "experiment=digits_mlp",
    "loop.max_duration=20",
    "loop.eval_interval=10",
    "loop.log_interval=5",
    "checkpoint.save_interval=10",
)
"""A run of a second: checkpoints and evaluations at steps 10 and 20."""

CODE = '''
"""A user's own model and data. `hold-PLACE` in the current folder makes them wait at that place."""

import os
import time

import torch

fetched = 0


def pass_by(place):
    """Tell that the place is reached, and wait while it is held."""
    if os.path.exists(f"hold-{place}"):
        open(f"at-{place}", "w").close()
        while os.path.exists(f"hold-{place}"):
            if os.path.exists("ping"):
                os.unlink("ping")
            time.sleep(0.01)


class Points(torch.utils.data.Dataset):
    """Points of a line with noise of their own at each visit."""

    fingerprint = "points"

    def __init__(self, size, place):
        self.size, self.place = size, place

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        global fetched
        fetched += 1
        if fetched > 50 or self.place == "val":
            pass_by(self.place)
        x = torch.tensor([index / self.size, 1.0]) + 0.1 * torch.rand(2)
        return x, x.sum() * 3


class Data:
    def __init__(self, size=160):
        pass_by("start")
        self.train, self.val = Points(size, "train"), Points(20, "val")


class Line(torch.nn.Module):
    def __init__(self, width=8, dropout=0.2):
        super().__init__()
        self.hidden = torch.nn.Linear(2, width)
        self.dropout = torch.nn.Dropout(dropout)
        self.out = torch.nn.Linear(width, 1)

    def forward(self, batch):
        x, y = batch
        guess = self.out(self.dropout(torch.relu(self.hidden(x)))).squeeze(1)
        return {"loss": ((guess - y) ** 2).mean(), "far": (guess - y).abs().max()}
'''
PROJECT = {
    "mine/__init__.py": "",
    "mine/parts.py": CODE,
    "configs/model/line.yaml": "# A line\n_target_: mine.parts.Line\nwidth: 8\n",
    "configs/data/points.yaml": "# Points\n_target_: mine.parts.Data\nbatch_size: 8\nnum_workers: 0\n",
    "configs/experiment/mine.yaml": (
        "# @package _global_\n# Our own line through our own points\n"
        "defaults:\n  - override /model: line\n  - override /data: points\n  - override /optimizer: adam\n"
        "loop:\n  max_duration: 40st\n  eval_interval: 16st\n  log_interval: 4\n"
        "checkpoint:\n  save_interval: 16st\n"
    ),
}
"""Forty steps over two epochs of twenty; evaluations and checkpoints at 16, 32 and 40."""


@dataclass(frozen=True)
class Result:
    """How a process ended, and what it said. `code` is the exit code, or minus the signal that killed it."""

    code: int
    out: str
    err: str
    operations: list[str] = field(default_factory=list)
    """What was asked of a faulty disk, and each message `committed …` in its place among that."""

    def __post_init__(self) -> None:
        # What a line says counts here, not when it was written.
        object.__setattr__(self, "err", untimed(self.err))

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Running:
    """The command in a process group of its own, so that signals reach it as from a terminal."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        cwd: Path,
        *,
        cold: bool = False,
        disk: Mapping[str, Any] | None = None,
        **env: str,
    ) -> None:
        self.cwd = cwd
        settings = {} if disk is None else {"disk": disk, "operations": Path(os.devnull)}
        self.process = start(arguments, cwd, environment(**env), cold=cold, start_new_session=True, **settings)

    def reach(self, place: str) -> None:
        """Wait until the held place is reached."""
        self.wait_for((self.cwd / f"at-{place}").exists, f"at {place}")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition that comes true while the process lives."""
        until = time.monotonic() + LIMIT_S
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"ended before it was {what}: {self.end()}")
            if time.monotonic() > until:
                raise AssertionError(f"never was {what}")
            time.sleep(0.01)

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or to all of its group; like Popen, to none that has ended."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.process.pid, number)

    def notice(self) -> None:
        """Wait until the held process has run on since the last signal, so that it has handled it."""
        ping = self.cwd / "ping"
        ping.touch()
        self.wait_for(lambda: not ping.exists(), "alive after the signal")

    def end(self) -> Result:
        """Wait for the end."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return Result(self.process.returncode or 0, out, err)


def command(*arguments: str) -> list[str]:
    """The command line. `-P`: as with the installed script, the current folder is not on the path by itself."""
    return [sys.executable, "-P", "-m", "trainer_cli", *arguments]


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: one thread, this package, `interrupts`, and no settings of the caller's."""
    path = f"{ROOT}:{Path(__file__).parent}"
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return {**{key: value for key, value in os.environ.items() if not key.startswith("TRAIN_")}, **ours, **more}


@cache
def warm_server() -> warm.Server:
    """The process that commands are forked from, started when the first is."""
    return warm.Server(environment())


def start(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str], *, cold: bool = False, **settings: Any
) -> subprocess.Popen[str] | warm.WarmProcess:
    """Start the command; `settings` are those of `subprocess.Popen`, and for a fork those of `WarmProcess`.

    It is a fork of a process that has imported everything, in a tenth of the time, unless a new interpreter is needed
    for the environment, or asked for (`cold`).
    """
    # On macOS a fork of a process that has loaded its frameworks may not use them.
    forks = sys.platform == "linux" and not cold and "preexec_fn" not in settings
    if forks and warm_server().can_become(env):
        return warm.WarmProcess(warm_server(), arguments, cwd=cwd, env=env, **settings)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    streams.pop("imports", None)
    assert "disk" not in streams, "a faulty disk is given to a fork, and this environment needs a new interpreter"
    return subprocess.Popen(command(*arguments), cwd=cwd, env=env, text=True, **streams)


def start_program(
    program: Path,
    arguments: Sequence[str],
    env: Mapping[str, str],
    imports: Sequence[str] = (),
    *,
    cwd: Path | None = None,
    cold: bool = False,
    **settings: Any,
) -> subprocess.Popen[str] | warm.WarmProcess:
    """Start a program of the tests in `cwd` or the current folder, its two outputs in one pipe; a fork if that is the
    same.

    `imports` are heavy modules that it needs, imported once for all later forks; `settings` are as for `start`.
    """
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **settings}
    if sys.platform == "linux" and not cold and warm_server().can_become(env):
        settings |= {"program": program, "imports": imports}
        return warm.WarmProcess(warm_server(), arguments, cwd=cwd or Path.cwd(), env=env, **settings)
    return subprocess.Popen([sys.executable, str(program), *arguments], cwd=cwd, env=env, text=True, **settings)


def run_own(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    capture_output: bool = False,
    stdout: int | None = None,
    **_: Any,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` for a command that this program starts itself (`own_command`): a fork, where `start` has one."""
    streams: dict[str, Any] = {} if capture_output else {"stdout": stdout, "stderr": None}
    arguments = words[len(own_command([])) :]
    with start(arguments, cwd or Path.cwd(), env, **streams) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(words, process.returncode or 0, out, err)


def fork_jobs(patch: pytest.MonkeyPatch, imports: Sequence[str] = ()) -> None:
    """Have what this process starts of this program (the jobs of a sweep, ranks, the children of `restarts.max`) be
    forks of a process that has imported everything, where `start` has one.

    Otherwise the first one of a sweep imports torch, and so does the server from which the program forks the others.
    `imports` are as of `start_program`.
    """

    def start_own(words: Sequence[str], env: Mapping[str, str] | None = None, **settings: Any) -> Any:
        env = {**(os.environ if env is None else env)}
        # What `set_rank_variables` sets, and torch reads when it is imported. A fork logs a little more.
        env.pop("TORCH_CPP_LOG_LEVEL", None)
        return start(words[len(own_command([])) :], Path.cwd(), env, imports=imports, **settings)

    # Now, as it has the environment of its start. What is set later is put back at the end of the test.
    warm_server()
    patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Without the program's own server. With the names of `subprocess` that the module uses.
    patch.setenv("TRAIN_FORK", "0")
    names = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    patch.setattr("trainer_cli.addons.jobs.fork_server.subprocess", SimpleNamespace(Popen=start_own, **names))


def run_program(text: str, *arguments: str, folder: Path, imports: Sequence[str] = ()) -> Result:
    """Run a program of the tests, which is written into `folder`, to its end; what it printed is all in `out`."""
    program = folder / "program.py"
    program.write_text(text)
    with start_program(program, arguments, environment(), imports) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    return Result(process.returncode or 0, out, "")


def train(
    *arguments: str,
    cwd: Path,
    cold: bool = False,
    disk: Mapping[str, Any] | None = None,
    imports: Sequence[str] = (),
    preexec_fn: Callable[[], None] | None = None,
    limit_s: float = LIMIT_S,
    **env: str,
) -> Result:
    """Run the command to its end.

    Args:
        cold: in a new interpreter, for what happens or is imported when the command starts.
        disk: the arguments of the FaultyDisk that holds its checkpoints.
        imports: heavy modules that it needs, imported once for all later commands.
        preexec_fn: as of `subprocess.Popen`.
        limit_s: after so many seconds it is killed, and subprocess.TimeoutExpired is raised.
        env: more variables of its environment.
    """
    settings: dict[str, Any] = {} if preexec_fn is None else {"preexec_fn": preexec_fn}
    with tempfile.TemporaryDirectory() as folder:
        operations = Path(folder, "operations")
        if disk is not None or imports:
            settings |= {"disk": disk, "operations": operations, "imports": imports}
        with start(arguments, cwd, environment(**env), cold=cold, **settings) as process:
            try:
                out, err = process.communicate(timeout=limit_s)
            finally:
                process.kill()
        asked = operations.read_text().splitlines() if operations.exists() else []
    return Result(process.returncode or 0, out, err, asked)


def trained(*arguments: str, cwd: Path) -> Result:
    """Run `train fit` to its good end."""
    result = train("fit", *arguments, cwd=cwd)
    assert result.code == 0, result.err
    return result


@contextmanager
def running(
    *arguments: str, cwd: Path, cold: bool = False, disk: Mapping[str, Any] | None = None, **env: str
) -> Iterator[Running]:
    """The command, started; killed at the end if it still lives. `disk` is as of `train`."""
    started = Running(arguments, cwd, cold=cold, disk=disk, **env)
    with started.process:  # closes its pipes, where nobody has read them to the end, too
        try:
            yield started
        finally:
            if started.process.poll() is None:
                # The process may have ended although the server of the forks has not reported it yet.
                started.signal(signal.SIGKILL, group=True)


def make_project(root: Path, **files: str) -> Path:
    """A user's project with its own configs and package; returns its root."""
    return write_files(root, {**PROJECT, **files})


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write files by their paths below a folder; returns the folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def hold(root: Path, place: str) -> Path:
    """Make the project's parts wait at a place until the returned file is removed."""
    file = root / f"hold-{place}"
    (root / f"at-{place}").unlink(missing_ok=True)
    file.touch()
    return file


def is_alive(pid: int) -> bool:
    """True while a process, also one that has ended and was not waited for, exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def names(folder: Path) -> list[str]:
    """The checkpoints in a folder, in numeric order."""
    found = [path.name for path in folder.iterdir() if path.name.startswith("step")]
    return sorted(found, key=lambda name: int(name.removeprefix("step")))


def weights(checkpoint: Path) -> bytes:
    """Every bit of every tensor of a checkpoint."""
    return (checkpoint / "rank0.safetensors").read_bytes()


def records(file: Path, *ignored: str) -> list[dict[str, Any]]:
    """The lines of a JSON lines file, without the values that depend on the clock."""
    clock = {"time", "train/samples_per_s", *ignored}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in clock} for line in lines]


def flip_a_byte(file: Path) -> None:
    """Damage a file where nobody sees it: one bit in its middle, the size as before."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
