"""Start processes of this program without the seconds in which each would import torch.

    first process:    a fresh interpreter; one process alone gains nothing from a server
    second process:   the server is started: a fresh interpreter that imports torch and this program, no code of a user
    each from then:   the server forks; the fork sets its streams, arguments and signals, and becomes the command

Ranks are several from the start: the first, too, is a fork, of a server that has imported more.

A fork that starts processes, as a job of a sweep with `restarts.max` does, asks the server that it came from.

A fork has the environment and the working folder with which the server was started, and what those decide while
libraries are loaded; a process that needs others is a fresh interpreter. So is every process where a fork is not safe:
outside Linux, in a server with more than one thread, which a fork would lose, or with an initialised device. The
environment variable `TRAIN_FORK=0` has the same effect.

The server reports how a fork ended to the process that asked for it, and ends when that process is gone.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module, invalidate_caches
from typing import IO, Any, NamedTuple

from trainer_cli.processes import own_command
from trainer_cli.ranks import LAUNCHED, ON_NCCL_ERROR
from trainer_cli.signals import STOPPING, exit_early
from trainer_cli.source_view import VIEW_VARIABLE

log = logging.getLogger(__name__)

SERVER = "_fork_server"
"""The verb of the server, whose argument is the descriptor of its socket."""
_FOR_RANKS = "for-ranks"
"""A second argument of the server, which then imports what ranks use."""
_IMPORTED = (
    "trainer_cli.processes.fit", "trainer_cli.running.fitting", "trainer_cli.data.datasets",
    "trainer_cli.data.digest", "trainer_cli.loggers.console", "trainer_cli.loggers.tensorboard",
    "trainer_cli.loggers.tensorboard_files",
    "trainer_cli.models.mlp", "numpy.random",
)  # fmt: skip
"""What most trainings import besides torch."""
_TIME_VARIABLE = "TRAIN_MOMENT"
"""`TIME_VARIABLE` of config/resolvers.py, which would import Hydra."""
_VARIABLES = (_TIME_VARIABLE, *LAUNCHED, ON_NCCL_ERROR, VIEW_VARIABLE, "CUDA_VISIBLE_DEVICES")
"""Environment variables that may differ between a server and its forks: no library reads them when it is imported.
CUDA does at its start, which a server refuses."""
_REQUEST_BYTES = 1 << 17
_NUMBER = struct.Struct("i")


class _Inherited(NamedTuple):
    """A server that is running, and the environment and the working folder with which it was started."""

    control: socket.socket
    env: dict[str, str]
    folder: str

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether its forks have this environment, and the folder of this process."""
        return (_fixed(self.env), self.folder) == (_fixed(env), os.getcwd())


_of_this_fork: _Inherited | None = None
"""The server of which this process is a fork."""


