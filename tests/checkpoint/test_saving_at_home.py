"""A training that lives where its saves are written from: each save is of one step, whatever comes between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from states import Training

from trainer_cli import make_async_checkpointer
from trainer_cli.checkpoint.asynchronous import AsyncCheckpointer
from trainer_cli.checkpoint.checkpointer import Saving
from trainer_cli.checkpoint.format.outgoing import Outgoing, StateGoneError
from trainer_cli.checkpoint.process.outliving import Outliving
from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.local import LocalStorage

pytestmark = pytest.mark.usefixtures("small_homes")


class Held(Disk):
    """Writes large blocks only once it may."""

    block_bytes = 1 << 16

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()
        self.may.set()

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if len(data) == self.block_bytes:
            self.asked.set()
            assert self.may.wait(60)
        return super().write(fd, data, offset)


def handed_over(training: Training, saving: AsyncCheckpointer, path: Path) -> Saving:
    """A save under way; nobody else holds its state."""
    return saving.save(training.state(), path, late=training.late)


def at_home(training: Training, saving: AsyncCheckpointer, folder: Path) -> Saving:
    """A second save under way, which is written from where the state lives since the first."""
    first = handed_over(training, saving, folder / "step0")
    saving.gate()
    first.written.result(60)
    training.step()
    second = handed_over(training, saving, folder / "step1")
    assert saving.stager.image.is_lived_in
    return second


def test_no_weight_changes_while_the_disk_reads_it(tmp_path: Path) -> None:
    disk, training = Held(), Training()
    saving = AsyncCheckpointer(storage=lambda root: LocalStorage(root, disk=disk))
    for step in range(3):
        if step == 2:
            disk.asked.clear()
            disk.may.clear()
        values = [one.detach().clone() for one in training.late]
        under_way = handed_over(training, saving, tmp_path / f"step{step}")
        assert saving.stager.image.is_lived_in is (step > 0)
        if step == 2:
            assert disk.asked.wait(60)
            threading.Timer(0.2, disk.may.set).start()
        saving.gate()
        assert disk.may.is_set(), "the disk had not got what it was reading"
        training.step()
        assert under_way.written.result(60) is None
        saving.verify(tmp_path / f"step{step}")
        assert torch.equal(saving.load(tmp_path / f"step{step}")["model"]["b"], values[1])
    saving.close()


def test_where_the_gate_fails_the_save_does_and_nothing_of_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, saving = Training(), make_async_checkpointer(writer="thread")
    leave = Outgoing.leave
    for step in range(4):
        under_way = handed_over(training, saving, tmp_path / f"step{step}")
        if step == 2:
            monkeypatch.setattr(Outgoing, "leave", lambda self: (_ for _ in ()).throw(MemoryError("no room")))
        assert saving.gate() is False
        monkeypatch.setattr(Outgoing, "leave", leave)
        training.step()
        failure = under_way.written.exception(60)
        assert isinstance(failure, MemoryError) is (step == 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step0", "step1", "step3"]
    saving.close()


def moved_in(training: Training, saving: AsyncCheckpointer) -> bool:
    home = saving.stager.image._home  # type: ignore[attr-defined]
    return home is not None and training.moment.data_ptr() in home.tenants.values()


@pytest.mark.parametrize(
    ("gates", "available", "lives"),
    [
        ([False], None, [True]),
        ([True], None, [False]),
        ([True, False], None, [False, True]),
        ([False], 0, [False]),
    ],
    ids=["the optimizer's", "somebody else's", "then the optimizer's", "no room"],
)
def test_weights_move_at_an_optimizers_step_where_there_is_room(
    tmp_path: Path, gates: list[bool], available: int | None, lives: list[bool]
) -> None:
    training, saving = Training(), AsyncCheckpointer()
    for step, (asked, living) in enumerate(zip(gates, lives, strict=True)):
        saving.stager._available = lambda: available
        under_way = handed_over(training, saving, tmp_path / f"step{step}")
        under_way.written.result(60)
        saving.gate(asked=asked)
        assert moved_in(training, saving) is living
        assert saving.stager.image._built is None, "no memory is held for nobody"  # type: ignore[attr-defined]
        training.step()
    saving.close()


def test_one_training_after_another_lives_where_its_own_saves_are_written_from(tmp_path: Path) -> None:
    training = Training()
    for number in range(3):
        saving = make_async_checkpointer(writer="process")
        for step in range(3):
            under_way = handed_over(training, saving, tmp_path / f"{number}/step{step}")
            assert saving.stager.image.is_lived_in is (step > 0)
            saving.gate()
            training.step()
        under_way.written.result(60)
        saving.close()


def test_where_samples_tell_of_writes_the_gate_is_not_waited_for_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_cli.checkpoint.staging._LATEST_S", 600.0)
    training, saving = Training(), make_async_checkpointer()
    under_way = at_home(training, saving, tmp_path)
    under_way.written.result(60)
    saving.close()


def spin(is_over: Callable[[], bool]) -> None:
    while not is_over():
        continue


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of a thread on this system")
@pytest.mark.parametrize("works", [True, False], ids=["goes on", "is held up"])
def test_the_writer_judges_by_itself_only_once_the_training_has_gone_on_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """A write that was under way when the last byte was read has come to a sample by then; one that is held up has
    not."""
    monkeypatch.setattr("trainer_cli.checkpoint.staging._LATEST_SAMPLED_S", 600.0)
    training, saving = Training(), make_async_checkpointer()
    under_way = at_home(training, saving, tmp_path)
    if works:
        until = time.monotonic() + 60
        spin(lambda: under_way.written.done() or time.monotonic() > until)
    else:
        over = threading.Event()
        another = threading.Thread(target=spin, args=(over.is_set,))
        another.start()
        with pytest.raises(TimeoutError):
            under_way.written.result(0.5)
        over.set()
        another.join()
        saving.gate()
    under_way.written.result(0 if works else 60)
    saving.close()


def test_weights_that_somebody_else_writes_do_not_move(tmp_path: Path) -> None:
    training, saving = Training(), AsyncCheckpointer()
    for step in range(3):
        under_way = handed_over(training, saving, tmp_path / f"step{step}")
        training.weights[0].detach().numpy()[...] += 1
        saving.gate()
        assert not moved_in(training, saving)
        under_way.written.result(60)
    saving.close()


def test_without_memory_for_a_home_saves_go_on_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("no memory to map")

    monkeypatch.setattr("trainer_cli.checkpoint.format.image.Home", refused)
    training, saving = Training(), AsyncCheckpointer()
    for step in range(3):
        under_way = handed_over(training, saving, tmp_path / f"step{step}")
        saving.gate()
        training.step()
        under_way.written.result(60)
        assert not moved_in(training, saving)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step0", "step1", "step2"]
    saving.close()


@pytest.fixture(params=["process", "thread"])
def saving(request: pytest.FixtureRequest) -> Iterator[AsyncCheckpointer]:
    checkpointer = make_async_checkpointer(writer=request.param)
    yield checkpointer
    checkpointer.close()


def test_checkpoints_of_a_training_that_never_waits_are_each_of_one_step(
    saving: AsyncCheckpointer, tmp_path: Path
) -> None:
    """Steps far shorter than a save: most of it is copied at the gate, at another place each time."""
    wide = 3 << 20
    weights = [torch.nn.Parameter(torch.full((wide,), 0.0)) for _ in range(3)]
    moment = torch.full((wide,), 0.0)
    late = [*weights, moment]
    lived_in = []
    for step in range(12):
        state = {"model": {str(number): one.detach() for number, one in enumerate(weights)}, "moment": moment}
        saving_now = saving.save(state, tmp_path / f"step{step}", late=late, trained=weights)
        del state
        lived_in.append(saving.stager.image.is_lived_in)
        threading.Event().wait(0.004 * step)
        assert saving.gate() is False
        with torch.no_grad():
            for one in late:
                one.fill_(step + 1)
    assert saving_now.written.result(60) is None
    assert lived_in == [False] + [True] * 11
    for step in range(12):
        saving.verify(tmp_path / f"step{step}")
        loaded = saving.load(tmp_path / f"step{step}")
        for one in (*loaded["model"].values(), loaded["moment"]):
            assert torch.equal(one, torch.full((wide,), float(step))), f"step {step}"


def test_a_training_that_changed_its_weights_before_the_gate_loses_that_save_and_lives_where_it_did(
    saving: AsyncCheckpointer, tmp_path: Path
) -> None:
    training = Training()
    for step in range(3):
        under_way = handed_over(training, saving, tmp_path / f"step{step}")
        if step == 2:
            training.step()
        assert saving.gate() is (step == 2)
        training.step()
        failure = under_way.written.exception(60)
        assert (failure is not None) is (step == 2)
    contents = [one.detach().clone() for one in training.late]
    under_way = handed_over(training, saving, tmp_path / "step9")
    training.step()
    assert under_way.written.result(60) is None
    loaded = saving.load(tmp_path / "step9")
    assert torch.equal(loaded["optimizer"]["moment"], contents[2]), "copied before training went on"


def test_a_writer_that_dies_once_the_weights_went_on_costs_that_save_and_no_other(tmp_path: Path) -> None:
    training, saving = Training(), make_async_checkpointer(writer="process")
    assert isinstance(saving.process, Outliving)
    passed, written_out = threading.Event(), threading.Event()

    def dies() -> None:
        written_out.set()
        assert passed.wait(60)
        assert saving.process.carrier.pid is not None  # type: ignore[union-attr]
        os.kill(saving.process.carrier.pid, signal.SIGKILL)  # type: ignore[union-attr]

    failures = []
    for step in range(4):
        state, path = training.state(), tmp_path / f"step{step}"
        under_way = saving.save(state, path, late=training.late, before_commit=dies if step == 2 else lambda: None)
        assert step != 2 or written_out.wait(60)
        del state
        saving.gate()
        training.step()
        passed.set()
        failures.append(type(under_way.written.exception(60)))
    assert failures == [type(None), type(None), StateGoneError, type(None)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step0", "step1", "step3"]
    saving.close()


def test_the_weights_stay_after_the_checkpointer_is_closed(saving: AsyncCheckpointer, tmp_path: Path) -> None:
    training = Training()
    for step in range(2):
        handed_over(training, saving, tmp_path / f"step{step}")
        saving.gate()
    values = [one.detach().clone() for one in training.late]
    saving.close()
    assert all(torch.equal(one, value) for one, value in zip(training.late, values, strict=True))
    training.step()
    assert torch.equal(training.moment, values[2] + 1)
