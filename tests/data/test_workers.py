"""Workers: deaf to signals that are for the parent, and never left behind."""

import errno
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import warm
from command import environment, start_program
from small_parts import present
from torch.utils.data import Dataset

from trainer_cli.data.loader import Loader
from trainer_cli.data.user_loader import UserLoader
from trainer_cli.data.workers import WorkerError, WorkerProcesses
from trainer_cli.errors import UserError


class Numbers(Dataset[int]):
    """Plain samples; from `slow_from` on, each takes an hour."""

    deterministic = True

    def __init__(self, length: int = 64, slow_from: int | None = None) -> None:
        self.length = length
        self.slow_from = slow_from

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if self.slow_from is not None and index >= self.slow_from:
            time.sleep(3600)
        return index


def made(**settings: Any) -> Loader:
    return Loader(Numbers(**settings), 4, shuffle=False, seed=0, num_workers=2)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
"""What stops a training, and no worker."""


def children() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_meant_for_the_parent_do_not_stop_workers(number: signal.Signals) -> None:
    iterator = made(length=400).iterate(0)
    next(iterator)
    workers = children()
    assert len(workers) == 2
    for pid in workers * 3:
        os.kill(pid, number)
    assert len(list(iterator)) == 99
    assert children() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_the_workers_of_a_users_own_loader_are_as_deaf_and_end_as_surely(persistent: bool) -> None:
    own = torch.utils.data.DataLoader(Numbers(40), 4, num_workers=2, persistent_workers=persistent)
    loader = UserLoader(own, seed=0)
    iterator = loader.iterate(0)
    next(iterator)
    workers = children()
    for pid in workers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    assert len(list(iterator)) == 9
    assert bool(children()) is persistent
    del loader, iterator
    gc.collect()
    assert children() == []


def test_the_workers_of_a_subclass_that_keeps_its_iterator_are_ended_in_its_own_way() -> None:
    class Keeping(torch.utils.data.DataLoader[Any]):
        """As torchdata's StatefulDataLoader: it keeps its iterator, to answer state_dict()."""

        def __iter__(self) -> Any:
            self._iterator = self._get_iterator()
            return self._iterator

    loader = UserLoader(Keeping(Numbers(400), 4, num_workers=2), seed=0)
    iterator = loader.iterate(0)
    next(iterator)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    iterator.close()
    assert [worker.exitcode for worker in workers] == [0, 0], "none was killed"
    assert len(list(loader.iterate(1))) == 100
    assert children() == []


def test_a_killed_worker_is_no_error_of_torchs_handler_while_workers_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer_cli.data.workers.LOADERS_GRACE_S", 0.1)

    class Slow(torch.utils.data.DataLoader[Any]):
        """Its workers are busy for an hour."""

    def fail(number: int, frame: object) -> None:
        raise RuntimeError("a worker was killed")

    loader = UserLoader(Slow(Numbers(64, slow_from=4), 4, num_workers=1), seed=0)
    iterator = loader.iterate(0)
    next(iterator)
    before = signal.signal(signal.SIGCHLD, fail)
    try:
        iterator.close()
        assert signal.getsignal(signal.SIGCHLD) is fail
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert children() == []


@pytest.mark.parametrize("slow_from", [None, 4], ids=["at work", "stuck"])
def test_closing_early_ends_the_workers_without_waiting_for_them(slow_from: int | None) -> None:
    iterator = made(slow_from=slow_from).iterate(0)
    next(iterator)
    assert len(children()) == 2
    iterator.close()
    assert children() == []


def test_dropping_the_iterator_ends_the_workers() -> None:
    iterator = made().iterate(0)
    next(iterator)
    del iterator
    gc.collect()
    assert children() == []


def test_closing_before_the_first_batch_starts_no_worker() -> None:
    iterator = made().iterate(0)
    assert children() == []
    iterator.close()


def test_an_error_ends_the_workers_even_while_its_traceback_is_held() -> None:
    loader = Loader(Numbers(), 4, shuffle=False, seed=0, num_workers=2, collate_fn=refuse_late)
    with pytest.raises(ValueError, match="too large") as caught:
        list(loader.iterate(0))
    assert children() == []
    del caught


def refuse_late(samples: list[int]) -> torch.Tensor:
    if samples[0] >= 8:
        raise ValueError("too large")
    return torch.tensor(samples)


