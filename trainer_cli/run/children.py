"""Child processes: their output, their exit codes, signals for them, and their end with the parent.

Each child's stdin is a pipe whose other end only the parent holds. When the parent ends, by whatever cause, the pipe
closes, and a child that called `stop_with_parent` stops as by SIGTERM: it saves and exits.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import trainer_cli
from trainer_cli.run.run_dir import RunStatus
from trainer_cli.run.signals import stopping

_LOOK_AFTER_S = 0.05
_CHUNK_BYTES = 1 << 16
_DIES_IN_S = 10.0


class Children:
    """The running processes by name. With `prefixed`, each line of their output begins with the name."""

    promise = "the running jobs stop after this step, and no other begins"
    """What happens at a signal, to be said to the user."""

    def __init__(self, *, prefixed: bool) -> None:
        self._prefixed = prefixed
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()

    def __len__(self) -> int:
        return len(self._processes)

    def state(self, name: str) -> str | None:
        """`running`, if it does."""
        return RunStatus.running if name in self._processes else None

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a process in this process group, so that the terminal's Ctrl-C and Ctrl-Z reach it too."""
        output = subprocess.PIPE if self._prefixed else None
        process = subprocess.Popen(command, env=dict(env), stdin=subprocess.PIPE, stdout=output, stderr=output)
        self._processes[name] = process
        for pipe, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, _Lines(name, pipe, sink))

    def wait(self) -> Iterator[tuple[str, int]]:
        """Forward output for a moment; then yield each process that has ended, with its exit code."""
        if self._selector.get_map():
            for key, _ in self._selector.select(_LOOK_AFTER_S):
                if not key.data.forward():
                    self._selector.unregister(key.fileobj)
        else:
            time.sleep(_LOOK_AFTER_S)
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                self._forget(name, process)
                yield name, code

    def signal(self, number: signal.Signals) -> None:
        """Send every process a signal."""
        for process in self._processes.values():
            process.send_signal(number)

    def kill(self) -> None:
        """End every process at once."""
        for name, process in list(self._processes.items()):
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DIES_IN_S)
            self._forget(name, process)

    def _forget(self, name: str, process: subprocess.Popen[bytes]) -> None:
        del self._processes[name]
        for pipe in (process.stdout, process.stderr):
            if pipe is None:
                continue
            if pipe in self._selector.get_map():
                key = self._selector.unregister(pipe)
                key.data.finish()
            pipe.close()
        if process.stdin is not None:
            process.stdin.close()


class _Lines:
    """Whole lines from a pipe to a stream, each with its name in front."""

    def __init__(self, name: str, pipe: IO[bytes], sink: IO[str]) -> None:
        self._prefix = f"[{name}] "
        self._pipe = pipe
        self._sink = sink
        self._rest = b""

    def forward(self) -> bool:
        """Forward what is there; False at the end."""
        chunk = self._read()
        if chunk is not None:
            self._take(chunk)
        return chunk != b""

    def finish(self) -> None:
        """Forward what was written, without waiting: a grandchild may hold the pipe open forever."""
        while chunk := self._read():
            self._take(chunk)
        self._take(b"")

    def _read(self) -> bytes | None:
        """Available bytes; None: nothing yet; empty: end of the pipe."""
        try:
            return os.read(self._pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return None

    def _take(self, chunk: bytes) -> None:
        *lines, rest = (self._rest + chunk).split(b"\n")
        if rest and (not chunk or len(rest) > _CHUNK_BYTES):
            lines.append(rest)
            rest = b""
        self._rest = rest
        if lines:
            text = "".join(f"{self._prefix}{line.decode(errors='replace')}".rstrip() + "\n" for line in lines)
            # If the reader of our output is gone, the jobs continue.
            with contextlib.suppress(OSError):
                self._sink.write(text)
                self._sink.flush()


class Child:
    """One process after another, in a session of its own; while entered, signals are handed on to it."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._wake = threading.Event()
        self._before: dict[int, object] = {}

    @property
    def stopped(self) -> bool:
        """Whether a signal has asked for a stop."""
        return bool(self.received)

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Start it, wait for its end, and return its exit code; negative for a signal."""
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True) as process:
            self._process = process
            if self.stopped:
                process.send_signal(signal.SIGTERM)
            try:
                return process.wait()
            finally:
                self._process = None

    def pause(self, seconds: float) -> bool:
        """Wait; True, at once, if a stop was requested."""
        return self._wake.wait(seconds) or self.stopped

    def _hand_on(self, number: int, frame: object) -> None:
        self.received.append(number)
        self._wake.set()
        if self._process is not None:
            self._process.send_signal(number)

    def __enter__(self) -> Child:
        for number in stopping():
            self._before[number] = signal.signal(number, self._hand_on)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command that starts this program with these arguments."""
    # As with the installed script, the current folder is on the path only if this package is in it.
    root = Path(trainer_cli.__file__).parents[1]
    alone = [] if root == Path.cwd() else ["-P"]
    return [sys.executable, *alone, "-m", "trainer_cli", *arguments]


def stop_with_parent() -> None:
    """Stop this process, as by SIGTERM, when its stdin ends. Nothing else reads stdin from now on."""
    watched = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(watched, 1):
                pass
        # To the main thread, so that a blocking call there is interrupted.
        signal.pthread_kill(main, signal.SIGTERM)

    threading.Thread(target=watch, name="stop-with-parent", daemon=True).start()
