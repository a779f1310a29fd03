"""Run Python commands as forks of a process that has imported torch, for the smallest forms of the tables.

    with warm_python.start():    timing.run() starts nothing: each command is a fork, in its own environment and folder

A fork has torch's threads, imports and allocator of the parent, so nothing that is timed may be run like this.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

_IMPORTED = (
    "torch._dynamo", "trainer_cli.running.fitting", "trainer_cli.trainer.trainer", "trainer_cli.addons.text.gpt",
    "trainer_cli.loggers.console", "trainer_cli.loggers.tensorboard", "trainer_cli.loggers.tensorboard_files",
    "torch.distributed.checkpoint.state_dict_saver", "trainer_cli.config.composing",
    "trainer_cli.processes.fit",
)  # fmt: skip
"""What most commands import."""
_server: subprocess.Popen[str] | None = None


@contextmanager
def start() -> Iterator[None]:
    """While inside, `run` forks."""
    global _server
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as _server:
        try:
            yield
        finally:
            assert _server.stdin is not None
            _server.stdin.close()
            _server = None


def run(command: Sequence[str], env: Mapping[str, str], cwd: str | None) -> subprocess.CompletedProcess[str] | None:
    """What subprocess.run would return; None where the command is not to be run by a fork."""
    if _server is None or command[0] != sys.executable:
        return None
    assert _server.stdin is not None
    assert _server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        request = {"command": list(command[1:]), "env": dict(env), "cwd": cwd or os.getcwd(), "outputs": outputs}
        _server.stdin.write(json.dumps(request) + "\n")
        _server.stdin.flush()
        code = int(_server.stdout.readline())
        stdout, stderr = (Path(output).read_text() for output in outputs)
    return subprocess.CompletedProcess(list(command), code, stdout, stderr)


def serve() -> None:
    """Fork for each line of stdin, and answer with the exit code."""
    for module in _IMPORTED:
        import_module(module)
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(**request)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(command: list[str], env: dict[str, str], cwd: str, outputs: list[str]) -> NoReturn:
    """Take the streams, the environment and the folder, run the code, and end."""
    for descriptor, path in enumerate(("/dev/null", *outputs)):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    code: object = 0
    try:
        _execute(command)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the end of the interpreter: freeing what was imported copies all of its memory, for a second.
    os._exit(code if isinstance(code, int) else 1)


def _execute(command: list[str]) -> None:
    if command[0] == "-c":
        sys.argv = command
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    elif command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    serve()
