"""The process behind `warm`: it has imported everything, and becomes each command that it is asked for by a fork.

A request is JSON on the inherited socket, with four descriptors: the standard streams of the command, and a socket for
its process id and, once it has ended, its wait status.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy

MODULES = (
    "numpy.random", "rich.console", "rich.table", "safetensors.torch", "tomllib", "torch.utils.data",
    "torch.utils.tensorboard", "tensorboard.plugins.hparams.summary_v2", "tensorboard.plugins.mesh.metadata",
    "tensorboard.plugins.graph.metadata", "tensorboard.backend.event_processing.event_file_loader",
    "trainer_cli.callbacks.checkpointer", "trainer_cli.addons.formats.export", "trainer_cli.commands.ckpt",
    "trainer_cli.commands.ckpt_inspect", "trainer_cli.commands.ckpt_remove", "trainer_cli.commands.fit",
    "trainer_cli.addons.view.report", "trainer_cli.running.validation", "trainer_cli.addons.jobs.sweep_jobs",
    "trainer_cli.data.datasets",
    "trainer_cli.loggers.console", "trainer_cli.loggers.tensorboard", "trainer_cli.loggers.tensorboard_files",
    "trainer_cli.models.mlp", "trainer_cli.strategies.strategy", "trainer_cli.running.build",
    "trainer_cli.addons.formats.export_run",
    "trainer_cli.running.fitting", "trainer_cli.running.planning", "trainer_cli.addons.jobs.supervise",
    "trainer_cli.processes.fit",
    "trainer_cli.data.digest", "trainer_cli.trainer.trainer", "trainer_cli.__main__",
    "antlr4.LL1Analyzer", "encodings.ascii", "encodings.cp437", "numpy.ma", "torch.profiler._cupti_monitor",
    "trainer_cli.callbacks.system", "trainer_cli.addons.view.report_at_end", "trainer_cli.addons.view.report",
    "trainer_cli.commands.summary_at_end", "trainer_cli.commands.validate", "trainer_cli.running.checkpoint_size",
    "trainer_cli.running.free_space", "trainer_cli.running.plan_view", "trainer_cli.addons.exact.replay_plan",
    "trainer_cli.optim.warmup", "trainer_cli.running.failed_step", "trainer_cli.running.overview",
    "trainer_cli.running.schedule", "statistics",
)  # fmt: skip
"""What the commands import. No thread may start and no tensor be computed here: a fork would not have the thread."""


class Server:
    """Forks, and reports how each fork ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._callers: dict[int, socket.socket] = {}
        self._ended, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """The request and its streams, in each fork; None in this process, when nobody will ask any more."""
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, 4096)
                self._report()
            if self._control.fileno() in ready:
                request, streams = receive(self._control)
                if request is None:
                    return None
                for module in request["imports"]:
                    importlib.import_module(module)
                if request["composed"] is not None:
                    # In the parent, so that equal commands share it.
                    compose_once(tuple(request["composed"]))
                pid = os.fork()
                if pid == 0:
                    self._leave()
                    os.close(streams.pop())
                    return request, streams
                *streams, caller = streams
                for stream in streams:
                    os.close(stream)
                self._callers[pid] = socket.socket(fileno=caller)
                self._callers[pid].sendall(struct.pack("i", pid))

    def _report(self) -> None:
        """Tell each caller whose command has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # It may no longer wait.
            with self._callers.pop(pid) as caller, contextlib.suppress(BrokenPipeError):
                caller.sendall(struct.pack("i", status))

    def _leave(self) -> None:
        """In a fork: be no server any more."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._ended, self._wakes):
            os.close(descriptor)
        for connection in (self._control, *self._callers.values()):
            connection.close()


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next request and its descriptors; None at the end."""
    head, descriptors, _, _ = socket.recv_fds(control, 4, 4)
    if not head:
        return None, []
    rest = struct.unpack("i", head)[0]
    text = b""
    while len(text) < rest:
        text += control.recv(rest - len(text))
    return json.loads(text), descriptors


OF_ADDONS = {
    "trainer_cli.addon": ("_find_installed", "public_names"),
    "trainer_cli.config.search_path": ("addon_folders",),
    "trainer_cli.components.targets": ("_find_components", "_find_passages", "_find_bases"),
}
"""What remembers the add-ons on `sys.path`."""


def forget_addons() -> None:
    """Forget what the server has found: a command may have others on its path."""
    for module, names in OF_ADDONS.items():
        for name in names:
            getattr(sys.modules[module], name).cache_clear()


def become(request: Mapping[str, Any], streams: list[int], base_path: list[str]) -> int:
    """Be a new process of `python -P -m trainer_cli`, or of `python FILE`, as far as the program can see; returns its
    exit code."""
    if request["new_session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    open_streams()
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    tempfile.tempdir = None
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(":")), *base_path]
    importlib.invalidate_caches()
    forget_addons()
    numpy.random.seed()
    if request["composed"] is not None:
        composed = compose_once(tuple(request["composed"]))
        cast("Any", sys.modules["trainer_cli.processes.fit"]).compose_fit = lambda *_, **__: composed
    if request["program"] is not None:
        sys.argv = [request["program"], *request["arguments"]]
        sys.path.insert(0, os.path.dirname(request["program"]))
        try:
            runpy.run_path(request["program"], run_name="__main__")
        except SystemExit as end:
            # Returned, so that `leave` ends the process. A message is for the interpreter to print.
            if isinstance(end.code, str):
                raise
            return end.code or 0
        return 0
    entry: Any = sys.modules["trainer_cli.__main__"]
    # A process that multiprocessing spawns imports this one by its name.
    sys.modules["__main__"] = entry
    sys.argv = [entry.__file__, *request["arguments"]]
    if request["disk"] is None:
        code: int = entry.main()
        return code
    disk = put_in(request["disk"])
    code = entry.main()
    with open(request["operations"], "w", encoding="utf-8") as file:
        file.writelines(f"{operation}\n" for operation in disk.operations)
    return code


def leave(code: int) -> NoReturn:
    """End as a process does: threads are joined, exit handlers run. Memory that nobody needs is not tidied up, which
    would take longer than all else."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_operators() -> None:
    """Leave the operators that torch registered in Python as they are when a fork ends. To take each back would write
    to most of the memory that forks share, and take longer than all else in a command that reads a file."""
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def open_streams() -> None:
    """Make the standard streams anew: how they are buffered depends on what they are."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, name)
        stream: Any = open(number, mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        if name == "stderr":
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


@cache
def compose_once(overrides: tuple[str, ...]) -> Any:
    """The config of many equal commands: to compose it would take most of their time."""
    from trainer_cli.processes.fit import compose_fit

    return compose_fit(overrides)


def put_in(arguments: Mapping[str, Any]) -> Any:
    """Have one faulty disk under every storage of checkpoints in this process."""
    from faulty_disk import Fault, FaultyDisk

    from trainer_cli.storage import local

    arguments = dict(arguments)
    if "fault" in arguments:
        arguments["fault"] = Fault(arguments["fault"])
    if arguments.pop("one_thread_at_a_time", False):
        take_turns()
    disk = FaultyDisk(**arguments)
    cast("Any", local).Disk = lambda: disk

    class Marks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("committed") and disk.at is None:
                disk.operations.append(record.getMessage())

    logging.getLogger("trainer_cli").addHandler(Marks())
    return disk


def take_turns() -> None:
    """Have the training wait for each job of the writer thread, so that every run asks the same of its disk in the
    same order.

    Where a tensor lies in memory decides by chance how many writes it takes: here none begins at a page.
    """
    from concurrent.futures import wait

    from trainer_cli.checkpoint.writer_thread import WriterThread
    from trainer_cli.storage import folder

    cast("Any", folder)._address_of = lambda view: 1

    submit = WriterThread.submit

    def submit_and_wait(self: WriterThread, job: Any) -> Any:
        done = submit(self, job)
        wait([done])
        return done

    cast("Any", WriterThread).submit = submit_and_wait


if __name__ == "__main__":
    importlib.import_module("torch")
    for _module in MODULES:
        # One that was moved costs each fork some time, and is no reason to fail.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(_module)
    keep_operators()
    # The grammar of overrides is analysed where it is used first: here, for all forks. There are no configs in /.
    _words = [
        "+experiment=digits_mlp",
        "loop.max_duration=1",
        "~scheduler",
        "+callbacks.ema={_target_: trainer_cli.EMA}",
    ]
    importlib.import_module("trainer_cli.config.composing").compose(_words, cwd=Path("/"))
    # Found out once in a process, by thousands of draws of generators made for that.
    importlib.import_module("trainer_cli.data.random_state")._has_known_memory()
    importlib.import_module("trainer_cli.environment").versions()
    _own = os.environ.get("PYTHONPATH", "").split(":")
    _base_path = [folder for folder in sys.path if folder not in _own]
    _asked = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if _asked is not None:
        leave(become(*_asked, _base_path))
