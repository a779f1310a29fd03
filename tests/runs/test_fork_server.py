"""A fork of the server is what a fresh interpreter would be, and where it would not be, there is none."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from trainer_cli.addons.jobs import fork_server
from trainer_cli.addons.jobs.fork_server import Forked, Process, ProcessStarter
from trainer_cli.config import resolvers
from trainer_cli.processes.child import own_command

LIMIT_S = 500.0
PROBE = '''
"""Writes what this process is, and ends it as its name says."""

import json, os, resource, signal, sys, threading

main, name = sys.modules["__main__"], sys.argv[-1].removeprefix("name=")
streams = [sys.stdin, sys.stdout, sys.stderr]
facts = {
    "argv": sys.argv[:-1],
    "orig_argv": sys.orig_argv[:-1],
    "path": sys.path,
    "main": [main.__file__, main.__spec__.name],
    # But for the moment of its start.
    "environment": {key: value for key, value in os.environ.items() if key != "TRAIN_MOMENT"},
    "folder": os.getcwd(),
    "umask": os.umask(0o22),
    "session": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0) if os.getsid(0) != os.getpid() else "of its own",
    "nice": os.nice(0),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "handlers": {number: getattr(signal.getsignal(number), "__name__", str(signal.getsignal(number)))
                 for number in sorted(signal.valid_signals())},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, type(s.buffer).__name__, s.fileno()]
                for s in streams],
    "threads": sorted(thread.name for thread in threading.enumerate()),
}
print(f"out of {name}", flush=True)
print(f"err of {name}", file=sys.stderr)
with open(f"{name}.tmp", "w") as file:
    json.dump(facts, file)
os.rename(f"{name}.tmp", f"{name}.json")
if name.startswith("exit"):
    os._exit(7)
# Until a signal, which ends a training that is not yet on the disk.
signal.pause()
'''
STARTS = """
import os
Starts = print
from subprocess import PIPE
from trainer_cli.addons.jobs.fork_server import ProcessStarter
from trainer_cli.processes.child import own_command

for _ in range(2):
    starter = ProcessStarter()
    probe = ["+callbacks.probe._target_=probe.Probe", "name=exit-inner"]
    command = own_command(["fit", "+experiment=digits_mlp", *probe])
    with starter.start(command, output=PIPE, new_session=True) as process:
        code = process.wait()
    starter.close()
    print(type(process).__name__, code, flush=True)
os._exit(0)
"""
LEAVES = """
import atexit, ctypes, gzip, sys, threading, time, zipfile
Leaves = print
from concurrent.futures import ThreadPoolExecutor

text, binary = open("left", "w"), open("left-bytes", "wb")
text.write("text")
binary.write(b"bytes")
compressed, archive = gzip.open("left.gz", "wt"), zipfile.ZipFile("left.zip", "w")
compressed.write("text")
archive.writestr("name", "text")
# Else they would be closed with this module, which cannot be imported.
sys.left = text, binary, compressed, archive
atexit.register(print, "an exit handler")
ctypes.CDLL(None).printf(b"of C\\n")
idle = ThreadPoolExecutor()
idle.submit(len, "")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
raise ValueError("not so")
"""
FAKE_TORCH = """
import sys, threading, time, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: {initialized})
compat = sys.modules["trainer_cli.torch_compat"] = types.ModuleType("torch_compat")
compat.is_without_devices, compat.import_compiler = lambda: {asked}, dict
if {thread}:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
VERSION = ["--version"]
ENV = dict(os.environ)


def probing(name: str) -> list[str]:
    return own_command(["fit", "+experiment=digits_mlp", "+callbacks.probe._target_=probe.Probe", f"name={name}"])


