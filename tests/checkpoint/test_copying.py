"""Copies in shares: whatever the size and however many threads, the bytes and nothing beside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from random import Random

import pytest
import torch

from trainer_cli.checkpoint.asynchronous import make_async_checkpointer
from trainer_cli.checkpoint.format import copying
from trainer_cli.checkpoint.format.copying import Copying
from trainer_cli.checkpoint.format.image import TensorsImage
from trainer_cli.checkpoint.format.memory import Memory

LARGE = copying._LARGE_BYTES
SIZES = [0, 1, LARGE - 1, LARGE, LARGE + 1, LARGE + 4097, 3 * LARGE + 12_345]


def source_of(size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(Random(size_bytes).randbytes(size_bytes) or b"\0"), dtype=torch.uint8)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 64])
def test_all_bytes_arrive_and_none_beside_them(threads: int) -> None:
    for size_bytes in SIZES:
        memory, source = Memory(size_bytes + 200), source_of(size_bytes)
        memory.tensor.fill_(7)
        with Copying(memory, threads) as copying:
            copying.copy(source.data_ptr(), size_bytes, 100)
            copying.wait()
            assert torch.equal(memory.tensor[100 : 100 + size_bytes], source[:size_bytes])
        assert bool((memory.tensor[:100] == 7).all())
        assert bool((memory.tensor[100 + size_bytes :] == 7).all())
        memory.close()


@pytest.mark.parametrize(
    ("threads", "size", "others"), [(1, LARGE, 0), (3, LARGE - 1, 0), (2, LARGE, 1), (9, LARGE, 3)]
)
def test_threads_are_there_for_large_copies_alone_and_gone_at_the_end(threads: int, size: int, others: int) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "checkpoint-copy"]

    memory, source = Memory(size), source_of(size)
    with Copying(memory, threads) as copying:
        copying.copy(source.data_ptr(), size, 0)
        assert len(names()) == others
        copying.wait()
    assert names() == []
    memory.close()


def test_where_no_thread_can_be_had_the_caller_copies_all(no_threads: None) -> None:
    memory, source = Memory(2 * LARGE), source_of(2 * LARGE)
    with Copying(memory, 4) as copying:
        copying.copy(source.data_ptr(), 2 * LARGE, 0)
        copying.wait()
    assert torch.equal(memory.tensor[: 2 * LARGE], source)
    memory.close()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Held(Copying):
    """Its other threads do nothing before they may."""

    may: threading.Event

    def _carry_out(self, share: tuple[int, int, int]) -> None:
        assert self.may.wait(60)
        super()._carry_out(share)


def image_of(weights: dict[str, torch.Tensor]) -> TensorsImage:
    image = TensorsImage()
    image.plan(weights)
    return image


def kept(image: TensorsImage, weights: dict[str, torch.Tensor]) -> bool:
    """Whether what lies in the image is what the weights are."""
    assert image._memory is not None
    raw = {
        entry.name: image._memory.tensor[offset : offset + entry.size_bytes] for entry, offset in image._arranged.slots
    }
    return {*raw} == {*weights} and all(
        torch.equal(raw[name].view(torch.float32), one) for name, one in weights.items()
    )


def test_what_is_copied_at_the_boundary_is_whole_when_training_goes_on(two_threads, monkeypatch):
    monkeypatch.setattr(Held, "may", threading.Event(), raising=False)
    monkeypatch.setattr("trainer_cli.checkpoint.format.image.Copying", Held)
    weights = {str(number): torch.randn(LARGE + number) for number in range(4)}
    image, returned = image_of(weights), threading.Event()
    taking = threading.Thread(target=lambda: (image.take(), returned.set()))
    taking.start()
    assert not returned.wait(0.3)
    Held.may.set()
    taking.join(60)
    assert returned.is_set()
    assert kept(image, weights)
    image.close()


def test_a_state_that_several_threads_copied_loads_as_it_was(two_threads, tmp_path):
    weights = {str(number): torch.randn(LARGE // 4 * 3 + number) for number in range(20)}
    keeper = make_async_checkpointer(writer="thread")
    for step in range(1, 4):
        for one in weights.values():
            one += step
        # The first copy is whole at the boundary, the others behind it.
        late = list(weights.values())
        keeper.save({"model": weights}, tmp_path / f"step{step}", late=late)
        keeper.gate()
        expected = {name: one.clone() for name, one in weights.items()}
        for one in weights.values():
            one.zero_()
        keeper.settle()
        for name, one in keeper.load(tmp_path / f"step{step}")["model"].items():
            assert torch.equal(one, expected[name]), (step, name)
        weights.update({name: one.clone() for name, one in expected.items()})
    keeper.close()
