"""Saving behind the caller: what is on the disk is as if it had been saved at once, and nothing is lost or hangs."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run_program
from small_parts import present
from states import same, small_state

from trainer_cli.checkpoint.checkpointer import AsyncCheckpointer, SyncCheckpointer, make_async_checkpointer
from trainer_cli.checkpoint.snapshot import CopyStager, SnapshotBuffer
from trainer_cli.errors import SaveError
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage


class SlowDisk(Disk):
    """Its fsync returns once `may_end` is set."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def fsync(self, fd: int) -> None:
        self.began.set()
        assert self.may_end.wait(500)
        super().fsync(fd)


def on_disk(disk: Disk) -> AsyncCheckpointer:
    return AsyncCheckpointer(storage=lambda root: LocalStorage(root, disk=disk))


class FullDisk(Disk):
    """Has no space until `full` is False."""

    full = True

    def fsync(self, fd: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fsync(fd)


@pytest.mark.parametrize("act", ["save", "close"])
def test_the_next_call_raises_the_failure_that_nothing_has_raised_yet_and_once(tmp_path: Path, act: str) -> None:
    disk = FullDisk()
    background = on_disk(disk)
    background.save(small_state(1), tmp_path / "step1")
    background.drain()
    disk.full = False
    with pytest.raises(SaveError, match=r"step1.*Older checkpoints are intact"):
        background.save(small_state(2), tmp_path / "step2") if act == "save" else background.close()
    assert os.listdir(tmp_path) == []
    background.save(small_state(2), tmp_path / "step2")
    background.close()
    assert os.listdir(tmp_path) == ["step2"]


def test_a_save_whose_folder_cannot_be_made_fails_and_the_next_one_works(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    background = make_async_checkpointer()
    with pytest.raises(SaveError):
        present(background.save(small_state(), tmp_path / "file" / "step1")).raise_failure()
    present(background.save(small_state(), tmp_path / "step2")).written.result(500)
    background.close()


@pytest.mark.parametrize("available", [None, 10], ids=["copied", "not copied"])
def test_whether_the_trained_are_finite_is_judged_by_the_bytes_that_are_saved(
    tmp_path: Path, available: int | None
) -> None:
    background, value = AsyncCheckpointer(stager=CopyStager(lambda: available)), torch.tensor([1.0, float("nan")])
    for name, trained in (("step1", [value]), ("step2", [])):
        present(background.save({"model": {"w": value}}, tmp_path / name, trained=trained)).written.result(500)
    assert [SyncCheckpointer().manifest(tmp_path / name).finite for name in ("step1", "step2")] == [False, True]
    background.close()


def test_one_save_is_in_flight_and_close_ends_it(tmp_path: Path) -> None:
    disk = SlowDisk()
    background = on_disk(disk)
    first = background.save(small_state(1), tmp_path / "step1")
    assert disk.began.wait(500)
    assert not background.drain(0.0)
    freed = threading.Timer(0.05, disk.may_end.set)
    freed.start()
    second = background.save(small_state(2), tmp_path / "step2")
    assert present(first).written.done()
    background.close()
    freed.join()
    assert present(second).written.done()
    assert background.stager.held_bytes == 0
    for step in (1, 2):
        assert same(dict(SyncCheckpointer().load(tmp_path / f"step{step}")), small_state(step))


def test_a_save_that_does_not_end_keeps_its_memory_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SlowDisk()
    background = on_disk(disk)
    saving = background.save(small_state(1), tmp_path / "step1")
    background.close(0.01)
    assert background.stager.held_bytes
    assert "a checkpoint is still being written or deleted after 0 s" in caplog.text
    disk.may_end.set()
    assert present(saving).written.result(500) is None


def test_a_save_that_an_interrupt_stopped_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, background = torch.randn(1000), make_async_checkpointer()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for owner, method in ((threading.Thread, "start"), (SnapshotBuffer, "capture")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                background.save({"model": {"weight": weight}}, tmp_path / "step1")
    weight.fill_(2)
    present(background.save({"model": {"weight": weight}}, tmp_path / "step2")).written.result(500)
    assert torch.equal(background.load(tmp_path / "step2")["model"]["weight"], weight)
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith("step")] == ["step2"]
    background.close()


def test_a_state_that_the_host_cannot_hold_twice_is_saved_before_training_goes_on_and_one_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    background = AsyncCheckpointer(stager=CopyStager(lambda: 5_000))
    for step in (1, 2):
        assert present(background.save(small_state(step), tmp_path / f"step{step}")).written.done()
        assert background.stager.held_bytes == 0
    assert caplog.text.count("more than half of the 5,000 available, so training waits for each save") == 1
    assert same(dict(background.load(tmp_path / "step2")), small_state(2))


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), MemoryError()], ids=repr)
def test_where_the_system_refuses_memory_a_save_is_made_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("trainer_cli.checkpoint.snapshot.HostMemory", refuse)
    background = AsyncCheckpointer()
    for step in (1, 2):
        assert present(background.save(small_state(step), tmp_path / f"step{step}")).written.done()
    assert len([record for record in caplog.records if "training waits for each save" in record.message]) == 1
    assert same(dict(background.load(tmp_path / "step2")), small_state(2))
    background.close()


