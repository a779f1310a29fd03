"""`train` without the seconds of a start: each command is a fork of one process that has everything imported already.
So is a program of the tests that trains.

A fork is a process like any other: signals, exit codes, pipes and files are real. What it does not show is what happens
while python starts, which modules are imported when, and another hash seed.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

_READ_AT_THE_START = (
    "PYTHON",
    "LD_",
    "LANG",
    "LC_",
    "OMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "TORCH",
    "HF_",
    "FSSPEC_",
)
"""How the names of environment variables begin that python and libraries read once, when they are loaded."""
_READ_LATER = ("PYTHONPATH", "TORCHINDUCTOR_", "TORCHELASTIC_", "TORCH_NCCL_")
"""Others, which a fork can change. A process that compiles a model sets some for itself; some are those of a group."""


class Server:
    """The process to fork from, for commands with the environment that it was started with or one much like it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._lock = threading.Lock()
        self._control, its = socket.socketpair()
        with its:
            command = [sys.executable, "-P", str(Path(__file__).with_name("warm_server.py")), str(its.fileno())]
            # At its end, which comes with that of this process, nobody reads from it or waits for it. The current
            # folder of a test is removed with the test, and torch._dynamo can't be imported in a folder that is gone.
            self._process = subprocess.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], cwd="/"
            )
        atexit.register(self.close)

    def can_become(self, env: Mapping[str, str]) -> bool:
        """Whether a fork is what a new process with this environment would be."""
        fixed = {
            name
            for name in {**self._env, **env}
            if name.startswith(_READ_AT_THE_START)
            and not name.startswith(_READ_LATER)
            and self._env.get(name) != env.get(name)
        }
        folders = env.get("PYTHONPATH", "").split(":")
        return not fixed and not any(os.path.exists(f"{folder}/sitecustomize.py") for folder in folders)

    def ask(self, request: Mapping[str, Any], streams: Sequence[int], caller: socket.socket) -> None:
        """Have a command started, whose standard streams these are."""
        text = json.dumps(request).encode()
        with self._lock:
            socket.send_fds(self._control, [struct.pack("i", len(text))], [*streams, caller.fileno()])
            self._control.sendall(text)

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.wait()


def umask() -> int:
    """That of this process. To ask the system for it without a file would change it for a moment, for all threads."""
    return int(Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0], 8)


class WarmProcess:
    """A command that was started as a fork, with the parts of `subprocess.Popen` that tests use.

    Args:
        program: the file of a program in place of `train`.
        disk: the arguments of the FaultyDisk that holds its checkpoints; `operations` is the file for what was asked
            of that disk. The config is then composed once for all equal commands.
        composed: for a program that calls `train fit` with these overrides: the config is composed once, too.
        imports: heavy modules that it needs, imported once for all later commands.
    """

    def __init__(
        self,
        server: Server,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
        start_new_session: bool = False,
        program: Path | None = None,
        disk: Mapping[str, Any] | None = None,
        operations: Path | None = None,
        composed: Sequence[str] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.args = [str(program or "train"), *arguments]
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        theirs = []
        for number, (name, stream) in enumerate((("stdin", stdin), ("stdout", stdout), ("stderr", stderr))):
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                ours, its = (write, read) if name == "stdin" else (read, write)
                setattr(self, name, os.fdopen(ours, "w" if name == "stdin" else "r", encoding="utf-8"))
                theirs.append(its)
            elif stream == subprocess.STDOUT:
                theirs.append(os.dup(theirs[1]))
            else:
                theirs.append(os.dup(number if stream is None else stream))
        request = {
            "arguments": list(arguments), "cwd": os.path.abspath(cwd), "env": dict(env), "umask": umask(),
            "new_session": start_new_session, "program": None if program is None else str(program),
            "disk": disk, "operations": str(operations), "imports": list(imports),
            "composed": composed if disk is None else list(arguments[1:]),
        }  # fmt: skip
        self._status, caller = socket.socketpair()
        with caller:
            server.ask(request, theirs, caller)
        for descriptor in theirs:
            os.close(descriptor)
        self.pid = self._number()

    def _number(self) -> int:
        answer = self._status.recv(4)
        assert answer, "the process to fork from has died"
        number: int = struct.unpack("i", answer)[0]
        return number

    def poll(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._number())
            self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one."""
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, cast("float", timeout))
        return cast("int", self.poll())

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it writes until its end."""
        until = time.monotonic() + timeout
        texts: dict[Any, bytes] = {stream: b"" for stream in (self.stdout, self.stderr) if stream is not None}
        with selectors.DefaultSelector() as open_streams:
            for stream in texts:
                open_streams.register(stream, selectors.EVENT_READ)
            while open_streams.get_map():
                ready = open_streams.select(max(0.0, until - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                for key, _ in ready:
                    stream = cast("Any", key.fileobj)
                    if data := stream.buffer.read1(1 << 16):
                        texts[stream] += data
                    else:
                        open_streams.unregister(stream)
        self.wait(max(0.0, until - time.monotonic()))
        out, err = (texts.get(stream, b"").decode().replace("\r\n", "\n") for stream in (self.stdout, self.stderr))
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()