def test_two_iterators_at_once_do_not_end_each_others_workers() -> None:
    training = made(length=100).iterate(0)
    first = next(training)
    assert len(list(made().iterate(0))) == 16
    rest = list(training)
    assert torch.cat([first, *rest]).tolist() == list(range(100))


def pids(loader: Loader, epoch: int) -> tuple[list[int], list[int]]:
    """The samples of an epoch, and which processes worked on it."""
    iterator = loader.iterate(epoch)
    got = next(iterator).tolist()
    at_work = sorted(children())
    return got + [number for batch in iterator for number in batch.tolist()], at_work


def test_persistent_workers_live_over_epochs_and_others_do_not() -> None:
    for persistent in (True, None, False):
        loader = Loader(Numbers(), 4, shuffle=True, seed=0, num_workers=2, persistent_workers=persistent)
        first, second = pids(loader, 0), pids(loader, 1)
        here = Loader(Numbers(), 4, shuffle=True, seed=0)
        for epoch, (got, _) in enumerate((first, second)):
            assert got == [number for batch in here.iterate(epoch) for number in batch.tolist()]
        assert (first[1] == second[1]) is (persistent is not False)
        assert len(children()) == (0 if persistent is False else 2)
        loader.close()
        assert children() == []
        assert pids(loader, 0)[0] == first[0], "a closed loader starts anew"
        loader.close()


def test_a_pass_left_early_leaves_nothing_in_the_next_one() -> None:
    loader = Loader(Numbers(), 4, shuffle=True, seed=0, num_workers=2, collate_fn=refuse_37)
    here = [batch.tolist() for batch in Loader(Numbers(), 4, shuffle=True, seed=0).iterate(0)]
    bad = next(number for number, batch in enumerate(here) if 37 in batch)
    for left_after in (1, 2, bad):  # after the last, an error is on its way when it is left
        iterator = loader.iterate(0)
        assert [next(iterator).tolist() for _ in range(left_after)] == here[:left_after]
        at_work = sorted(children())
        iterator.close()
        assert sorted(children()) == at_work
    assert next(loader.iterate(0, samples=4 * bad + 4)).tolist() == here[bad + 1]
    with pytest.raises(ValueError, match="37"):
        list(loader.iterate(0))
    assert children() == []


def refuse_37(samples: list[int]) -> torch.Tensor:
    if 37 in samples:
        raise ValueError("37 is here")
    return torch.tensor(samples)