def test_memory_that_is_held_already_is_not_looked_for_again(tmp_path: Path) -> None:
    asked = []
    background = AsyncCheckpointer(stager=CopyStager(lambda: asked.append(1)))
    for step in (1, 2, 3):
        present(background.save(small_state(step), tmp_path / f"step{step}")).written.result(500)
    background.close()
    assert asked == [1]


SCRIPT = """
import sys
import torch
from trainer_cli import make_async_checkpointer

make_async_checkpointer().save({"w": torch.ones(10_000_000)}, sys.argv[1])
"""


@pytest.mark.parametrize("writable", [True, False])
def test_a_script_that_ends_without_close_finishes_its_save_or_says_why_not(tmp_path: Path, writable: bool) -> None:
    folder = tmp_path / "in" if writable else tmp_path / "file" / "in"
    (tmp_path / "file").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "step1")], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0
    assert (folder / "step1" / "manifest.json").exists() is writable
    assert ("step1 was not saved: " in done.stderr) is not writable


@pytest.mark.parametrize("available", [None, 1 << 40, 1000])
def test_no_more_memory_is_prepared_than_the_host_can_spare(tmp_path: Path, available: int | None) -> None:
    background = AsyncCheckpointer(stager=CopyStager(lambda: available))
    background.prepare(small_state())
    assert background.drain(60)
    held = background.stager.held_bytes
    assert (held > 0) is (available != 1000)
    present(background.save(small_state(), tmp_path / "step1")).written.result(500)
    assert background.stager.held_bytes == held
    background.close()


MANY = """
import resource, sys
import torch
from trainer_cli import make_async_checkpointer
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
state = {f"t{number}": torch.full((3,), float(number)) for number in range(500)}
checkpointer = make_async_checkpointer()
for step in (1, 2):
    checkpointer.save(state, f"{sys.argv[1]}/step{step}")
checkpointer.close()
loaded = checkpointer.load(f"{sys.argv[1]}/step2")
assert all(torch.equal(loaded[name], value) for name, value in state.items())
"""


def test_a_state_may_have_more_tensors_than_files_may_be_open(tmp_path: Path) -> None:
    done = run_program(MANY, str(tmp_path), folder=tmp_path)
    assert done.code == 0, done.out


COUNTED = """
import os, sys, time
from pathlib import Path
import torch
from trainer_cli import Callback, CheckpointerCallback, Logging, Trainer, TrainingLoop

torch.set_num_threads(2)
dtype = getattr(torch, sys.argv[1])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(300, 300, dtype=dtype))

    def forward(self, batch):
        return {"loss": (batch.to(dtype) @ self.weight).sum().float() * 1e-6}


class Count(Callback):
    def on_train_step_end(self, trainer, *_):
        if trainer.progress.step == 3:
            while not Path(str(how), "step2", "manifest.json").exists():
                time.sleep(0.01)
            threads.append(len(os.listdir("/proc/self/task")))


threads = []
for how in (False, True):
    saves = CheckpointerCallback(str(how), save_interval=2, save_async=how, pre_train_checkpoint=False)
    trainer = Trainer(
        model=Net(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=saves,
        callbacks=[Count()], loop=TrainingLoop(max_duration=4, eval_interval=None), logging=Logging(console="off"),
    )
    trainer.fit([torch.ones(200, 300)] * 4)
print(threads[1] - threads[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_writes_is_one_thread_and_has_none_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """With more threads of OpenMP than processors, each operation of the training would wait for its own to wake up."""
    monkeypatch.chdir(tmp_path)
    done = run_program(COUNTED, dtype, folder=tmp_path)
    assert done.out.splitlines()[-1] == "1", done.out
