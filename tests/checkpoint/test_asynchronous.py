"""Saving behind the caller: what is on the disk is as if it had been saved at once, and nothing is lost or hangs."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from states import same, small_state

from trainer_cli.checkpoint.asynchronous import AsyncCheckpointer, make_async_checkpointer
from trainer_cli.checkpoint.checkpointer import Facts, SyncCheckpointer
from trainer_cli.checkpoint.format.memory import _of_the_groups, available_bytes
from trainer_cli.checkpoint.process.port import Work
from trainer_cli.checkpoint.staging import WeightsMovedError
from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.errors import SaveError


class Held:
    """Work that is done when the test says so, by a thread of its own."""

    carrier = None

    def __init__(self) -> None:
        self.waiting: list[Work] = []

    def submit(self, work: Work) -> None:
        self.waiting.append(work)

    def settle(self, timeout_s: float | None = None) -> bool:
        while self.waiting:
            self.begin().join(timeout_s)
        return True

    def close(self) -> None:
        assert not self.waiting

    def begin(self) -> threading.Thread:
        thread = threading.Thread(target=self.waiting.pop(0))
        thread.start()
        return thread


class Net:
    """Weights, their optimizer, and the state that is saved of them."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    def step(self) -> None:
        self.model(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": dict(self.optimizer.state_dict()["state"])}

    @property
    def late(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *(v for kept in self.optimizer.state.values() for v in kept.values())]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def proven(checkpointer: AsyncCheckpointer, net: Net, folder: Path) -> None:
    """Make the first save, which is copied whole and watched, and a step after it."""
    checkpointer.save(net.state, folder / "step0", late=net.late)
    checkpointer.gate()
    checkpointer.settle()
    net.step()


def test_the_files_are_byte_for_byte_those_of_the_other_saver(tmp_path: Path) -> None:
    net, behind = Net(), make_async_checkpointer()
    proven(behind, net, tmp_path / "a")
    for step, state in ((1, net.state), (2, small_state(7)), (3, net.state)):
        facts = Facts(run_id="r", step=step, metrics={"a": 1.0}, files={"config.yaml": b"x: 1"})
        SyncCheckpointer().save(state, tmp_path / "b" / f"step{step}", facts=facts)
        saving = behind.save(state, tmp_path / "a" / f"step{step}", facts=facts, late=net.late)
        behind.gate()
        saving.written.result(60)
        assert contents(tmp_path / "a" / f"step{step}") == contents(tmp_path / "b" / f"step{step}")
    behind.close()


def test_what_is_saved_is_of_the_moment_of_the_save_whatever_changes_behind_it(tmp_path: Path) -> None:
    net, process = Net(), Held()
    behind = AsyncCheckpointer(process=process)
    proven(behind, net, tmp_path)
    SyncCheckpointer().save(net.state, tmp_path / "reference")
    saving = behind.save(net.state, tmp_path / "step1", late=net.late)
    assert not saving.staged.done()
    net.model(torch.randn(5, 3)).square().sum().backward()  # changes the statistics of batch norm
    thread = process.begin()
    behind.gate()
    assert saving.staged.done()
    net.optimizer.step()
    thread.join(60)
    saving.written.result(60)
    reader = SyncCheckpointer()
    assert same(dict(reader.load(tmp_path / "step1")), dict(reader.load(tmp_path / "reference")))


def test_the_gate_waits_for_the_copy_alone_and_not_for_the_disk(tmp_path: Path) -> None:
    fsync = threading.Event()

    class Slow(Disk):
        def fsync(self, fd: int) -> None:
            assert fsync.wait(60)
            super().fsync(fd)

    net = Net()
    behind = AsyncCheckpointer(storage=lambda root: LocalStorage(root, disk=Slow()))
    fsync.set()
    proven(behind, net, tmp_path)
    fsync.clear()
    saving = behind.save(net.state, tmp_path / "step1", late=net.late)
    behind.gate()
    assert saving.staged.done()
    assert not saving.written.done()
    assert not (tmp_path / "step1").exists()
    fsync.set()
    saving.written.result(60)
    assert (tmp_path / "step1" / "manifest.json").exists()


def test_weights_written_before_the_gate_spoil_the_save_and_from_then_on_all_is_copied_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, process = Net(), Held()
    behind = AsyncCheckpointer(process=process)
    proven(behind, net, tmp_path)
    saving = behind.save(net.state, tmp_path / "step1", late=net.late)
    with torch.no_grad():
        net.model[0].bias.fill_(0.5)
    thread = process.begin()
    behind.gate()
    thread.join(60)
    with pytest.raises(WeightsMovedError, match=r"model/0\.bias changed outside the optimizer's step"):
        saving.written.result(60)
    assert sorted(os.listdir(tmp_path)) == ["step0"]
    assert "model/0.bias changed outside the optimizer's step, so from now on" in caplog.text
    again = behind.save(net.state, tmp_path / "step2", late=net.late)
    assert again.staged.done(), "copied before training goes on"
    with torch.no_grad():
        net.model[0].bias.fill_(7.0)
    behind.settle()
    again.written.result(60)
    assert SyncCheckpointer().load(tmp_path / "step2")["model"]["0.bias"].max() == 0.5


def _in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def _through_data(weight: torch.Tensor) -> None:
    weight.data.mul_(0.5)


def _by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[:] *= 0.5


@pytest.mark.parametrize("write", [_in_place, _through_data, _by_numpy])
def test_a_training_that_always_writes_its_weights_elsewhere_loses_no_save_however_it_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Callable[[torch.Tensor], None]
) -> None:
    net, behind = Net(), make_async_checkpointer()
    for step in range(3):
        saving = behind.save(net.state, tmp_path / f"step{step}", late=net.late)
        assert saving.staged.done(), "copied before training goes on"
        weights = net.model[0].weight.detach().clone()
        write(net.model[0].weight)
        behind.gate()
        net.step()
        saving.written.result(60)
        saved = SyncCheckpointer().load(tmp_path / f"step{step}")["model"]["0.weight"]
        assert torch.equal(saved, weights), "of the moment of the save"
    assert caplog.text.count("model/0.weight changed outside the optimizer's step, so from now on") == 1
    behind.close()


