"""An image in which tensors live: what is written is of the moment when it was taken, whenever they change after it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_image import Kept, addresses, written

from trainer_cli import make_async_checkpointer
from trainer_cli.checkpoint.asynchronous import AsyncCheckpointer
from trainer_cli.checkpoint.format.image import TensorsImage
from trainer_cli.checkpoint.format.outgoing import Outgoing, StateGoneError
from trainer_cli.checkpoint.process.outliving import Outliving
from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.local import LocalStorage

PIECE = 1 << 16
WIDE = 1 << 15


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states are lived in, too, and written in small pieces."""
    monkeypatch.setattr("trainer_cli.checkpoint.format.image._HOME_BYTES", 1)
    monkeypatch.setattr("trainer_cli.checkpoint.format.outgoing._PIECE_BYTES", PIECE)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert [one.name for one in threading.enumerate() if one.name == "checkpoint-copy"] == []


class Training:
    """Two weights and a buffer; `step` changes all of them, as an optimizer does the weights."""

    def __init__(self) -> None:
        self.weights = [torch.nn.Parameter(torch.randn(WIDE)), torch.nn.Parameter(torch.randn(WIDE, 2))]
        self.moment = torch.randn(WIDE)
        self.buffer, self.bias = torch.randn(WIDE), torch.nn.Parameter(torch.randn(3))

    @property
    def late(self) -> list[torch.Tensor]:
        return [*self.weights, self.moment, self.bias]

    def state(self) -> dict[str, Any]:
        named = {"a": self.weights[0].detach(), "b": self.weights[1].detach(), "bias": self.bias.detach()}
        return {"model": {**named, "buffer": self.buffer}, "optimizer": {"moment": self.moment}}

    def step(self) -> None:
        with torch.no_grad():
            for one in self.late:
                one.add_(1)

    def settled_in(self, image: TensorsImage) -> None:
        taken(image, self, overlapped=False)
        image.leave()
        assert image.moved() == []
        assert image.is_homeless
        image.build()
        image.settle_in(self.late)
        self.step()


def taken(image: TensorsImage, training: Training, *, overlapped: bool = True) -> dict[str, bytes]:
    """What is to be written from now on, whatever happens."""
    state = training.state()
    image.plan(state)
    image.take(addresses(*training.late), addresses(*training.weights), overlapped=overlapped)
    contents: dict[str, bytes] = written(state)[0]
    return contents


def copied(image: TensorsImage) -> None:
    """As the gate has it."""
    list(image.copy_late())
    image.leave()


class AtPiece(Kept):
    """Calls something before a piece of the tensor file is written."""

    def __init__(self, number: int, then: Callable[[], object]) -> None:
        super().__init__()
        self.left, self.then = number, then

    def create(self, file: str) -> Any:
        return self._watched(super().create(file))

    @contextmanager
    def _watched(self, manager: Any) -> Iterator[Any]:
        with manager as sink:
            write = sink.write

            def watched(data: Any, *, stays: bool = False) -> None:
                self.left -= 1
                if self.left == -1:
                    self.then()
                write(data, stays=stays)

            sink.write = watched
            yield sink


def test_a_state_at_home_is_written_from_where_it_lives_and_copied_nowhere_if_there_is_time_for_that() -> None:
    training, image = Training(), TensorsImage()
    training.settled_in(image)
    places = [one.data_ptr() for one in training.late]
    for has_time in (False, True):
        contents = taken(image, training)
        assert (image.is_lived_in, image.is_homeless) == (True, False)
        folder, began = Kept(), time.perf_counter()
        image.write(folder, image.copy_late())  # type: ignore[arg-type]
        time.sleep(5 * (time.perf_counter() - began))
        image.leave()
        assert folder.contents == contents
        live = {address + offset for address, size in folder.pieces for offset in range(0, size, 64)}
        assert places[1] in live, "the very memory in which it lives"
        assert (set(places[:3]) <= live) is has_time, "before anybody knows, the end is copied"
        assert [one.data_ptr() for one in training.late] == places