def wait_for(condition: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.01)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the probe."""
    folder, before = tmp_path_factory.mktemp("project"), Path.cwd()
    (folder / "probe.py").write_text(PROBE)
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def starter(project: Path) -> Iterator[ProcessStarter]:
    """One whose first process has been started."""
    starter = ProcessStarter()
    with starter.start(probing("exit-alone"), ENV, output=PIPE, new_session=True) as process:
        assert isinstance(process, subprocess.Popen)
        assert process.wait(LIMIT_S) == 7
    yield starter
    starter.close()


def output(process: Process) -> tuple[str, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdout.read().decode(), process.stderr.read().decode()


@pytest.mark.parametrize(
    "variables", [{}, {"LOCAL_RANK": "5", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}], ids=["", "of a rank"]
)
def test_a_fork_is_what_a_fresh_interpreter_is(
    project: Path, starter: ProcessStarter, variables: dict[str, str]
) -> None:
    with starter.start(probing("exit-forked"), {**ENV, **variables}, output=PIPE, new_session=True) as process:
        assert isinstance(process, Forked)
        assert output(process) == ("out of exit-forked\n", "err of exit-forked\n")
        assert process.wait(LIMIT_S) == process.poll() == 7
    alone, forked = (json.loads((project / f"exit-{name}.json").read_text()) for name in ("alone", "forked"))
    assert forked == {**alone, "environment": {**alone["environment"], **variables}}


def test_the_store_of_ranks_survives_signals_until_its_launcher_ends(project: Path, starter: ProcessStarter) -> None:
    with starter.start(own_command(["_store"]), ENV, output=PIPE, new_session=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            process.send_signal(number)
        store = TCPStore("127.0.0.1", port, is_master=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            # An address of this machine at which a server that listens to all would answer.
            other.connect(("127.0.0.2", port))
    assert process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9), (signal.SIGALRM, -14)])
def test_a_signal_ends_a_fork_as_it_ends_any_process(
    project: Path, starter: ProcessStarter, number: signal.Signals, code: int
) -> None:
    process = starter.start(probing(f"pause{number}"), ENV, output=PIPE)
    with process:
        try:
            wait_for((project / f"pause{number}.json").exists, "it never ran")
            assert isinstance(process, Forked)
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(LIMIT_S) == code
        finally:
            process.kill()
    facts = json.loads((project / f"pause{number}.json").read_text())
    assert (facts["group"], facts["session"]) == (os.getpgid(0), False)


def test_a_fork_starts_processes_as_forks_of_its_own_server(project: Path, starter: ProcessStarter) -> None:
    (project / "starts.py").write_text(STARTS)
    command = own_command(["fit", "+experiment=digits_mlp", "+callbacks.probe._target_=starts.Starts", "name=outer"])
    with starter.start(command, ENV, output=PIPE, new_session=True) as process:
        assert isinstance(process, Forked)
        said = output(process)
        assert process.wait(LIMIT_S) == 0, said
    assert said[0].split() == ["Forked", "7", "Forked", "7"], said
    inner, variable = json.loads((project / "exit-inner.json").read_text()), fork_server._TIME_VARIABLE
    assert (inner["folder"], variable) == (str(project), resolvers.TIME_VARIABLE)
    # It has ended, and others are forked as before.
    test_nothing_is_left_of_a_fork(project, starter)


def test_a_fork_that_returns_runs_exit_handlers_and_writes_what_is_open(project: Path, starter: ProcessStarter) -> None:
    (project / "leaves.py").write_text(LEAVES)
    command = own_command(["fit", "+experiment=digits_mlp", "+callbacks.probe._target_=leaves.Leaves"])
    with starter.start(command, ENV, output=PIPE, new_session=True) as process:
        assert isinstance(process, Forked)
        said = output(process)
        assert process.wait(LIMIT_S) == 1, said
    assert (project / "left").read_text() == "text"
    assert (project / "left-bytes").read_bytes() == b"bytes"
    assert gzip.decompress((project / "left.gz").read_bytes()) == b"text"
    with zipfile.ZipFile(project / "left.zip") as archive:
        assert archive.read("name") == b"text"
    assert sorted(said[0].splitlines()) == ["a thread", "an exit handler", "of C"]


def test_nothing_is_left_of_a_fork(project: Path, starter: ProcessStarter) -> None:
    with starter.start(own_command(VERSION), ENV, output=PIPE) as process:
        assert process.wait(LIMIT_S) == 0
    assert isinstance(process, Forked)
    wait_for(lambda: not Path(f"/proc/{process.pid}").exists(), "it is a zombie")


@pytest.mark.parametrize(
    ("command", "env", "folder"),
    [
        pytest.param([sys.executable, "-c", ""], {}, ".", id="another program"),
        pytest.param(own_command(VERSION), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ".", id="another environment"),
        pytest.param(own_command(VERSION), {}, "..", id="another folder"),
    ],
)
def test_what_a_fork_cannot_be_is_a_fresh_interpreter(
    project: Path,
    starter: ProcessStarter,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    env: dict[str, str],
    folder: str,
) -> None:
    monkeypatch.chdir(folder)
    with starter.start(command, {**ENV, **env}, output=PIPE) as process:
        assert isinstance(process, subprocess.Popen)
        assert process.wait(LIMIT_S) == 0


def with_torch(folder: Path, *, thread: bool = False, initialized: bool = False, asked: bool = False) -> dict[str, str]:
    """The environment of processes that have another torch already, which takes no time."""
    (folder / "sitecustomize.py").write_text(FAKE_TORCH.format(thread=thread, initialized=initialized, asked=asked))
    return {**ENV, "PYTHONPATH": f"{folder}:{ENV.get('PYTHONPATH', '')}"}


def start_two(starter: ProcessStarter, env: dict[str, str]) -> list[type]:
    """Start two processes to their ends; their types."""
    types = []
    for _ in range(2):
        with starter.start(own_command(VERSION), env, output=PIPE) as process:
            assert process.wait(LIMIT_S) == 0
        types.append(type(process))
    return types


@pytest.mark.parametrize(
    ("unsafe", "TRAIN_FORK", "second"),
    [
        pytest.param({}, "1", Forked, id="safe"),
        pytest.param({"thread": True}, "1", subprocess.Popen, id="a thread"),
        pytest.param({"initialized": True}, "1", subprocess.Popen, id="an initialized device"),
        pytest.param({"asked": True}, "1", subprocess.Popen, id="devices were asked for"),
        pytest.param({}, "0", subprocess.Popen, id="switched off"),
    ],
)
def test_the_second_process_is_a_fork_where_that_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsafe: dict[str, bool], TRAIN_FORK: str, second: type
) -> None:
    monkeypatch.setenv("TRAIN_FORK", TRAIN_FORK)
    starter = ProcessStarter()
    try:
        assert start_two(starter, with_torch(tmp_path, **unsafe)) == [subprocess.Popen, second]
    finally:
        starter.close()


def test_ranks_are_forks_from_the_first_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited, ranks = ProcessStarter(), []
    env = with_torch(tmp_path)
    try:
        start_two(inherited, env)
        for other in ({}, {"OMP_NUM_THREADS": "7"}):
            # As in a fork of that server.
            monkeypatch.setattr(fork_server, "_of_this_fork", inherited._server)
            ranks.append(ProcessStarter(for_ranks=True))
            assert start_two(ranks[-1], {**env, **other}) == [Forked, Forked]
        assert [starter._process is None for starter in ranks] == [True, False]
    finally:
        for starter in (*ranks, inherited):
            starter.close()


PARENT = """
import os, signal, sys, time
from subprocess import PIPE
from trainer_cli.addons.jobs.fork_server import ProcessStarter
from trainer_cli.processes.child import own_command
starter = ProcessStarter()
for _ in range(2):
    starter.start(own_command(["--version"]), output=PIPE).wait()
print(starter._process.pid, flush=True)
if sys.argv[1] == "server":
    # It cannot end before its output, which a pipe does not hold, is read.
    process = starter.start(own_command(["config", "--schema"]), output=PIPE)
    os.kill(starter._process.pid, signal.SIGKILL)
    starter._process.wait()
    size = len(process.stdout.read())
    print(type(process).__name__, size > 1 << 16, process.wait())
    print(type(starter.start(own_command(["--version"]), output=PIPE)).__name__)
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_server_ends_with_the_process_that_was_killed(tmp_path: Path) -> None:
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, "parent"], env=with_torch(tmp_path), capture_output=True, timeout=LIMIT_S
    )
    assert parent.returncode == -signal.SIGKILL
    stat = Path(f"/proc/{int(parent.stdout)}/stat")
    # Who adopts it may be slow to reap it.
    wait_for(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", "it lives on")


def test_without_the_server_forks_tell_how_they_end_and_others_are_started_anew(tmp_path: Path) -> None:
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, "server"], env=with_torch(tmp_path), capture_output=True, timeout=LIMIT_S
    )
    assert (parent.returncode, parent.stdout.split()[1:]) == (0, [b"Forked", b"True", b"0", b"Popen"]), parent.stderr