class Ill(Dataset[int]):
    """Something happens at sample 21."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 21:
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.what == "crashed":
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGSEGV)
            elif self.what == "left":
                os._exit(7)
            elif self.what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.what == "slow":
                time.sleep(3600)
            elif self.what == "sys.exit":
                sys.exit("enough")
            raise OSError(5, "no such picture")
        return index


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "killed",
            r"data worker 1 \(pid \d+\) was killed by SIGKILL \(data\)\. Most likely the machine ran out of memory",
        ),
        ("crashed", r"data worker 1 \(pid \d+\) was killed by SIGSEGV"),
        ("left", r"data worker 1 \(pid \d+\) ended with exit code 7"),
        ("sys.exit", r"data worker 1 \(pid \d+\) ended with exit code 1"),
        ("slow", r"no batch came from the data workers for 0\.5 s \(data\.worker_timeout\)"),
        ("stopped", r"no batch came from the data workers for 0\.5 s \(data\.worker_timeout\)"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_an_error_and_none_is_left(what: str, text: str) -> None:
    # A worker that dies must be noticed before the limit, on a busy machine too.
    timeout_s = 0.5 if what in ("slow", "stopped") else 500.0
    loader = Loader(Ill(what), 4, shuffle=False, seed=0, num_workers=2, worker_timeout_s=timeout_s)
    with pytest.raises(WorkerError, match=text) as caught:
        list(loader.iterate(3))
    assert caught.value.exit_code == 1
    assert children() == []


def read_with_a_pause(iterator: Iterator[Any]) -> None:
    # On a busy machine a worker may die before its first batch has been received.
    for _ in range(3):
        next(iterator)
    time.sleep(0.5)  # It dies meanwhile, and the training is not disturbed: an error raised here has no note.
    list(iterator)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    ("what", "error", "text"),
    [("killed", WorkerError, r"data worker 1 \(pid \d+\) was killed by SIGKILL"), ("slow", RuntimeError, "timed out")],
)
def test_a_worker_of_a_users_loader_that_dies_or_hangs_is_an_error_where_its_batch_is_waited_for(
    what: str, error: type[Exception], text: str, persistent: bool
) -> None:
    theirs = torch.utils.data.DataLoader(Ill(what), 4, num_workers=2, persistent_workers=persistent, timeout=1)
    iterator = UserLoader(theirs, seed=0).iterate(3)
    with pytest.raises(error, match=text) as caught:
        read_with_a_pause(iterator)
    assert caught.value.__notes__[0].startswith("while loading batch ")
    del theirs, caught, iterator
    gc.collect()
    assert children() == []


class IllTwice(Ill):
    """The first worker hangs for long before the second dies, as at a lock that the dead one held."""

    def __getitem__(self, index: int) -> int:
        if index == 24:
            time.sleep(3600)
        return super().__getitem__(index)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_worker_that_hangs_where_another_died_is_not_left_behind(persistent: bool, epoch: int) -> None:
    gc.collect()
    dataset = IllTwice("killed")
    short = torch.utils.data.BatchSampler(range(16), 4, False)
    own = torch.utils.data.DataLoader(dataset, batch_sampler=short, num_workers=2, persistent_workers=persistent)
    loader = UserLoader(own, seed=0)
    for number in range(epoch):
        assert len(list(loader.iterate(number))) == 4
    assert len(children()) == (2 if persistent and epoch else 0)
    short.sampler = cast("Any", range(64))  # now with the samples over which they hang and die
    with pytest.raises(WorkerError):
        list(loader.iterate(epoch))
    assert children() == []
    short.sampler = cast("Any", range(16))
    assert len(list(loader.iterate(epoch + 1))) == 4  # with new workers


@pytest.mark.parametrize("kind", ["ours", "a user's"])
def test_a_kept_worker_that_dies_between_two_epochs_is_replaced(kind: str) -> None:
    theirs = torch.utils.data.DataLoader(Numbers(), 4, num_workers=2, persistent_workers=True)
    loader: Any = made() if kind == "ours" else UserLoader(theirs, seed=0)
    assert len(list(loader.iterate(0))) == 16
    worker = children()[0]
    os.kill(worker, signal.SIGKILL)
    while worker in children():
        time.sleep(0.001)
    assert len(list(loader.iterate(1))) == 16
    assert len(children()) == 2
    loader.close()
    assert children() == []


def test_at_exit_workers_that_are_kept_end_in_silence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch

            from trainer_cli.data.user_loader import UserLoader

            own = torch.utils.data.DataLoader(range(16), 4, num_workers=2, persistent_workers=True)
            loaders = [UserLoader(own, seed=0)]
            assert [len(list(loaders[0].iterate(epoch))) for epoch in range(3)] == [4, 4, 4]
            left = UserLoader(torch.utils.data.DataLoader(range(16), 4, num_workers=2), seed=0).iterate(0)
            next(left)
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_loader_around_one_that_keeps_its_workers_keeps_them_too() -> None:
    class Around:
        def __init__(self) -> None:
            self.own = torch.utils.data.DataLoader(Numbers(16), 4, num_workers=2, persistent_workers=True)

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(self.own)

    loader = UserLoader(Around(), seed=0)
    workers = set()
    for epoch in range(3):
        assert len(list(loader.iterate(epoch))) == 4
        workers.add(tuple(sorted(children())))
    assert len(workers) == 1
    del loader
    gc.collect()
    assert children() == []


def test_a_loader_that_starts_a_process_each_epoch_leaves_nothing_of_it() -> None:
    class Starts:
        def __iter__(self) -> Iterator[int]:
            process = multiprocessing.Process(target=int)
            process.start()
            process.join()
            return iter(range(4))

    loader = UserLoader(Starts(), seed=0)
    before = 0
    for epoch in range(20):
        assert list(loader.iterate(epoch)) == [0, 1, 2, 3]
        if epoch == 9:
            before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_processes_that_a_users_own_loader_keeps_are_left_alone() -> None:
    class Keeps:
        process: multiprocessing.Process | None = None

        def __iter__(self) -> Iterator[int]:
            if self.process is None:
                self.process = multiprocessing.Process(target=time.sleep, args=(60,), daemon=True)
                self.process.start()
            return iter(range(4))

    own = Keeps()
    loader = UserLoader(own, seed=0)
    for epoch in range(2):
        assert list(loader.iterate(epoch)) == [0, 1, 2, 3]
        assert own.process is not None
        assert own.process.is_alive()
    process = present(own.process)
    process.kill()
    process.join()


class Peculiar(Exception):
    """Cannot be made again from its text alone, nor from its arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class Raising(Numbers):
    """An error of another kind at some samples."""

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise Peculiar("very ", "odd")
        if index == 20:
            raise UserError("not so", where="data", cure="Do it.")
        if index == 40:
            raise OSError(5, "no such picture")
        return next(iter(range(index, 60)))  # StopIteration from sample 60 on.