@pytest.mark.parametrize("when", range(11))
def test_weights_change_whenever_the_gate_was_passed_and_what_is_written_is_of_the_moment_before(when: int) -> None:
    training, image = Training(), TensorsImage()
    training.settled_in(image)
    contents = taken(image, training)
    training.buffer.fill_(0)
    passed = threading.Thread(target=lambda: (copied(image), training.step()))
    if when == 0:
        passed.start()
        passed.join()
    # The writer has its turn while a piece is handed over: whoever comes to the gate waits for its end.
    folder = AtPiece(when, lambda: None if when == 0 else passed.start())
    image.write(folder, image.copy_late())  # type: ignore[arg-type]
    if when and passed.ident is not None:
        passed.join()
    assert folder.contents == contents
    assert image.moved() == ([] if passed.ident is None else ["model/a", "model/b", "optimizer/moment", "model/bias"])


def test_the_next_save_is_of_the_next_moment() -> None:
    training, image = Training(), TensorsImage()
    training.settled_in(image)
    for _ in range(4):
        contents = taken(image, training)
        assert image.is_lived_in
        folder = AtPiece(2, lambda: None)
        thread = threading.Thread(target=lambda: image.write(folder, image.copy_late()))  # type: ignore[arg-type] # noqa: B023
        thread.start()
        copied(image)
        training.step()
        thread.join()
        assert folder.contents == contents


def swap_two(training: Training) -> None:
    training.weights[0].data, training.moment.data = training.moment.data, training.weights[0].data


def move_one(training: Training) -> None:
    training.weights[0].data = training.weights[0].data.clone()


def exchange_with_a_buffer(training: Training) -> None:
    training.weights[0].data, training.buffer = training.buffer, training.weights[0].data


@pytest.mark.parametrize("change", [swap_two, move_one, exchange_with_a_buffer])
def test_where_somebody_moved_a_tensor_nothing_is_written_over_and_all_is_copied(
    change: Callable[[Training], None],
) -> None:
    training, image = Training(), TensorsImage()
    training.settled_in(image)
    change(training)
    values = [one.detach().clone() for one in (*training.late, training.buffer)]
    contents = taken(image, training)
    assert not image.is_lived_in
    folder = Kept()
    image.write(folder, image.copy_late())  # type: ignore[arg-type]
    assert folder.contents == contents
    assert all(torch.equal(one, value) for one, value in zip((*training.late, training.buffer), values, strict=True))
    image.leave()
    assert image.moved() == []
    image.build()
    image.settle_in(training.late)
    training.step()
    contents = taken(image, training)
    assert image.is_lived_in, "they moved in again"
    folder = Kept()
    image.write(folder, image.copy_late())  # type: ignore[arg-type]
    assert folder.contents == contents


def test_a_tensor_that_may_change_at_any_time_is_copied_though_it_lives_there() -> None:
    training, image = Training(), TensorsImage()
    training.settled_in(image)
    state = training.state()
    image.plan(state)
    image.take(addresses(*training.weights))
    contents = written(state)[0]
    assert not image.is_lived_in
    training.moment.fill_(0)
    folder = Kept()
    image.write(folder, image.copy_late())  # type: ignore[arg-type]
    assert folder.contents == contents


def test_a_state_that_the_file_has_in_another_order_does_not_move_in() -> None:
    training, image = Training(), TensorsImage()

    def state() -> dict[str, Any]:
        return {"turned": training.weights[1].detach().T, "whole": whole.detach()}

    whole = torch.nn.Parameter(torch.randn(4 * WIDE))
    late = [training.weights[1], whole]
    for lived_in in (False, True):
        image.plan(state())
        image.take(addresses(*late), overlapped=lived_in)
        assert image.is_lived_in is lived_in
        folder = Kept()
        image.write(folder, image.copy_late())  # type: ignore[arg-type]
        assert folder.contents == written(state())[0]
        image.leave()
        assert image.moved() == []
        place = training.weights[1].data_ptr()
        if image.is_homeless:
            image.build()
            image.settle_in(late)
        assert training.weights[1].data_ptr() == place


