"""An image in which tensors live: what is written is of the moment when it was taken, whenever they change after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from states import PIECE, WIDE, Training
from test_image import Kept, addresses, written

from trainer_cli.checkpoint.format.image import TensorsImage
from trainer_cli.checkpoint.format.outgoing import StateGoneError

pytestmark = pytest.mark.usefixtures("small_homes")


def taken(image: TensorsImage, training: Training, *, overlapped: bool = True) -> dict[str, bytes]:
    """What is to be written from now on, whatever happens."""
    state = training.state()
    image.plan(state)
    image.take(addresses(*training.late), addresses(*training.weights), overlapped=overlapped)
    contents: dict[str, bytes] = written(state)[0]
    return contents


def settled_in(image: TensorsImage, training: Training) -> None:
    taken(image, training, overlapped=False)
    image.leave()
    assert image.moved() == []
    assert image.is_homeless
    image.build()
    image.settle_in(training.late)
    training.step()


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


def test_a_state_at_home_is_written_from_where_it_lives_and_copied_nowhere_if_there_is_time_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step comes long after the last piece was written."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1
        return now

    monkeypatch.setattr("trainer_cli.checkpoint.format.outgoing.monotonic", clock)
    training, image = Training(), TensorsImage()
    settled_in(image, training)
    places = [one.data_ptr() for one in training.late]
    for has_time in (False, True):
        contents = taken(image, training)
        assert (image.is_lived_in, image.is_homeless) == (True, False)
        folder = Kept()
        image.write(folder, image.copy_late())  # type: ignore[arg-type]
        now += 1e6
        image.leave()
        assert folder.contents == contents
        live = {address + offset for address, size in folder.pieces for offset in range(0, size, 64)}
        assert places[1] in live, "the very memory in which it lives"
        assert (set(places[:3]) <= live) is has_time, "before anybody knows, the end is copied"
        assert [one.data_ptr() for one in training.late] == places


@pytest.mark.parametrize("when", range(11))
def test_weights_change_whenever_the_gate_was_passed_and_what_is_written_is_of_the_moment_before(when: int) -> None:
    training, image = Training(), TensorsImage()
    settled_in(image, training)
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
    settled_in(image, training)
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
    settled_in(image, training)
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
    settled_in(image, training)
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
    settled_in(image, training)
    for number, finite in ((1.0, True), (value, False), (2.0, True)):
        with torch.no_grad():
            training.weights[0][place] = number
        taken(image, training)
        image.write(Kept(), image.copy_late())  # type: ignore[arg-type]
        assert image.is_finite() is finite
        image.leave()


def test_a_file_that_was_given_up_is_written_again_unless_the_weights_changed() -> None:
    training, image = Training(), TensorsImage()
    settled_in(image, training)
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
    settled_in(image, training)
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
    settled_in(image, training)
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
    settled_in(image, training)
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


def test_the_gate_gives_a_disk_that_hangs_up_and_with_it_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_cli.checkpoint.format.outgoing._PATIENCE_S", 0.01)
    training, image, folder = Training(), TensorsImage(), SlowDisk()
    settled_in(image, training)
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