@pytest.mark.parametrize(
    ("start", "error", "words"),
    [
        (0, RuntimeError, ["Peculiar: very odd"]),
        (8, UserError, ["not so (data). Do it."]),
        (32, OSError, ["no such picture", "in DataLoader worker process 0", "in __getitem__", "sample 40 of epoch 3"]),
        (52, RuntimeError, ["StopIteration"]),
    ],
)
def test_an_error_in_a_worker_keeps_its_type_where_it_can_and_names_worker_and_sample(
    start: int, error: type[Exception], words: list[str]
) -> None:
    loader = Loader(Raising(), 4, shuffle=False, seed=0, num_workers=2)
    with pytest.raises(error) as caught:
        list(loader.iterate(3, samples=start))
    assert [word for word in words if word not in str(caught.value)] == []
    assert children() == []


def test_a_dataset_that_raises_stop_iteration_does_not_end_the_epoch_in_silence() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Loader(Raising(), 4, shuffle=False, seed=0).iterate(0, samples=44))


def test_a_dataset_in_a_worker_knows_that_it_is_in_one() -> None:
    class Asking(Numbers):
        def __getitem__(self, index: int) -> int:
            info: Any = torch.utils.data.get_worker_info()
            assert info is not None
            assert info.dataset.dataset is self
            return 10 * int(info.num_workers) + int(info.id)

    loader = Loader(Asking(8), 2, shuffle=False, seed=0, num_workers=2)
    assert [batch.tolist() for batch in loader.iterate(0)] == [[20, 20], [21, 21], [20, 20], [21, 21]]
    assert torch.utils.data.get_worker_info() is None


def test_a_large_batch_of_plain_objects_comes_whole() -> None:
    class Blobs(Numbers):
        def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
            return bytes([index]) * 300_000

    loader = Loader(Blobs(12), 2, shuffle=False, seed=0, num_workers=2, collate_fn=list)
    got = [blob for batch in loader.iterate(0) for blob in batch]
    assert got == [bytes([index]) * 300_000 for index in range(12)]


