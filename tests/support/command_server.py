"""`train` and `python` for shell scripts in milliseconds: each is a fork of a process that has everything imported.

The server is `python command_server.py FOLDER`; it says `ready` once the scripts `train` and `python` are in FOLDER.
They pass their arguments, directory, environment and standard streams to it, and end with the exit code of the fork.
A fork is killed when its caller ends, by whatever signal; it is sent no other signals.
"""

from __future__ import annotations

import array
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

SHORT = "PAGES_SHORT"
"""The environment variable of overrides for every `train fit`."""
SHARED = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Environment variables of the server that its commands get as they are."""
CLIENT = """
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    asked = json.dumps({"argv": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([asked], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(8) or b"137"))
"""


def serve(folder: Path) -> None:
    """Answer until stdin ends."""
    import torch
    import torch.utils.data
    import torch.utils.tensorboard
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

    import trainer_cli.addons.view.report
    import trainer_cli.callbacks.checkpointer
    import trainer_cli.commands.fit
    import trainer_cli.loggers.tensorboard
    import trainer_cli.running.fitting
    import trainer_cli.running.planning
    import trainer_cli.running.validation
    import trainer_cli.trainer.trainer  # noqa: F401

    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen()
        (folder / "client.py").write_text(CLIENT, encoding="utf-8")
        for name in ("train", "python"):
            script = folder / name
            words = f"'{sys.executable}' -IS '{folder}/client.py' '{folder}/socket' {name}"
            script.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
            script.chmod(0o755)
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            caller, _ = listening.accept()
            with caller:
                asked, streams = _receive(caller)
                if os.fork() == 0:
                    _become(asked, streams, caller, folder)
            for number in streams:
                os.close(number)


def _receive(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    asked, rights, _, _ = caller.recvmsg(1 << 20, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i")
    streams.frombytes(rights[0][2])
    while more := caller.recv(1 << 20):
        asked += more
    return json.loads(asked), list(streams)


def _become(asked: dict[str, Any], streams: list[int], caller: socket.socket, scripts: Path) -> None:
    """Be the command, in this process; tell the caller its exit code."""
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        threading.Thread(target=_die_with, args=(caller,), daemon=True).start()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        os.chdir(asked["cwd"])
        here = {name: os.environ[name] for name in SHARED if name in os.environ}
        os.environ.clear()
        os.environ.update(asked["env"] | here)
        name, *arguments = asked["argv"]
        # What the command starts, as the jobs of a sweep or the processes of a replay, is a fork, too.
        sys.executable = str(scripts / "python")
        code = _train(arguments) if name == "train" else _python(arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        caller.sendall(str(code).encode())
        os._exit(code)


def _die_with(caller: socket.socket) -> None:
    """Wait for the end of the caller, which has closed its sending side already."""
    waiting = select.poll()
    waiting.register(caller, select.POLLHUP)
    waiting.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _train(arguments: list[str]) -> int:
    from trainer_cli.commands.command_line import main

    if arguments[0] == "fit":
        arguments += os.environ.get(SHORT, "").split()
    sys.argv = ["train", *arguments]
    return main(arguments)


def _python(arguments: list[str]) -> int:
    """`python [-P] -m trainer_cli …`, `python -m MODULE …`, `python -P -c PROGRAM`; or `python -c PROGRAM` and `python
    FILE …`, with warnings as errors."""
    if "trainer_cli" in arguments:
        return _train(arguments[arguments.index("trainer_cli") + 1 :])
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        try:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0
    if arguments[0] == "-P":
        del arguments[0]
    else:
        warnings.simplefilter("error")
        sys.path.insert(0, "" if arguments[0] == "-c" else str(Path(arguments[0]).resolve().parent))
    program = arguments[1] if arguments[0] == "-c" else Path(arguments[0]).read_text(encoding="utf-8")
    sys.argv = arguments[1:] if arguments[0] == "-c" else arguments
    # A script may look for files beside itself.
    names = {"__name__": "__main__", "__file__": arguments[0]}
    try:
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]) | names)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