def test_a_state_that_changes_its_form_again_and_again_moves_in_a_few_times_only() -> None:
    training, image = Training(), TensorsImage()
    lived_in = []
    for turn in range(12):
        state = {**training.state(), "more": [torch.ones(3) for _ in range(turn // 2)]}
        image.plan(state)
        image.take(addresses(*training.late))
        lived_in.append(image.is_lived_in)
        folder = Kept()
        image.write(folder, image.copy_late())  # type: ignore[arg-type]
        assert folder.contents == written(state)[0]
        del state
        image.leave()
        assert image.moved() == []
        if image.is_homeless:
            image.build()
            image.settle_in(training.late)
        training.step()
    assert lived_in == [False, True, False, True, False, True] + [False] * 6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, PIECE // 4 - 1024 - 1, PIECE // 4 - 1024, WIDE - 1])
def test_a_weight_that_is_not_finite_is_found_in_whatever_piece(value: float, place: int) -> None:
    training, image = Training(), TensorsImage()
    training.settled_in(image)
    for number, finite in ((1.0, True), (value, False), (2.0, True)):
        with torch.no_grad():
            training.weights[0][place] = number
        taken(image, training)
        image.write(Kept(), image.copy_late())  # type: ignore[arg-type]
        assert image.is_finite() is finite
        image.leave()


def test_a_file_that_was_given_up_is_written_again_unless_the_weights_changed() -> None:
    training, image = Training(), TensorsImage()
    training.settled_in(image)
    contents = taken(image, training)
    for _ in range(2):
        folder = Kept()
        image.write(folder, image.copy_late())  # type: ignore[arg-type]
        assert folder.contents == contents
    copied(image)
    training.step()
    with pytest.raises(StateGoneError, match="its writer failed midway"):
        image.write(Kept(), image.copy_late())  # type: ignore[arg-type]


def test_where_the_gate_comes_first_a_file_can_be_given_up_and_written_again() -> None:
    training, image = Training(), TensorsImage()
    training.settled_in(image)
    contents = taken(image, training)
    copied(image)
    training.step()
    for _ in range(2):
        folder = Kept()
        image.write(folder, image.copy_late())  # type: ignore[arg-type]
        assert folder.contents == contents


@pytest.mark.parametrize("before_any_is_written", [True, False])
def test_weights_that_were_written_where_no_version_tells_are_named(before_any_is_written: bool) -> None:
    training, image = Training(), TensorsImage()
    training.settled_in(image)
    for name, hidden in (("model/b", training.weights[1]), ("optimizer/moment", training.moment)):
        taken(image, training)
        if before_any_is_written:
            hidden.detach().numpy()[...] += 1.3
        image.write(Kept(), image.copy_late())  # type: ignore[arg-type]
        if not before_any_is_written:
            hidden.detach().numpy()[...] += 1.3
        copied(image)
        assert image.moved() == [name]


def test_a_state_that_was_planned_and_never_taken_moves_nobody() -> None:
    training, image = Training(), TensorsImage()
    taken(image, training, overlapped=False)
    image.leave()
    assert image.moved() == []
    image.plan({"first": torch.ones(WIDE), **training.state()})
    places = [one.data_ptr() for one in training.late]
    image.build()
    image.settle_in(training.late)
    assert [one.data_ptr() for one in training.late] == places


def test_memory_that_was_built_for_another_state_is_nobodys_home() -> None:
    training, image = Training(), TensorsImage()
    for state in (training.state(), {"first": torch.ones(WIDE), **training.state()}):
        image.plan(state)
        image.take(addresses(*training.late), overlapped=False)
        del state
        image.leave()
        assert image.moved() == []
        if not image._built:
            image.build()
    places = [one.data_ptr() for one in training.late]
    image.settle_in(training.late)
    assert [one.data_ptr() for one in training.late] == places
    image.build()
    image.settle_in(training.late)
    assert [one.data_ptr() for one in training.late[:3]] != places[:3]


def test_where_less_than_half_may_move_nobody_does() -> None:
    training, image = Training(), TensorsImage()
    others = [one.detach() for one in (training.weights[1], training.moment)]
    taken(image, training, overlapped=False)
    image.leave()
    assert image.moved() == []
    places = [one.data_ptr() for one in training.late]
    image.build()
    image.settle_in(training.late)
    assert [one.data_ptr() for one in training.late] == places
    assert not image.is_homeless, "nor is it tried again"
    del others


class SlowDisk(Kept):
    """Says that what it was handed is written once it is told to; until then it may still be read."""

    def __init__(self) -> None:
        super().__init__()
        self.handed_over, self.may_end = threading.Event(), threading.Event()
        self.waits: list[float | None] = []

    def create(self, file: str) -> Any:
        return self._slow(super().create(file))

    @contextmanager
    def _slow(self, manager: Any) -> Iterator[Any]:
        with manager as sink:
            write, views = sink.write, []

            def hold(data: Any, *, stays: bool = False) -> None:
                views.append(data)
                self.handed_over.set()

            def wait(*, but_last: bool = False, timeout_s: float | None = None) -> None:
                self.waits.append(timeout_s)
                if not self.may_end.wait(60 if timeout_s is None else timeout_s):
                    raise TimeoutError

            sink.write, sink.wait = hold, wait
            yield sink
            for view in views:
                write(view)


def writes(image: TensorsImage, folder: Kept) -> threading.Thread:
    thread = threading.Thread(target=image.write, args=(folder, image.copy_late()))
    thread.start()
    return thread


def test_the_gate_waits_for_what_is_being_written_at_that_moment() -> None:
    training, image, folder = Training(), TensorsImage(), SlowDisk()
    training.settled_in(image)
    taken(image, training)
    writer = writes(image, folder)
    assert folder.handed_over.wait(60)
    gate = threading.Thread(target=copied, args=(image,))
    gate.start()
    while len(folder.waits) < 2:
        gate.join(0.01)
    assert gate.is_alive(), "the disk has not got it yet"
    folder.may_end.set()
    gate.join(60)
    writer.join(60)
    assert not gate.is_alive()


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


def test_no_weight_changes_while_the_disk_reads_it(tmp_path: Path) -> None:
    disk, training = Held(), Training()
    saving = AsyncCheckpointer(storage=lambda root: LocalStorage(root, disk=disk))
    for step in range(3):
        if step == 2:
            disk.asked.clear()
            disk.may.clear()
        values = [one.detach().clone() for one in training.late]
        state = training.state()
        under_way = saving.save(state, tmp_path / f"step{step}", late=training.late)
        del state
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


def test_the_gate_gives_a_disk_that_hangs_up_and_with_it_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_cli.checkpoint.format.outgoing._PATIENCE_S", 0.01)
    training, image, folder = Training(), TensorsImage(), SlowDisk()
    training.settled_in(image)
    taken(image, training)
    writer = writes(image, folder)
    assert folder.handed_over.wait(60)
    with pytest.raises(StateGoneError, match="the disk took more than"):
        copied(image)
    folder.may_end.set()
    writer.join(60)
    contents = taken(image, training)
    assert (image.is_lived_in, image.is_homeless) == (False, False), "a disk that slow gets copies"
    again = Kept()
    image.write(again, image.copy_late())  # type: ignore[arg-type]
    assert again.contents == contents


def test_where_the_gate_fails_the_save_does_and_nothing_of_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, saving = Training(), make_async_checkpointer(writer="thread")
    leave = Outgoing.leave
    for step in range(4):
        state = training.state()
        under_way = saving.save(state, tmp_path / f"step{step}", late=training.late)
        del state
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
        state = training.state()
        under_way = saving.save(state, tmp_path / f"step{step}", late=training.late)
        del state
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
            state = training.state()
            under_way = saving.save(state, tmp_path / f"{number}/step{step}", late=training.late)
            del state
            assert saving.stager.image.is_lived_in is (step > 0)
            saving.gate()
            training.step()
        under_way.written.result(60)
        saving.close()


def test_where_samples_tell_of_writes_the_gate_is_not_waited_for_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, saving = Training(), make_async_checkpointer()
    for step, latest_s in enumerate((0.0, 600.0)):
        monkeypatch.setattr("trainer_cli.checkpoint.staging._LATEST_S", latest_s)
        state = training.state()
        under_way = saving.save(state, tmp_path / f"step{step}", late=training.late)
        del state
        if step == 0:
            saving.gate()
        under_way.written.result(60)
        training.step()
    assert saving.stager.image.is_lived_in
    saving.close()


def test_weights_that_somebody_else_writes_do_not_move(tmp_path: Path) -> None:
    training, saving = Training(), AsyncCheckpointer()
    for step in range(3):
        state = training.state()
        under_way = saving.save(state, tmp_path / f"step{step}", late=training.late)
        del state
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
        under_way = saving.save(training.state(), tmp_path / f"step{step}", late=training.late)
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
        under_way = saving.save(training.state(), tmp_path / f"step{step}", late=training.late)
        if step == 2:
            training.step()
        assert saving.gate() is (step == 2)
        training.step()
        failure = under_way.written.exception(60)
        assert (failure is not None) is (step == 2)
    contents = [one.detach().clone() for one in training.late]
    under_way = saving.save(training.state(), tmp_path / "step9", late=training.late)
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
        saving.save(training.state(), tmp_path / f"step{step}", late=training.late)
        saving.gate()
    values = [one.detach().clone() for one in training.late]
    saving.close()
    assert all(torch.equal(one, value) for one, value in zip(training.late, values, strict=True))
    training.step()
    assert torch.equal(training.moment, values[2] + 1)
