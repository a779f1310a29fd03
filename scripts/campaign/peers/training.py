"""Trainings of one contender, each in a fork of a process that has imported everything, so that it starts in
milliseconds and dies alone."""

from __future__ import annotations

import importlib
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from campaign.peers import task
from campaign.peers.peer_savers import Contender

LIMIT_S = 600.0
"""A training that takes longer has hung; undisturbed it takes about a second of a core."""
_LINE = re.compile(rb"^(?:\d+-\d+-\d+ \d+:\d+:\d+ )?(committed step|resuming at step|end) (\w+)", re.MULTILINE)
"""`train` writes the time before."""


@dataclass
class Training:
    """A training in a process of its own, and what it has written so far."""

    pid: int
    descriptor: int
    announced: list[int] = field(default_factory=list)
    """The steps whose saves have returned."""
    resumed: int = 0
    """The step that it went on from."""
    digest: str | None = None
    """Of the weights at the end."""
    output: bytes = b""
    code: int | None = None
    """Exit code, or minus the signal; None while it lives."""
    hung: bool = False

    def read(self, until: float) -> bool:
        """Read what it writes until that moment at most; False if it has closed its output."""
        ready, _, _ = select.select([self.descriptor], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return True
        content = os.read(self.descriptor, 1 << 16)
        self.output += content
        whole = self.output[: self.output.rfind(b"\n") + 1]
        lines = [(kind, value.decode()) for kind, value in _LINE.findall(whole)]
        self.announced = [int(value) for kind, value in lines if kind == b"committed step"]
        self.resumed = next((int(value) for kind, value in lines if kind == b"resuming at step"), 0)
        self.digest = next((value for kind, value in lines if kind == b"end"), None)
        return bool(content)

    def read_until_announced(self, step: int) -> None:
        """Return once a save of this step or a later one was announced, or it has ended."""
        until = time.monotonic() + LIMIT_S
        while max(self.announced, default=0) < step and time.monotonic() < until and self.read(until):
            pass

    def read_for(self, seconds: float) -> None:
        """Return after this time, or when it has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.read(until):
            pass

    def end(self) -> None:
        """Wait for the end; kill what does not end in time."""
        until = time.monotonic() + LIMIT_S
        while (open := self.read(until)) and time.monotonic() < until:
            pass
        self.hung = open
        self.kill()

    def kill(self) -> None:
        """Kill it, if it lives."""
        if self.code is None:
            if self.hung or self.digest is None:
                os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.descriptor)

    @property
    def last_words(self) -> str:
        """The last line that it has written."""
        lines = self.output.decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


@contextmanager
def training(contender: Contender, folder: Path, stop_at: int | None = None) -> Iterator[Training]:
    """Begin a training, or go on with one; killed at the end if it lives.

    Args:
        stop_at: it ends when the save of this step was announced.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking where other threads are
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _train(contender, folder, writer, stop_at)
    os.close(writer)
    started = Training(pid, reader)
    try:
        yield started
    finally:
        started.kill()


def finish(contender: Contender, folder: Path) -> Training:
    """Train to the end."""
    with training(contender, folder) as started:
        started.end()
    return started


def import_as(contender: Contender, folder: Path) -> None:
    """Import every module that a whole training imports, so that its forks need not."""
    contender.prepare()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        with os.fdopen(writer, "w") as file:
            try:
                contender.run(folder)
            finally:
                file.write("\n".join(sys.modules))
                file.flush()
                os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        names = file.read().splitlines()
    os.waitpid(pid, 0)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # A few are no modules, or only imported by what replaces them.
            continue


def _train(contender: Contender, folder: Path, output: int, stop_at: int | None) -> None:
    status = 1
    try:
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.environ["FAULTS_STOP_AT"] = str(stop_at or "")
        contender.run(folder)
        task.report_end()
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)