def test_without_a_gate_the_writer_judges_by_itself_and_the_save_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_cli.checkpoint.staging._LATEST_S", 0.0)
    net, behind = Net(), make_async_checkpointer()
    proven(behind, net, tmp_path)
    behind.save(net.state, tmp_path / "step1", late=net.late).written.result(60)
    assert (tmp_path / "step1" / "manifest.json").exists()
    behind.close()


class Fails(Disk):
    """Has no room until it is told that there is some."""

    full = True

    def fsync(self, fd: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fsync(fd)


def test_a_failed_save_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    disk = Fails()
    behind = AsyncCheckpointer(storage=lambda root: LocalStorage(root, disk=disk))
    saving = behind.save(small_state(1), tmp_path / "step1")
    assert saving.staged.result(60) is None
    with pytest.raises(SaveError, match=r"No space left on device; it needs [\d,]+ bytes, [\d,]+ bytes are free"):
        saving.written.result(60)
    assert os.listdir(tmp_path) == []
    disk.full = False
    behind.save(small_state(2), tmp_path / "step2").written.result(60)
    behind.close()
    assert os.listdir(tmp_path) == ["step2"]


def test_a_save_that_fails_before_its_first_byte_still_copies_what_the_gate_waits_for(tmp_path: Path) -> None:
    net = Net()
    behind = make_async_checkpointer()
    proven(behind, net, tmp_path)
    (tmp_path / "file").write_bytes(b"")
    saving = behind.save(net.state, tmp_path / "file" / "step1", late=net.late)
    assert not behind.gate()
    assert saving.staged.result(60) is None
    assert isinstance(saving.written.exception(60), SaveError)
    behind.close()


@pytest.mark.parametrize("room", [1 << 40, 1000])
def test_what_is_got_ready_for_is_no_more_than_the_host_has_room_for(tmp_path: Path, room: int) -> None:
    net = Net()
    behind = AsyncCheckpointer(available=lambda: room)
    behind.prepare(net.late)
    assert behind.settle(60)
    assert (behind.stager.image.held_bytes > 0) is (room > 1000)
    behind.save(net.state, tmp_path / "step1").written.result(60)
    behind.close()


def test_what_must_be_done_before_a_commit_is_done_and_where_it_fails_nothing_is_committed(tmp_path: Path) -> None:
    behind, seen = make_async_checkpointer(), []
    behind.save(
        small_state(), tmp_path / "step1", before_commit=lambda: seen.append((tmp_path / "step1").exists())
    ).written.result(60)
    assert seen == [False]

    def fails() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(SaveError, match="Input/output error"):
        behind.save(small_state(), tmp_path / "step2", before_commit=fails).written.result(60)
    assert os.listdir(tmp_path) == ["step1"]
    behind.close()


def test_whether_the_trained_are_finite_is_told_by_the_bytes_that_are_saved(tmp_path: Path) -> None:
    behind, value = make_async_checkpointer(), torch.tensor([1.0, float("nan")])
    for name, trained in (("step1", [value]), ("step2", [])):
        behind.save({"model": {"w": value}}, tmp_path / name, trained=trained).written.result(60)
    assert [SyncCheckpointer().manifest(tmp_path / name).finite for name in ("step1", "step2")] == [False, True]
    behind.close()


def test_one_save_is_in_flight_and_close_ends_it(tmp_path: Path) -> None:
    began, go_on = threading.Event(), threading.Event()

    class Slow(Disk):
        def fsync(self, fd: int) -> None:
            began.set()
            assert go_on.wait(60)
            super().fsync(fd)

    behind = AsyncCheckpointer(storage=lambda root: LocalStorage(root, disk=Slow()))
    first = behind.save(small_state(1), tmp_path / "step1")
    assert began.wait(60)
    assert not behind.settle(0.0)
    freed = threading.Timer(0.05, go_on.set)
    freed.start()
    second = behind.save(small_state(2), tmp_path / "step2")
    assert first.written.done()
    behind.close()
    freed.join()
    assert second.written.done()
    assert behind.stager.image.held_bytes == 0
    for step in (1, 2):
        assert same(dict(SyncCheckpointer().load(tmp_path / f"step{step}")), small_state(step))


@pytest.mark.parametrize("gives_back", ["close", "prepare"])
def test_at_the_gate_nothing_is_left_of_a_save_whose_memory_was_given_back(tmp_path: Path, gives_back: str) -> None:
    weight, behind = torch.randn(1000), make_async_checkpointer(writer="thread")
    behind.save({"model": {"weight": weight}}, tmp_path / "step1", late=[weight]).written.result(30)
    if gives_back == "close":
        behind.close()
    else:
        behind.prepare([torch.randn(1_000_000)])
    assert not behind.gate()
    behind.save({"model": {"weight": weight}}, tmp_path / "step2", late=[weight]).written.result(30)
    behind.close()


def test_a_save_that_an_interrupt_kept_from_being_handed_over_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, behind = torch.randn(1000), make_async_checkpointer(writer="thread")

    def broken_off(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", broken_off)
        with pytest.raises(KeyboardInterrupt):
            behind.save({"model": {"weight": weight}}, tmp_path / "step1", late=[weight])
    weight.fill_(2)
    behind.save({"model": {"weight": weight}}, tmp_path / "step2", late=[weight]).written.result(30)
    assert torch.equal(behind.load(tmp_path / "step2")["model"]["weight"], weight)
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith("step")] == ["step2"]
    behind.close()


def test_a_state_that_the_host_cannot_hold_twice_is_saved_at_once_and_said_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    behind = AsyncCheckpointer(available=lambda: 5_000)
    for step in (1, 2):
        saving = behind.save(small_state(step), tmp_path / f"step{step}")
        assert saving.written.done()
        assert behind.stager.image.held_bytes == 0
    assert caplog.text.count("more than half of the 5,000 available, so saves interrupt the training") == 1
    assert same(dict(behind.load(tmp_path / "step2")), small_state(2))


def test_memory_that_is_held_already_is_not_looked_for_again(tmp_path: Path) -> None:
    asked = []
    behind = AsyncCheckpointer(available=lambda: asked.append(1))
    for step in (1, 2, 3):
        behind.save(small_state(step), tmp_path / f"step{step}").written.result(60)
    behind.close()
    assert asked == [1]


def test_the_memory_that_can_be_had_is_known_here() -> None:
    assert (available_bytes() or 0) > 1_000_000


SECOND = ("memory.max", "memory.current", "inactive_file")
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    ("told", "groups", "left"),
    [
        ("0::/\n", {"": (SECOND, "900", 500, 100)}, [500]),
        ("0::/job/step\n", {"job": (SECOND, "700", 300, 0), "job/step": (SECOND, "max", 300, 0)}, [400]),
        ("0::/job/step\n", {"job": (SECOND, "max", 9, 0), "job/step": (SECOND, "50", 40, 0)}, [10]),
        ("0::/not/seen/inside\n", {"": (SECOND, "60", 10, 5)}, [55]),
        ("3:cpu:/\n4:memory:/slurm/job\n0::/\n", {"memory/slurm/job": (FIRST, "800", 200, 50)}, [650]),
        ("4:cpu,memory:/x\n", {"memory": (FIRST, "80", 100, 0), "memory/x": (FIRST, "70", 60, 0)}, [10, 0]),
        ("", {"": (SECOND, "60", 10, 0)}, [50]),
        ("0::/\n", {}, []),
    ],
    ids=["a container", "a job's limit", "a step's limit", "another path inside", "the first version",
         "its parents", "nothing is told", "no group"],
)  # fmt: skip
def test_the_limits_of_every_group_above_the_process_count(
    tmp_path: Path, told: str, groups: dict[str, tuple[tuple[str, str, str], str, int, int]], left: list[int]
) -> None:
    for path, ((limit, used, cached), most, now, only_cached) in groups.items():
        folder = tmp_path / "root" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text(f"{now}\n")
        (folder / "memory.stat").write_text(f"anon 7\n{cached} {only_cached}\n")
    (tmp_path / "own").write_text(told)
    found = list(_of_the_groups(tmp_path / "root", tmp_path / "own"))
    assert sorted(set(found), reverse=True) == left


def test_where_the_system_refuses_memory_a_save_is_made_here_and_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("trainer_cli.checkpoint.format.image.Memory", refuse)
    behind = AsyncCheckpointer()
    for step in (1, 2):
        assert behind.save(small_state(step), tmp_path / f"step{step}").written.done()
    assert [record.message for record in caplog.records if "interrupt the training" in record.message] == [
        "[Errno 12] Cannot allocate memory, so saves interrupt the training"
    ]
    assert same(dict(behind.load(tmp_path / "step2")), small_state(2))
    behind.close()
