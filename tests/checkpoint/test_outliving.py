"""The writer process: what was handed over is written, whoever dies, and what fails is told as if it failed here."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from states import same, small_state
from test_asynchronous import Net, contents, proven

from trainer_cli.checkpoint.asynchronous import AsyncCheckpointer, outliving_writer
from trainer_cli.checkpoint.checkpointer import SyncCheckpointer
from trainer_cli.checkpoint.format.memory import Memory
from trainer_cli.checkpoint.naming import Hidden, HiddenName
from trainer_cli.checkpoint.process import carrier
from trainer_cli.checkpoint.process.carrier import Carrier
from trainer_cli.checkpoint.process.outliving import Outliving, WriterProcess
from trainer_cli.checkpoint.storage import disk as disk_module
from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.storage.port import Storage
from trainer_cli.errors import SaveError

pytestmark = pytest.mark.skipif(not Outliving.is_offered(), reason="this system shares no memory without a name")
RUN = "ours"


class SmallBlocks(Disk):
    """On which files of 64 KiB are large already: written past the page cache, from the memory that is shared."""

    block_bytes = 64 * 1024


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[AsyncCheckpointer]:
    made = AsyncCheckpointer(
        process=outliving_writer(), storage=lambda root: LocalStorage(root, run_id=RUN, disk=SmallBlocks())
    )
    yield made
    made.close()


def process_of(checkpointer: AsyncCheckpointer) -> WriterProcess:
    found = checkpointer.process.carrier
    assert isinstance(found, WriterProcess)
    return found


def carried(checkpointer: AsyncCheckpointer, root: Path) -> Storage:
    return checkpointer.storage(root).carried_by(process_of(checkpointer))


def ended(pid: int, timeout_s: float = 30) -> bool:
    """Whether a process comes to its end in time."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_its_files_are_byte_for_byte_those_of_the_other_savers(writing: AsyncCheckpointer, tmp_path: Path) -> None:
    net = Net()
    proven(writing, net, tmp_path / "process")
    for step in (1, 2):
        saving = writing.save({**net.state, **small_state()}, tmp_path / "process" / f"step{step}", late=net.late)
        here = AsyncCheckpointer()
        here.save({**net.state, **small_state()}, tmp_path / "thread" / f"step{step}").written.result(30)
        here.close()
        SyncCheckpointer().save({**net.state, **small_state()}, tmp_path / "here" / f"step{step}")
        writing.gate()
        saving.written.result(30)
        net.step()
        of_process, of_thread, of_here = (
            {
                name: content
                for name, content in contents(tmp_path / kind / f"step{step}").items()
                if "manifest" not in name
            }
            for kind in ("process", "thread", "here")
        )
        assert of_process == of_thread == of_here
    assert process_of(writing).pid not in (None, os.getpid())


@pytest.mark.parametrize("size", [0, 100, 4096, SmallBlocks.block_bytes - 1, 2 * SmallBlocks.block_bytes + 4097])
def test_a_file_of_any_size_that_lies_in_no_shared_memory_arrives_whole(
    writing: AsyncCheckpointer, tmp_path: Path, size: int
) -> None:
    content = os.urandom(size)
    with carried(writing, tmp_path).writing("step1") as folder:
        for name, data in (("big", content), ("manifest.json", b"{}")):
            with folder.create(name) as sink:
                sink.write(data)
    assert (tmp_path / "step1" / "big").read_bytes() == content


def test_more_than_can_be_on_its_way_at_once_arrives_whole(writing: AsyncCheckpointer, tmp_path: Path) -> None:
    piece = os.urandom(1 << 24)
    with carried(writing, tmp_path).writing("step1") as folder:
        with folder.create("big") as sink:
            for _ in range(10):
                sink.write(piece)
        with folder.create("manifest.json") as sink:
            sink.write(b"{}")
    assert (tmp_path / "step1" / "big").read_bytes() == piece * 10


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from trainer_cli.checkpoint.asynchronous import AsyncCheckpointer, outliving_writer
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.storage.port import Storage

