"""Copies in shares: whatever the size and however many threads, the bytes and nothing beside them."""

from __future__ import annotations

import threading
from random import Random

import pytest
import torch

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


def test_where_no_thread_can_be_had_the_caller_copies_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory, source = Memory(2 * LARGE), source_of(2 * LARGE)
    with Copying(memory, 4) as copying:
        copying.copy(source.data_ptr(), 2 * LARGE, 0)
        copying.wait()
    assert torch.equal(memory.tensor[: 2 * LARGE], source)
    memory.close()


@pytest.mark.parametrize("late", [True, False])
def test_an_image_copies_as_many_at_once_as_the_training_has_threads(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Counting(Copying):
        def __init__(self, memory: Memory, threads: int) -> None:
            asked.append(threads)
            super().__init__(memory, threads)

    monkeypatch.setattr("trainer_cli.checkpoint.format.image.Copying", Counting)
    before = torch.get_num_threads()
    weights = {str(number): torch.randn(LARGE // 4 + number) for number in range(40)}
    image = TensorsImage()
    try:
        torch.set_num_threads(2)
        image.plan(weights)
        image.take({one.data_ptr() for one in weights.values()} if late else ())
        told = list(image.copy_late())
    finally:
        torch.set_num_threads(before)
    assert told == ([here for here in told if here % 4096 == 0] if late else [])
    assert bool(told) == late
    image.finish()
    for entry, offset in image._slots:
        kept = image._memory.tensor[offset : offset + entry.size_bytes].view(torch.float32)  # type: ignore[union-attr]
        assert torch.equal(kept, weights[entry.name.rpartition("/")[2]])
    assert set(asked) == {2}
    image.close()