def test_a_batch_of_very_many_tensors_comes_whole_or_says_which_limit_it_met() -> None:
    class Many(Numbers):
        def __getitem__(self, index: int) -> list[torch.Tensor]:  # type: ignore[override]
            return [torch.full((5000,), float(number)) for number in range(300)]

    loader = Loader(Many(2), 1, shuffle=False, seed=0, num_workers=1, collate_fn=take_first)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for batch in loader.iterate(0):
        assert [tensor[0].item() for tensor in batch] == list(range(300))
    del batch
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, before[1]))
    try:
        with pytest.raises(RuntimeError, match=r"Too many open files|ancdata"):
            list(loader.iterate(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def take_first(samples: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return samples[0]


SCRIPT = """
    import os, signal, sys, time
    from trainer_cli.data.loader import Loader

    class Numbers:
        deterministic = True
        def __len__(self): return 4000
        def __getitem__(self, index):
            time.sleep({pause} if index >= 8 else 0.0)
            return index

    loader = Loader(Numbers(), 4, shuffle=False, seed=0, num_workers=2)
    iterator = loader.iterate(0)
"""


def start_script(
    folder: Path, text: str, *arguments: str, cold: bool = False
) -> "subprocess.Popen[str] | warm.WarmProcess":
    """A program in a group of its own; a new interpreter (`cold`) where its end is what counts, which a fork leaves."""
    (folder / "script.py").write_text(text)
    return start_program(
        folder / "script.py", arguments, environment(), cold=cold, stderr=subprocess.PIPE, start_new_session=True
    )


def start(
    folder: Path, body: str, *, pause: float = 0.0, cold: bool = False
) -> "subprocess.Popen[str] | warm.WarmProcess":
    return start_script(folder, textwrap.dedent(SCRIPT.format(pause=pause)) + textwrap.dedent(body), cold=cold)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z")


@pytest.mark.parametrize("pause", [0.0, 3600.0])
def test_workers_end_soon_after_their_parent_was_killed(pause: float, tmp_path: Path) -> None:
    body = """
    import multiprocessing
    next(iterator)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(3600)
    """
    with start(tmp_path, body, pause=pause) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 500
        while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(alive(pid) for pid in workers)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


ENDS = {
    "end of the program": "",
    "error": "raise SystemExit(1)",
    "killed workers": "for child in multiprocessing.active_children(): child.kill()",
    "killed program": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("pause", [0.0, 3600.0], ids=["idle", "busy"])
@pytest.mark.parametrize("end", ENDS)
def test_no_end_leaves_a_folder_of_the_workers_behind(end: str, pause: float, temporary: Path, tmp_path: Path) -> None:
    body = f"""
    import multiprocessing
    next(iterator)
    print(len(os.listdir({str(temporary)!r})), flush=True)
    {ENDS[end]}
    """
    with start(tmp_path, body, pause=pause, cold=end == "end of the program") as process:
        out, err = process.communicate(timeout=500)
    assert int(out) > 0, err
    deadline = time.monotonic() + 500
    while os.listdir(temporary) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert os.listdir(temporary) == []


def test_a_folder_of_temporary_files_that_was_cleaned_is_made_again(temporary: Path, tmp_path: Path) -> None:
    body = f"""
    import shutil
    next(iterator)
    iterator.close()
    for name in os.listdir({str(temporary)!r}):
        shutil.rmtree(os.path.join({str(temporary)!r}, name))
    print(next(Loader(Numbers(), 4, shuffle=False, seed=0, num_workers=2).iterate(0)).tolist())
    """
    with start(tmp_path, body) as process:
        out, err = process.communicate(timeout=500)
    # The first workers may have been about to send a batch through the removed folder, and print that they cannot.
    assert out == "[0, 1, 2, 3]\n", err


SIBLINGS = """
import multiprocessing, sys, time
from trainer_cli.data.loader import Loader

class Numbers:
    deterministic = True
    def __len__(self): return 4000
    def __getitem__(self, index): return index

def begin():
    return Loader(Numbers(), 4, shuffle=False, seed=0, num_workers=1).iterate(0)

def read(connection):
    iterator = begin()
    next(iterator)
    connection.send([child.pid for child in multiprocessing.active_children()])
    connection.recv()
    # By new workers, and by those that began before.
    connection.send((next(begin()).tolist(), next(iterator).tolist()))

def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    next(begin())
    pipes = [context.Pipe() for _ in range(2)]
    killed, other = [context.Process(target=read, args=(theirs,)) for _, theirs in pipes]
    killed.start()
    other.start()
    for _, theirs in pipes:
        theirs.close()
    (first, _), (second, _) = pipes
    workers, _ = first.recv(), second.recv()
    killed.kill()
    killed.join()
    deadline = time.monotonic() + 500
    while any(is_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    second.send(None)
    print(second.recv())
    other.join()
    print(other.exitcode, next(begin()).tolist())
"""
"""A program that reads data, and starts two processes that do so too, of which one is killed."""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_process_leaves_the_workers_of_others_their_folder(
    method: str, temporary: Path, tmp_path: Path
) -> None:
    with start_script(tmp_path, SIBLINGS, method) as process:
        out, err = process.communicate(timeout=500)
    assert out == "([0, 1, 2, 3], [4, 5, 6, 7])\n0 [0, 1, 2, 3]\n", err
    assert "Traceback" not in err
    assert os.listdir(temporary) == []


@pytest.mark.parametrize(("strategy", "longest"), [("file_descriptor", 75), ("file_system", 73)])
@pytest.mark.parametrize(("bytes_more", "fits"), [(0, True), (1, False)])
def test_a_folder_of_temporary_files_is_refused_where_its_path_is_too_long_for_sockets(
    bytes_more: int,
    fits: bool,
    strategy: str,
    longest: int,
    temporary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of 107 bytes the sockets need "/pymp-01234567/listener-01234567" or "/torch-shm-dir-012345/manager.sock".
    folder = temporary / ("x" * (longest - len(str(temporary)) - 1 + bytes_more))
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    body = f"""
    import torch
    torch.multiprocessing.set_sharing_strategy({strategy!r})
    print(len(next(iterator)))
    """
    with start(tmp_path, body) as process:
        out, err = process.communicate(timeout=500)
    assert (out == "4\n") is fits, err
    assert ("(TMPDIR). Set the environment variable TMPDIR to a shorter path" in err) is not fits


@pytest.mark.parametrize("pause", [0.0, 3600.0])
def test_a_program_ends_although_it_never_closed_its_iterator(pause: float, tmp_path: Path) -> None:
    with start(tmp_path, "next(iterator)\nprint('done')\n", pause=pause, cold=True) as process:
        out, err = process.communicate(timeout=500)
    assert (process.returncode, out, err) == (0, "done\n", "")


def test_signals_to_the_whole_group_from_the_very_start_lose_no_batch(tmp_path: Path) -> None:
    body = """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)
    print("ready", flush=True)
    total = 0
    for epoch in range(2):
        for batch in loader.iterate(epoch):
            total += len(batch)
    print(total, flush=True)
    """
    with start(tmp_path, body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while process.poll() is None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.killpg(process.pid, number)
            time.sleep(0.002)
        out, err = process.communicate(timeout=500)
    # The interpreter's own last moments have no handlers; what counts is that every batch came.
    assert out == "8000\n", err


STARTED = """
import multiprocessing, os, signal, sys, time

from torch.utils.data import DataLoader

from trainer_cli.data.loader import Loader
from trainer_cli.data.user_loader import UserLoader


class Numbers:
    deterministic = True

    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.01)
        return index


if __name__ == "__main__":
    method, whose = sys.argv[1:]
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"):
        signal.signal(getattr(signal, name), lambda *_: None)
    context = multiprocessing.get_context(method)
    if method == "forkserver" and whose == "own":
        # Starts the fork server of multiprocessing, which SIGTERM ends.
        context.Process(target=time.sleep, args=(3600,)).start()
    if whose == "default":
        multiprocessing.set_start_method(method)
        loader = Loader(Numbers(), 4, shuffle=False, seed=0, num_workers=1)
    else:
        loader = UserLoader(DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context=context), seed=0)
    iterator = loader.iterate(0)
    count = len(next(iterator))
    print("ready", flush=True)
    count += sum(map(len, iterator))
    print(count, flush=True)
    # Not at the end of the process of the user, which may not have survived the signals.
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("method", "whose"), [("fork", "own"), ("spawn", "default"), ("forkserver", "default"), ("forkserver", "own")]
)
def test_signals_to_the_whole_group_leave_workers_of_any_start_method_alone(
    method: str, whose: str, tmp_path: Path
) -> None:
    with start_script(tmp_path, STARTED, method, whose) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # Others end what multiprocessing had started before the workers.
        for number in SIGNALS * 2 if whose == "default" else (signal.SIGINT, signal.SIGTERM):
            os.killpg(process.pid, number)
        out, err = process.communicate(timeout=500)
    assert out == "100\n", err


@pytest.mark.parametrize(
    ("text", "is_full"),
    [
        ("unable to allocate shared memory(shm) for file </torch_7_8_9>: No space left on device (28)", True),
        ("unable to write to file </torch_7_8_9>: No space left on device (28)", True),
        ("unable to open shared memory object </torch_7_8_9> in read-write mode: Too many open files (24)", False),
        ("unable to write to file </data/cache>: No space left on device (28)", False),
    ],
)
def test_full_shared_memory_is_named_with_what_helps(text: str, is_full: bool) -> None:
    error = RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\n{text}")
    explained = WorkerProcesses().explained(error)
    assert isinstance(explained, WorkerError) is is_full
    if is_full:
        assert "shared memory is full" in str(explained)
        assert all(cure in str(explained) for cure in ("data.num_workers=0", "/dev/shm", "--shm-size"))


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ENOSPC, "No space left on device", "/data/cache"), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
    ],
)
def test_shared_memory_without_space_for_a_queue_is_no_full_disk(error: OSError, is_full: bool) -> None:
    with pytest.raises(WorkerError if is_full else OSError) as caught, WorkerProcesses().starting():
        raise error
    assert ("shared memory is full" in str(caught.value)) is is_full