root, most = Path(sys.argv[1]), int(sys.argv[2])


def die_after(count):
    # A training that is killed after so many packets to its writer.
    checkpointer = AsyncCheckpointer(process=outliving_writer(), storage=lambda root: LocalStorage(root, run_id="ours"))
    carrier, sent = checkpointer.process.carrier, [0]
    send = carrier.send

    def counted(*args, **kwargs):
        send(*args, **kwargs)
        sent[0] += 1
        if sent[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)

    carrier.send = counted
    checkpointer.save({"model": {"w": torch.arange(300_000.0)}}, root / f"step{count}").written.result()
    print(count, sent[0])
    os._exit(0)


for count in range(1, most):
    child = os.fork()
    if child == 0:
        die_after(count)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_a_kill_after_any_packet_leaves_a_whole_checkpoint_or_none_and_once_all_is_sent_a_whole_one(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "100"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    survived, packets = map(int, done.stdout.split())
    assert 10 < packets < survived < 100
    storage = LocalStorage(tmp_path, run_id=RUN)
    assert storage.await_writers(60)
    loader = SyncCheckpointer()
    names = storage.names()
    for name in names:
        assert same(loader.load(tmp_path / name)["model"]["w"][-1].item(), 299_999.0)
    # The last packets are the name, the folder's rest, the question what became of it, and to let go.
    assert {f"step{count}" for count in range(packets - 2, packets + 1)} <= set(names)
    assert "step5" not in names
    swept = storage.sweep()
    assert swept
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


class Kills:
    """Kills the writer when an operation is about to be sent for the first time, having stopped it before."""

    def __init__(self, process: WriterProcess, operation: str, *, dead_already: bool) -> None:
        self.process, self.operation, self.dead_already = process, operation, dead_already
        self.killed: int | None = None
        self.send = process.send
        process.send = self  # type: ignore[method-assign]

    def __call__(self, operation: str, *about: object, files: tuple[int, ...] = ()) -> None:
        if operation == self.operation and self.killed is None:
            pid = self.killed = self.process.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            if self.dead_already:
                assert ended(pid)
        self.send(operation, *about, files=files)


@pytest.mark.parametrize("dead_already", [True, False])
@pytest.mark.parametrize("operation", ["begin", "open", "write", "copy", "close", "rename", "end"])
def test_a_writer_that_is_killed_costs_no_save_and_the_next_one_has_another(
    writing: AsyncCheckpointer, tmp_path: Path, operation: str, dead_already: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.arange(300_000.0)}
    writing.save(state, tmp_path / "step1").written.result(30)
    before = open_files()
    process = process_of(writing)
    kills = Kills(process, operation, dead_already=dead_already)
    with caplog.at_level(logging.WARNING):
        writing.save(state, tmp_path / "step2").written.result(30)
    assert kills.killed is not None
    if dead_already:
        assert "the writer process died (killed by signal 9); the training itself writes this checkpoint" in caplog.text
    writing.save(state, tmp_path / "step3").written.result(30)
    assert process.pid not in (None, kills.killed)
    gc.collect()
    assert open_files() <= before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1", "step2", "step3"]
    for step in (1, 2, 3):
        writing.verify(tmp_path / f"step{step}")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("how", ["no program", "it fails", "no memory to share"])
def test_where_no_process_can_be_had_the_training_writes_and_says_so_once(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "no program":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    elif how == "it fails":
        monkeypatch.setattr(carrier, "__file__", str(tmp_path / "nothing.py"))
    else:
        monkeypatch.setattr(os, "memfd_create", refuse)
    checkpointer = AsyncCheckpointer(process=outliving_writer())
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            checkpointer.save(small_state(), tmp_path / f"step{step}").written.result(30)
            checkpointer.verify(tmp_path / f"step{step}")
    checkpointer.close()
    told = 0 if how == "no memory to share" else 1
    assert caplog.text.count("since no process for that can be had") == told
    assert process_of(checkpointer).pid is None


def refuse(*_: object) -> int:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_question_that_was_broken_off_leaves_no_answer_to_a_later_one(
    writing: AsyncCheckpointer, tmp_path: Path
) -> None:
    process = process_of(writing)
    writing.save(small_state(), tmp_path / "step1").written.result(30)

    class Interrupted:
        """A socket whose first answer is waited for in vain: Ctrl-C comes before."""

        def __init__(self, channel: socket.socket) -> None:
            self.channel = channel

        def __getattr__(self, name: str) -> object:
            return getattr(self.channel, name)

        def recv(self, size: int) -> bytes:
            raise KeyboardInterrupt

    process.begin()
    assert process._channel is not None
    process._channel = Interrupted(process._channel)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        process.end()
    process.begin()
    process.send("rename", str(tmp_path / "none"), str(tmp_path / "other"))
    with pytest.raises(FileNotFoundError):
        process.end()


class Hangs(LocalStorage):
    """Comes to nothing before it is let."""

    let = threading.Event()

    @contextmanager
    def writing(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        assert self.let.wait(60)
        with super().writing(*args, **kwargs) as folder:
            yield folder


def test_the_gate_copies_by_itself_what_a_disk_that_hangs_keeps_the_writer_from(tmp_path: Path) -> None:
    net = Net()
    writing = AsyncCheckpointer(process=outliving_writer(), storage=lambda root: Hangs(root, run_id=RUN))
    Hangs.let.set()
    proven(writing, net, tmp_path)
    Hangs.let.clear()
    reference = {name: one.clone() for name, one in net.model.state_dict().items()}
    saving = writing.save(net.state, tmp_path / "step1", late=net.late)
    assert not writing.gate()
    assert saving.staged.done()
    assert not saving.written.done()
    net.step()
    Hangs.let.set()
    saving.written.result(60)
    assert same(dict(writing.load(tmp_path / "step1")["model"]), reference)
    writing.close()


def test_two_folders_share_one_writer(writing: AsyncCheckpointer, tmp_path: Path) -> None:
    state = {"w": torch.arange(300_000.0)}
    for step in range(3):
        for folder in ("a", "b"):
            writing.save({**state, "step": step}, tmp_path / folder / f"step{step}").written.result(30)
    for folder in ("a", "b"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == ["step0", "step1", "step2"]
        assert dict(writing.load(tmp_path / folder / "step2"))["step"] == 2


def test_what_the_system_refuses_it_is_told_here_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    checkpointer = AsyncCheckpointer(process=outliving_writer())
    try:
        # The process is started under the limit, and keeps it.
        checkpointer.save({"few": 1}, tmp_path / "step1").written.result(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    failure = checkpointer.save({"w": torch.zeros(5 << 20)}, tmp_path / "step2").written.exception(30)
    assert isinstance(failure, SaveError)
    assert isinstance(failure.__cause__, OSError)
    assert failure.__cause__.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["step1"]
    checkpointer.save({"few": 3}, tmp_path / "step3").written.result(30)
    checkpointer.close()


def test_a_larger_state_is_written_from_its_new_memory(writing: AsyncCheckpointer, tmp_path: Path) -> None:
    for step, size in enumerate((10, 100_000, 10, 5_000_000)):
        state = {"w": torch.arange(float(size)), "size": size}
        writing.save(state, tmp_path / f"step{step}").written.result(30)
        assert same(dict(SyncCheckpointer().load(tmp_path / f"step{step}")), state)


def held(storage_root: Path, run_id: str) -> tuple[Path, int]:
    """A checkpoint that somebody else still writes: its folder, and the descriptor that holds it."""
    staging = storage_root / str(HiddenName(Hidden.tmp, "step5", run_id, 1))
    staging.mkdir()
    descriptor = os.open(staging, os.O_RDONLY)
    assert Disk().lock(descriptor, exclusive=True)
    return staging, descriptor


def test_a_start_takes_nothing_away_that_is_still_written_and_sweeps_it_afterwards(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, run_id=RUN, attempt=2)
    staging, descriptor = held(tmp_path, RUN)
    assert storage.sweep() == []
    assert staging.is_dir()
    os.close(descriptor)
    assert storage.await_writers(0.1)
    assert storage.sweep() == [staging.name]


def test_what_comes_too_late_will_be_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It could win against what the run does meanwhile, such as going back to an older step."""
    storage = LocalStorage(tmp_path, run_id=RUN, attempt=2)
    staging, descriptor = held(tmp_path, RUN)
    assert not storage.await_writers(0.1)
    assert "comes too late, and will be no checkpoint" in caplog.text
    with pytest.raises(FileNotFoundError):
        staging.rename(tmp_path / "step5")
    assert storage.await_writers(0.1)
    os.close(descriptor)
    assert len(storage.sweep()) == 1
    assert list(tmp_path.iterdir()) == []


def test_others_are_waited_for_where_it_is_not_known_whose_run_it_is_but_never_disowned(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, run_id=RUN)
    staging, descriptor = held(tmp_path, "others")
    assert storage.await_writers(0.1)
    assert not storage.await_writers(0.1, anybody=True)
    assert staging.is_dir()
    os.close(descriptor)
    assert storage.await_writers(0.1, anybody=True)


def test_a_worker_forked_while_the_process_starts_holds_no_end_of_its_socket(tmp_path: Path) -> None:
    program = """
import os, subprocess, sys, threading, time
from pathlib import Path
from trainer_cli.checkpoint.asynchronous import AsyncCheckpointer, outliving_writer
real, starting = subprocess.Popen.__init__, threading.Event()

def slow(*args, **kwargs):
    starting.set()
    time.sleep(0.3)
    real(*args, **kwargs)
    time.sleep(0.3)

subprocess.Popen.__init__ = slow
checkpointer = AsyncCheckpointer(process=outliving_writer())
saving = checkpointer.save({"a": 1}, Path(sys.argv[1]) / "step1")
assert starting.wait(30)
worker = os.fork()
if worker == 0:
    os.closerange(0, 3)
    time.sleep(60)
    os._exit(0)
saving.written.result()
print(checkpointer.process.carrier.pid, worker, flush=True)
os._exit(0)
"""
    outlived_by_a_worker(program, tmp_path)


def outlived_by_a_worker(program: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    writer, worker = map(int, done.stdout.split())
    try:
        assert ended(writer), "the writer process outlives the training without work"
        assert not ended(worker, 0.01)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_it_ends_with_the_training_though_a_forked_worker_lives_on(tmp_path: Path) -> None:
    program = """
import os, sys, time
from pathlib import Path
from trainer_cli.checkpoint.asynchronous import AsyncCheckpointer, outliving_writer
checkpointer = AsyncCheckpointer(process=outliving_writer())
checkpointer.save({"a": 1}, Path(sys.argv[1]) / "step1").written.result()
worker = os.fork()
if worker == 0:
    os.closerange(0, 3)
    time.sleep(60)
    os._exit(0)
print(checkpointer.process.carrier.pid, worker, flush=True)
os._exit(0)
"""
    outlived_by_a_worker(program, tmp_path)


def test_it_is_of_the_standard_library_alone_and_takes_no_signal_of_the_training(
    writing: AsyncCheckpointer, tmp_path: Path
) -> None:
    writing.save(small_state(), tmp_path / "step1").written.result(30)
    pid = process_of(writing).pid
    assert pid is not None
    loaded = Path(f"/proc/{pid}/maps").read_text()
    assert "site-packages" not in loaded
    assert "torch" not in loaded
    assert os.getsid(pid) == pid
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, one)
    writing.save(small_state(), tmp_path / "step2").written.result(30)
    assert process_of(writing).pid == pid
    writing.close()
    assert ended(pid)


def test_memory_that_nobody_closed_goes_with_whoever_had_it() -> None:
    gc.collect()
    before = open_files()
    memory = Memory(1 << 20, shared=True)
    assert open_files() == before + 1
    del memory
    assert open_files() == before


def test_close_lets_it_end_and_a_later_save_starts_another(tmp_path: Path) -> None:
    checkpointer = AsyncCheckpointer(process=outliving_writer())
    checkpointer.save(small_state(), tmp_path / "step1").written.result(30)
    first = process_of(checkpointer).pid
    assert first is not None
    checkpointer.close()
    assert ended(first)
    checkpointer.save(small_state(), tmp_path / "step2").written.result(30)
    checkpointer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1", "step2"]


class Refusing(Disk):
    """Takes a first block past the page cache, then no more that way; or less than a page at the end."""

    def __init__(self, refuse: Callable[[int], int | OSError]) -> None:
        self.refuse = refuse
        self.calls = 0

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.calls += 1
        answer = self.refuse(self.calls)
        if isinstance(answer, OSError):
            raise answer
        return super().write(fd, data[:answer] if answer else data, offset)


@pytest.mark.parametrize(
    ("refuse", "told"),
    [
        (lambda call: OSError(errno.EINVAL, "Invalid argument") if call == 2 else 1 << 20, None),
        (lambda call: 5000 if call == 1 else 0, None),
        (lambda call: OSError(errno.ENOSPC, "No space left on device") if call == 2 else 1 << 20, errno.ENOSPC),
        (lambda call: -1, errno.EIO),
    ],
    ids=["refused", "torn", "full", "nothing"],
)
def test_where_a_disk_takes_no_more_past_the_cache_the_rest_goes_through_it(
    tmp_path: Path, refuse: Callable[[int], int | OSError], told: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Refusing(refuse)
    if told == errno.EIO:
        monkeypatch.setattr(disk, "write", lambda fd, data, offset: 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = Carrier(theirs, disk)
    content = os.urandom(3 << 20)
    memory = os.memfd_create("test")
    os.write(memory, content)
    file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)

    def send(*packet: object, files: tuple[int, ...] = ()) -> None:
        socket.send_fds(ours, [json.dumps(packet).encode()], list(files))
        assert program.next()

    with ours, theirs:
        send("begin")
        send("share", files=(memory,))
        send("open", 7, files=(file,))
        send("write", 7, 0, 0, len(content))
        send("fsync", 7)
        send("end")
        answer = json.loads(ours.recv(1 << 16))
        send("begin")
    os.close(file)
    os.close(memory)
    if told is None:
        assert answer == []
        assert (tmp_path / "file").read_bytes() == content
    else:
        assert answer[0] == told


def test_after_a_failure_nothing_is_tried_until_all_begins_anew(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = Carrier(theirs, Disk())
    (tmp_path / "a").mkdir()
    with ours, theirs:
        for packet in (
            ["begin"],
            ["share"],
            ["end"],
            ["begin"],
            ["rename", str(tmp_path / "none"), str(tmp_path / "b")],
            ["rename", str(tmp_path / "a"), str(tmp_path / "b")],
            ["end"],
        ):
            ours.send(json.dumps(packet).encode())
            assert program.next()
        assert json.loads(ours.recv(1 << 16)) == [errno.EBADF, "A descriptor was lost", "share"]
        assert json.loads(ours.recv(1 << 16)) == [errno.ENOENT, os.strerror(errno.ENOENT), str(tmp_path / "none")]
        assert (tmp_path / "a").is_dir()
        for packet in (["begin"], ["unheard of"], ["end"]):
            ours.send(json.dumps(packet).encode())
            assert program.next()
        assert json.loads(ours.recv(1 << 16))[:2] == [errno.EIO, "unheard of: KeyError: 'unheard of'"]
        for packet in (["begin"], ["rename", str(tmp_path / "a"), str(tmp_path / "b")], ["end"]):
            ours.send(json.dumps(packet).encode())
            assert program.next()
        assert json.loads(ours.recv(1 << 16)) == []
        assert (tmp_path / "b").is_dir()
        ours.close()
        assert not program.next()


def test_the_program_reads_only_what_it_is_given() -> None:
    """Both files are read without this package: nothing of it may be imported there."""
    for module in (carrier, disk_module):
        assert module.__file__ is not None
        assert "import trainer_cli" not in Path(module.__file__).read_text()
        assert "from trainer_cli" not in Path(module.__file__).read_text()
