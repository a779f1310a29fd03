"""Reading ahead: every byte is seen in order and gets where it belongs, whatever the parts and the blocks."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_cli.checkpoint.format import block_reader
from trainer_cli.checkpoint.format.block_reader import Part, read_in_order


class Memory:
    """A file in memory that fails from a place on."""

    def __init__(self, content: bytes, good: int | None = None) -> None:
        self.content, self.good = content, len(content) if good is None else good
        self.size_bytes = len(content)
        self.reading = 0
        self._lock = threading.Lock()

    def read_at(self, buffers, offset):
        with self._lock:
            self.reading += 1
        try:
            for buffer in buffers:
                if offset + len(buffer) > self.good:
                    raise OSError(5, f"fails at {offset}")
                buffer[:] = self.content[offset : offset + len(buffer)]
                offset += len(buffer)
        finally:
            with self._lock:
                self.reading -= 1


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_reader, "BLOCK_BYTES", 16)
        patch.setattr(block_reader, "_MOST_PIECES", 4)
        yield


@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["into", "give", "nowhere"])), max_size=30),
    before=st.integers(0, 20),
)
def test_every_byte_is_seen_in_order_and_gets_to_its_part(sizes, before):
    content = bytes(index * 7 % 251 for index in range(before + sum(size for size, _ in sizes)))
    got = [bytearray(size) for size, _ in sizes]
    done, seen = [], bytearray()

    def giver(index):
        def give(piece, at):
            got[index][at : at + len(piece)] = piece

        return give

    def parts():
        for index, (size, kind) in enumerate(sizes):
            into = memoryview(got[index]) if kind == "into" else None
            give = giver(index) if kind == "give" else None
            yield Part(size, into, give, done=lambda index=index: done.append(index))

    read_in_order(Memory(content), parts(), before, len(content) - before, seen.extend)
    assert seen == content[before:]
    places = before
    for (size, kind), found in zip(sizes, got, strict=True):
        assert found == (content[places : places + size] if kind != "nowhere" else bytes(size))
        places += size
    assert done == [index for index, (size, _) in enumerate(sizes) if size]


@pytest.mark.parametrize("good", [0, 15, 16, 100, 399])
def test_the_first_failure_is_raised_and_then_nobody_reads_any_more(good):
    source = Memory(bytes(400), good)
    seen = bytearray()
    into = bytearray(400)
    with pytest.raises(OSError, match=f"fails at {good // 16 * 16}"):
        read_in_order(source, [Part(400, memoryview(into))], 0, 400, seen.extend)
    assert len(seen) == good // 16 * 16
    assert source.reading == 0


def test_spare_blocks_are_used_again():
    made = []

    def new_spare(size_bytes):
        made.append(memoryview(bytearray(size_bytes)))
        return made[-1]

    read_in_order(Memory(bytes(16 * 500)), [Part(16 * 500)], 0, 16 * 500, lambda view: None, new_spare)
    assert len(made) <= block_reader._AHEAD