class Forked:
    """A process that a fork server has started, with the parts of `subprocess.Popen` that its callers use."""

    def __init__(
        self, pid: int, report: socket.socket, stdin: IO[bytes], stdout: IO[bytes] | None, stderr: IO[bytes] | None
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._report = report

    def fileno(self) -> int:
        """The descriptor that can be read once the process has ended."""
        return self._report.fileno()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit code; negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the process still runs.
        """
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._report, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            code = self._report.recv(_NUMBER.size)
            # The process holds the other end of the socket as well, and sends the code itself if the server is gone,
            # unless it was killed.
            self.returncode = _NUMBER.unpack(code)[0] if code else -signal.SIGKILL
            # Only now may the server reap it: until the code is known here, no other process gets the number.
            self._report.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


Process = subprocess.Popen[bytes] | Forked


class ProcessStarter:
    """Starts processes: this program by a fork server from the second on, and any other as a fresh interpreter.

    Args:
        for_ranks: whether it starts the ranks of a run. They are forks from the first on, if need be of a server of
            their own, which imports what ranks use.
    """

    def __init__(self, *, for_ranks: bool = False) -> None:
        self._for_ranks = for_ranks
        self._started_one = for_ranks or _of_this_fork is not None
        self._process: subprocess.Popen[bytes] | None = None
        """That of the server, unless this process is a fork of it."""
        self._server = _of_this_fork

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        output: int | None = None,
        new_session: bool = False,
    ) -> Process:
        """Start a process whose stdin is a pipe.

        Args:
            env: its environment; None: that of this process.
            output: the descriptor to which its output goes, or `subprocess.PIPE`; None: where that of this process
                goes.
            new_session: whether it is in a session of its own, or in this process group.
        """
        whole_env = dict(os.environ if env is None else env)
        process = self._fork(command, whole_env, output=output, new_session=new_session)
        if process is not None:
            return process
        return subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=new_session
        )

    def close(self) -> None:
        """End the server that this has started. What came from it runs on."""
        if self._process is not None and self._server is not None:
            self._server.control.close()
            self._process.wait()
        self._process = self._server = None

    def _fork(
        self, command: Sequence[str], env: dict[str, str], *, output: int | None, new_session: bool
    ) -> Forked | None:
        """A fork that runs the command; None if it needs a fresh interpreter."""
        if os.environ.get("TRAIN_FORK") == "0" or sys.platform != "linux":
            return None
        try:
            program = own_command([])
            if list(command[: len(program)]) != program:
                return None
            if not self._started_one:
                self._started_one = True
                return None
            # Ranks have their own server if the one that this process came from has another environment.
            if self._server is None or (self._for_ranks and self._process is None and not self._server.fits(env)):
                self._start_server(env)
            server = self._server
            if server is not None and server.fits(env):
                arguments = command[len(program) :]
                process = _ask(server.control, arguments, env, output=output, new_session=new_session)
                if process is not None:
                    return process
            why = "a fork is not safe, or the environment or the folder is another"
        except OSError as error:
            # What prevents a fresh interpreter as well is reported when that is started.
            why = str(error)
        log.debug("a fresh interpreter is started: %s", why)
        return None

    def _start_server(self, env: dict[str, str]) -> None:
        """Start a server with this environment, which this process asks for forks from then on."""
        # Packets: a request is read whole or not at all.
        control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Blocked in the server from its first instruction: Ctrl-C reaches it too, and the jobs save in their own time.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            with server_end:
                self._process = subprocess.Popen(
                    own_command([SERVER, str(server_end.fileno()), *([_FOR_RANKS] if self._for_ranks else [])]),
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[server_end.fileno()],
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._server = _Inherited(control, env, os.getcwd())


def _fixed(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that is the same in a server and its forks."""
    return {name: value for name, value in env.items() if name not in _VARIABLES}


def _ask(
    control: socket.socket, arguments: Sequence[str], env: Mapping[str, str], *, output: int | None, new_session: bool
) -> Forked | None:
    """Have the server start a process; None if it refuses. `output` is as in `subprocess.Popen`."""
    request = {
        "arguments": list(arguments),
        "variables": {name: env[name] for name in _VARIABLES if name in env},
        "new_session": new_session,
        # Those that are blocked in this process: a fresh interpreter would inherit them.
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    with contextlib.ExitStack() as server_ends, contextlib.ExitStack() as parent_ends:
        pipes: list[IO[bytes]] = []
        streams: list[int] = []
        for mode in ("wb", "rb", "rb") if output == subprocess.PIPE else ("wb",):
            read, write = os.pipe()
            parent_end, fork_end = (write, read) if mode == "wb" else (read, write)
            pipes.append(parent_ends.enter_context(os.fdopen(parent_end, mode, buffering=0)))
            server_ends.callback(os.close, fork_end)
            streams.append(fork_end)
        if output != subprocess.PIPE:
            streams += [1, 2] if output is None else [output, output]
        report, server_report = socket.socketpair()
        parent_ends.enter_context(report)
        server_ends.enter_context(server_report)
        socket.send_fds(control, [json.dumps(request).encode()], [*streams, server_report.fileno()])
        # A server that ends closes its copies: with a copy here, this process would wait for ever.
        server_ends.close()
        pid = report.recv(_NUMBER.size)
        if not pid:
            return None
        parent_ends.pop_all()
        stdout, stderr = pipes[1:] or (None, None)
        return Forked(_NUMBER.unpack(pid)[0], report, pipes[0], stdout, stderr)


def serve_forks(arguments: Sequence[str]) -> tuple[int, int]:
    """Be the server with these arguments. Returns in each fork, which has become a process with the arguments that were
    asked for.

    Returns:
        the descriptor of the fork's report, by which the server sends its exit code, and the server's process number.
    """
    global _of_this_fork
    from trainer_cli.running import import_torch

    control = socket.socket(fileno=int(arguments[0]))
    try:
        # As a training does it, with the settings that torch reads at its import.
        import_torch()
    except Exception:
        # A fresh interpreter reports it.
        os._exit(1)
    for name in _IMPORTED:
        # One that fails does so again in the training that needs it, which reports it.
        with contextlib.suppress(Exception):
            import_module(name)
    torch_compat = import_module("trainer_cli.torch_compat")
    if _FOR_RANKS in arguments:
        with contextlib.suppress(Exception):
            torch_compat.import_compiler()
    # numpy's OpenBLAS has threads that it ends before a fork and starts again when it computes: so none is left.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # In a child, since the question may start the devices.
        if (child := os.fork()) == 0:
            os._exit(int(torch_compat.is_without_devices()))
    if os.waitpid(child, 0)[1]:
        # A library has asked for the devices when it was imported.
        os._exit(1)
    # A collection in a fork would write to every object, and so copy the memory that the forks share.
    gc.collect()
    gc.freeze()
    server = os.getpid()
    request, streams, report, own_control = _Server(control).serve()
    # Held until the end of this process, see `Forked.wait`.
    descriptor = report.detach()
    os.set_inheritable(descriptor, False)
    _become(request, streams)
    _of_this_fork = _Inherited(own_control, dict(os.environ), os.getcwd())
    return descriptor, server


class _Server:
    """Forks, and reports how each fork ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._forks: set[socket.socket] = set()
        """The connections to the forks, which may ask as well."""
        self._running: dict[int, socket.socket] = {}
        self._ended, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        self._on_child = signal.signal(signal.SIGCHLD, lambda *_: None)
        # The handler alone would not end the wait below: Python resumes it.
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], list[int], socket.socket, socket.socket]:
        """Answer requests. Returns in each fork: its request, its standard streams, the socket of its report, and its
        connection to this server."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._ended:
                    os.read(self._ended, 4096)
                    self._report()
                elif key.data is not None:
                    self._reap(key.data)
                else:
                    control: Any = key.fileobj
                    request, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 4)
                    if not request:
                        self._forget(control)
                        continue
                    *streams, number = descriptors
                    report = socket.socket(fileno=number)
                    own_control = self._fork(report)
                    if own_control is not None:
                        return json.loads(request), streams, report, own_control
                    for stream in streams:
                        os.close(stream)

    def _forget(self, control: socket.socket) -> None:
        """A process that could ask is gone. Without the one that started this server, this server is gone too."""
        if control is self._control:
            # Its children see that by the end of their stdin.
            os._exit(0)
        self._selector.unregister(control)
        self._forks.remove(control)
        control.close()

    def _fork(self, report: socket.socket) -> socket.socket | None:
        """Fork, and send the number of the process. In the fork: its connection to this server.

        Closes the socket of the report instead if it may not fork.
        """
        child_end, parent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork() if _may_fork() else None
        except OSError:
            pid = None
        if pid == 0:
            parent_end.close()
            self._leave()
            return child_end
        child_end.close()
        if pid is None:
            parent_end.close()
            report.close()
            return None
        self._forks.add(parent_end)
        self._selector.register(parent_end, selectors.EVENT_READ)
        self._running[pid] = report
        with contextlib.suppress(OSError):
            report.send(_NUMBER.pack(pid))
        return None

    def _report(self) -> None:
        """Send the exit code of each process that has ended to who asked for it."""
        for pid, report in self._running.items():
            if report in self._selector.get_map():
                continue
            # WNOWAIT: it is not reaped, so that no other process gets its number before the code is read.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(OSError):
                report.send(_NUMBER.pack(code))
            self._selector.register(report, selectors.EVENT_READ, pid)

    def _reap(self, pid: int) -> None:
        """Forget a process whose exit code was read."""
        os.waitpid(pid, 0)
        report = self._running.pop(pid)
        self._selector.unregister(report)
        report.close()

    def _leave(self) -> None:
        """In a fork: be no server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._on_child)
        self._selector.close()
        for descriptor in (self._ended, self._wakes):
            os.close(descriptor)
        for connection in (self._control, *self._forks, *self._running.values()):
            connection.close()


def _may_fork() -> bool:
    """Whether a fork of this process has all that it has: a thread would be missing, and a device would not work."""
    torch = sys.modules["torch"]
    return len(os.listdir("/proc/self/task")) == 1 and not torch.cuda.is_initialized()


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Be, as far as the command can see, a process that was started with these arguments."""
    if request["new_session"]:
        os.setsid()
    for number, (name, stream) in enumerate(zip(("stdin", "stdout", "stderr"), streams, strict=True)):
        os.dup2(stream, number)
        os.close(stream)
        opened = _open_like(getattr(sys, name), number)
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    for variable in _VARIABLES:
        os.environ.pop(variable, None)
    os.environ.update(request["variables"])
    arguments = request["arguments"]
    # Without the arguments of the server.
    sys.orig_argv[1 - len(sys.argv) :] = arguments
    sys.argv[1:] = arguments
    # Files of the project may be newer than what the server has listed of their folder.
    invalidate_caches()
    if "numpy.random" in sys.modules:
        # Python's own generator does this by itself. torch's has the same seed in every process.
        sys.modules["numpy.random"].seed()
    # Before the signals that came since the fork are let in.
    exit_early()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _open_like(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    """Open a descriptor as Python opens a standard stream when it starts: the buffer depends on what it is."""
    mode, unbuffered = ("rb", -1) if number == 0 else ("wb", 0 if stream.write_through else -1)
    raw: Any = open(number, mode, buffering=unbuffered, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        raw,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=not stream.write_through and (number == 2 or raw.isatty()),
        write_through=stream.write_through,
    )
