"""Run the processes of a resume check, and kill those that are left at the end.

On Linux each is forked from one of two interpreters that have imported torch and this package and nothing else, in a
fraction of the time of a start. The two have different hash seeds and take turns, so that a dependence on the order of
sets shows. On other systems each process is a new interpreter.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

_ROOT = Path(__file__).resolve().parents[2]


class Run(Protocol):
    """Runs one process to its end."""

    def __call__(self, plan: Path, output: Path) -> int:
        """The exit code, or minus the signal that killed it; its output goes to the file `output`."""
        ...

    def close(self) -> None:
        """Kill what still runs, data workers included."""
        ...


def processes(cwd: Path) -> Run:
    """The implementation of this system, for a current folder."""
    # On macOS a fork of a process that has loaded its frameworks may not use them.
    return Forked(cwd) if sys.platform == "linux" else Fresh(cwd)


class Forked:
    """Forks of two interpreters, one probe at a time from each."""

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd
        self._servers = [_interpreter("serve()", cwd, pipes=True) for _ in range(2)]
        self._free: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        for server in self._servers:
            self._free.put(server)

    def __call__(self, plan: Path, output: Path, cwd: Path | None = None, imports: Sequence[str] = ()) -> int:
        """`imports`: heavy modules that this process and later ones need, imported once before the fork."""
        server = self._free.get()
        try:
            assert server.stdin is not None
            assert server.stdout is not None
            asked = {"plan": str(plan), "output": str(output), "cwd": str(cwd or self._cwd), "imports": list(imports)}
            output.touch()
            with suppress(BrokenPipeError):
                server.stdin.write(json.dumps(asked).encode() + b"\n")
                server.stdin.flush()
            answer = server.stdout.readline()
            # Without an answer the server was killed.
            return int(answer) if answer else -int(signal.SIGKILL)
        finally:
            self._free.put(server)

    def close(self) -> None:
        for server in self._servers:
            _kill(server)
            for pipe in (server.stdin, server.stdout):
                with suppress(OSError, AttributeError):
                    pipe.close()  # type: ignore[union-attr]


class Fresh:
    """An interpreter for each."""

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, plan: Path, output: Path) -> int:
        with output.open("wb") as file, self._lock:
            if self._closed:
                return -int(signal.SIGKILL)
            process = _interpreter(f"sys.exit(main({str(plan)!r}))", self._cwd, output=file.fileno())
            self._running.add(process)
        code = process.wait()
        self._running.discard(process)
        return code

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in list(self._running):
                _kill(process)


def _interpreter(call: str, cwd: Path, *, pipes: bool = False, output: int | None = None) -> subprocess.Popen[bytes]:
    """An interpreter in its own process group: Ctrl-C does not reach it, and the group can be killed."""
    # Last on the path, so that it shadows nothing.
    program = "from trainer_cli.testing.probe import main, serve"
    script = f"import sys; sys.path.append({str(_ROOT)!r}); {program}; {call}"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        cwd=cwd,
        stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
        stdout=subprocess.PIPE if pipes else output,
        stderr=None if pipes else subprocess.STDOUT,
        process_group=0,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_PREFIX = "train-check-"
_LOCK = "lock"


@contextmanager
def scratch() -> Generator[Path, None, None]:
    """A new folder among those for temporary files, held for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        held = os.open(folder / f"{_LOCK}.part", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Where a filesystem has no locks, no process removes what others left: only what has a lock counts as ours.
            with suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Under its name it is never seen unlocked while this process lives.
                os.rename(folder / f"{_LOCK}.part", folder / _LOCK)
            _clear_what_is_left(folder.parent)
            yield folder
        finally:
            os.close(held)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_what_is_left(parent: Path) -> None:
    """Remove folders of checks of this user that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
