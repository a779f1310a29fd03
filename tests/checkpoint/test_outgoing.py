"""Bytes on their way into a file while tensors live in them: how far they come, and what is copied ahead of that."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer_cli.checkpoint.format import outgoing
from trainer_cli.checkpoint.format.memory import Memory
from trainer_cli.checkpoint.format.outgoing import Outgoing, Reach
from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.folder import LocalWritableFolder
from trainer_cli.checkpoint.storage.sink import Blocks
from trainer_cli.checkpoint.threads import WorkerThread
from trainer_cli.config.schema import DigestAlgorithm

PIECE = 4096
PIECES = 16
SIZE = PIECES * PIECE - 100


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(outgoing, "_LARGE_PIECE_BYTES", PIECE)


class Places:
    """What was written from where; something may happen before a piece is."""

    def __init__(self, here: Memory, refuge: Memory, before: Callable[[int], object] = lambda number: None) -> None:
        self.here, self.refuge, self.before = here, refuge, before
        self.pieces: list[tuple[str, int, int]] = []
        self.content = b""
        self.waits: list[tuple[bool, float | None]] = []

    def write(self, data: Any, *, stays: bool = False) -> None:
        self.before(len(self.pieces))
        assert stays
        address = np.frombuffer(data, np.uint8).ctypes.data
        for name, memory in (("here", self.here), ("refuge", self.refuge)):
            if memory.address <= address < memory.address + memory.size_bytes:
                self.pieces.append((name, address - memory.address, len(data)))
        self.content += bytes(data)

    def wait(self, *, but_last: bool = False, timeout_s: float | None = None) -> None:
        self.waits.append((but_last, timeout_s))


@pytest.fixture
def here() -> Memory:
    memory = Memory(SIZE)
    memory.put(os.urandom(SIZE))
    return memory


@pytest.fixture
def refuge() -> Memory:
    return Memory(SIZE)


def nothing(memory: Memory, start: int, end: int) -> None:
    """Nobody looks."""


@pytest.mark.parametrize(
    ("reached", "ahead"),
    [
        ([], 0.5),
        ([None], 0.5),
        ([5.0], 0.0),
        ([1 / 0.9], 0.0),
        ([1.0], 0.1),
        ([0.8], 0.28),
        ([0.1], 0.5),
        ([0.0], 0.5),
        ([2.0, 0.8], 0.0),
        ([0.8, 2.0, 2.0, 2.0], 0.0),
        ([2.0, 0.8, 2.0, 0.8], 0.0),
        ([2.0, 0.8, 0.8, 0.8], 0.28),
        ([0.8, 0.8, 0.8, 2.0, 2.0, 2.0], 0.0),
        ([2.0, 2.0, 2.0, 0.8, 0.8, 0.8], 0.28),
        ([0.8, None], 0.28),
    ],
    ids=str,
)
def test_what_the_better_half_of_the_last_four_saves_did_not_come_to_is_copied_ahead_and_half_at_most(
    reached: list[float | None], ahead: float
) -> None:
    reach = Reach()
    for one in reached:
        reach.note(SimpleNamespace(reached=one, left_after_s=one))  # type: ignore[arg-type]
    assert reach.ahead == pytest.approx(ahead, abs=1e-9)
    assert reach.soonest_s == min([one for one in reached if one is not None][-4:], default=None)


@pytest.mark.parametrize(("ahead", "copied"), [(0.0, 0), (0.01, 1), (0.25, 5), (0.31, 5), (0.5, 9)])
def test_so_much_of_the_end_is_written_from_a_copy_and_the_rest_from_where_it_lives(
    here: Memory, refuge: Memory, ahead: float, copied: int
) -> None:
    sink = Places(here, refuge)
    going = Outgoing(here, SIZE, refuge, ahead=ahead)
    seen: list[tuple[int, int, int]] = []
    going.begin(sink)
    going.send(SIZE, lambda memory, start, end: seen.append((memory.address, start, end)))
    going.end()
    assert sink.content == bytes(here.view(SIZE))
    assert [(start, size) for _, start, size in sink.pieces] == [
        (at, min(PIECE, SIZE - at)) for at in range(0, SIZE, PIECE)
    ]
    assert [name for name, _, _ in sink.pieces] == ["here"] * (PIECES - copied) + ["refuge"] * copied
    addresses = {"here": here.address, "refuge": refuge.address}
    assert seen == [(addresses[name], start, start + size) for name, start, size in sink.pieces]


@pytest.mark.parametrize("ahead", [0.0, 0.25, 0.5])
@pytest.mark.parametrize(
    ("soonest_s", "when"), [*((None, when) for when in range(PIECES)), *((1000, when) for when in range(8))]
)
def test_what_is_written_is_of_the_moment_before_whenever_they_leave(
    here: Memory,
    refuge: Memory,
    ahead: float,
    when: int,
    soonest_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing, "_LARGE_PIECE_BYTES", 3 * PIECE)
    monkeypatch.setattr(outgoing, "_UNDER_WAY", 1)
    content = bytes(here.view(SIZE))
    going = Outgoing(here, SIZE, refuge, ahead=ahead, soonest_s=soonest_s)

    def change() -> None:
        going.leave()
        here.put(bytes(SIZE))

    changing = threading.Thread(target=change)
    sink = Places(here, refuge, lambda number: changing.start() if number == when else None)
    going.begin(sink)
    going.send(SIZE, nothing)
    changing.join()
    assert sink.content == content


def test_nothing_is_copied_or_written_before_it_has_arrived(
    here: Memory, refuge: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "_LARGE_PIECE_BYTES", 3 * PIECE)
    monkeypatch.setattr(outgoing, "_UNDER_WAY", 1)
    content, arrived = bytes(here.view(SIZE)), 5 * PIECE
    here.put(bytes(SIZE - arrived), offset=arrived)
    sink = Places(here, refuge)
    going = Outgoing(here, SIZE, refuge, ahead=0.5, soonest_s=1000)
    going.begin(sink)
    going.send(arrived, nothing)
    here.put(content[arrived:], offset=arrived)
    going.send(SIZE, nothing)
    going.end()
    assert sink.content == content
    assert sink.pieces[-1][0] == "refuge"


def test_who_leaves_waits_for_no_disk_that_reads_copies_alone(here: Memory, refuge: Memory) -> None:
    for copied, waits in ((0, [10.0]), (1, [])):
        going = Outgoing(here, SIZE, refuge, ahead=0.5)
        sink = Places(here, refuge)
        going.begin(sink)
        going.send(PIECES // 4 * PIECE if not copied else SIZE, nothing)
        assert sink.waits.count((False, None)) == copied, "the writer waits for the last that is read where they live"
        going.leave()
        assert [timeout for _, timeout in sink.waits if timeout is not None] == waits
        going.end()


def test_a_file_that_is_begun_again_uses_what_was_copied(here: Memory, refuge: Memory) -> None:
    going = Outgoing(here, SIZE, refuge, ahead=0.5)
    for _ in range(2):
        sink = Places(here, refuge)
        going.begin(sink)
        going.send(SIZE, nothing)
        assert sink.content == bytes(here.view(SIZE))
        assert [name for name, _, _ in sink.pieces] == ["here"] * 7 + ["refuge"] * 9
    going.end()


@pytest.mark.parametrize(
    ("ahead", "leaves_after_s", "reached"),
    [(0.0, 4, 4 / PIECES), (0.5, 4, 4 / PIECES), (0.0, 2 * PIECES, 2.0), (0.5, 12, 12 / PIECES), (0.5, 32, 2.0)],
)
def test_how_far_a_save_came_or_would_have_come_is_told(
    here: Memory,
    refuge: Memory,
    ahead: float,
    leaves_after_s: int,
    reached: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A piece a second from where tensors live, and no time for copies."""
    now = 100.0
    monkeypatch.setattr(outgoing, "monotonic", lambda: now)
    going = Outgoing(here, SIZE, refuge, ahead=ahead)

    def second(memory: Memory, start: int, end: int) -> None:
        nonlocal now
        now += memory is here

    sink = Places(here, refuge)
    going.begin(sink)
    going.send(min(leaves_after_s, PIECES) * PIECE if leaves_after_s < PIECES * (1 - ahead) else SIZE, second)
    if leaves_after_s >= PIECES:
        going.end()
    now = 100.0 + leaves_after_s
    going.leave()
    assert going.reached == pytest.approx(reached, rel=0.01)
    now += 1000
    going.leave()
    assert going.reached == pytest.approx(reached, rel=0.01), "it was left once"
    assert going.left_after_s == leaves_after_s
    going.end()


@pytest.mark.parametrize(
    ("ahead", "soonest_s", "slow", "here_at_most"),
    [
        (0.0, None, range(0), 16),  # nobody knows when
        (0.0, 40, range(0), 16),
        (0.0, 18, range(0), 16),  # 16.6 will be written by then, surely
        (0.0, 17, range(0), 15),
        (0.0, 12, range(0), 11),
        (0.25, 40, range(0), 11),  # as was thought: what is copied already is not uncopied
        (0.5, 60, range(0), 9),  # a better disk than was thought, as the first four pieces tell
        (0.25, 12, range(0), 11),
        (0.0, 20, range(8, 16), 12),  # a disk that slows down midway: 8 in as many seconds, and 4 in the others
        (0.0, 26, range(4), 13),  # one that is slow at first: when the sixth is written, there is time for the others
        (0.0, 2, range(0), 7),  # half at most
    ],
)
def test_what_the_disk_does_not_come_to_by_then_is_copied_ahead(
    here: Memory,
    refuge: Memory,
    ahead: float,
    soonest_s: float | None,
    slow: range,
    here_at_most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A piece a second from where tensors live, or three seconds each."""
    now = 100.0
    monkeypatch.setattr(outgoing, "monotonic", lambda: now)
    going = Outgoing(here, SIZE, refuge, ahead=ahead, soonest_s=soonest_s)

    def look(memory: Memory, start: int, end: int) -> None:
        nonlocal now
        now += 3 if start // PIECE in slow else 1

    sink = Places(here, refuge)
    going.begin(sink)
    going.send(SIZE, look)
    going.end()
    assert sink.content == bytes(here.view(SIZE))
    assert [name for name, _, _ in sink.pieces].count("here") == here_at_most


def test_the_pace_of_a_disk_is_told_by_what_is_written_while_it_is_looked_at(
    here: Memory, refuge: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a first part nobody looks, as some of it had not arrived; there is time for all of it."""
    now = 100.0
    monkeypatch.setattr(outgoing, "monotonic", lambda: now)
    going, sink = Outgoing(here, SIZE, refuge, soonest_s=100), Places(here, refuge)

    def second(memory: Memory, start: int, end: int) -> None:
        nonlocal now
        now += 1

    going.begin(sink)
    going.send(8 * PIECE, second)
    going.send(SIZE, second)
    going.end()
    assert [name for name, _, _ in sink.pieces] == ["here"] * PIECES


@pytest.mark.parametrize(
    ("soonest_s", "sizes"),
    [
        (None, [1] * 64),  # nobody knows when somebody comes
        (200, [1] * 13 + [4] * 12 + [3]),  # three may be under way: so many bytes are no proof of any pace
        (60, [1] * 17 + [4] * 6 + [1] * 23),  # what is under way at 17 is there by then; from 40 on somebody may come
        (20, [1] * 64),  # too slow a disk
    ],
)
def test_pieces_are_large_as_long_as_nobody_is_expected(
    soonest_s: float | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times as large; a small one takes a second."""
    now = 100.0
    monkeypatch.setattr(outgoing, "monotonic", lambda: now)
    monkeypatch.setattr(outgoing, "_LARGE_PIECE_BYTES", 4 * PIECE)
    size = 64 * PIECE
    here, refuge = Memory(size), Memory(size)
    here.put(os.urandom(size))
    going, sink = Outgoing(here, size, refuge, soonest_s=soonest_s), Places(here, refuge)

    def second(memory: Memory, start: int, end: int) -> None:
        nonlocal now
        now += (end - start) / PIECE

    going.begin(sink)
    going.send(size, second)
    going.end()
    assert sink.content == bytes(here.view(size))
    assert [size // PIECE for _, _, size in sink.pieces] == sizes


def test_what_is_copied_ahead_keeps_pace_with_what_is_written(
    here: Memory, refuge: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[tuple[int, int]] = []
    hand_over = WorkerThread.hand_over

    def noted(thread: WorkerThread[Any], part: tuple[int, int]) -> None:
        parts.append(part)
        hand_over(thread, part)

    monkeypatch.setattr(WorkerThread, "hand_over", noted)
    going, sink = Outgoing(here, SIZE, refuge, ahead=0.5), Places(here, refuge)
    going.begin(sink)
    going.send(SIZE, nothing)
    going.end()
    assert max(end - start for start, end in parts) <= 2 * PIECE
    assert [end for _, end in parts] == [SIZE, *(start for start, _ in parts[:-1])]
    assert parts[-1][0] <= SIZE / 2


def test_a_save_that_failed_midway_teaches_nothing(here: Memory, refuge: Memory) -> None:
    def full(number: int) -> None:
        if number == 3:
            raise OSError("no space left")

    going, reach = Outgoing(here, SIZE, refuge), Reach()
    going.begin(Places(here, refuge, full))
    with pytest.raises(OSError, match="no space"):
        going.send(SIZE, nothing)
    going.end()
    going.leave()
    reach.note(going)
    assert (going.reached, reach.ahead) == (None, 0.5)


def test_where_the_wait_for_the_copier_is_broken_off_whoever_writes_waits_for_it(
    here: Memory, refuge: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C at the gate: the save is finished all the same, and holds no byte that was not copied."""
    content, may_copy, copy, wait = bytes(here.view(SIZE)), threading.Event(), Memory.copy, WorkerThread.wait

    def late(memory: Memory, *about: int) -> None:
        assert threading.current_thread().name != "checkpoint-copy" or may_copy.wait(60)
        copy(memory, *about)

    def broken_off(thread: WorkerThread[Any]) -> None:
        raise KeyboardInterrupt

    class Interrupts(Places):
        def wait(self, *, but_last: bool = False, timeout_s: float | None = None) -> None:
            if len(self.pieces) == 4:
                monkeypatch.setattr(WorkerThread, "wait", broken_off)
                with pytest.raises(KeyboardInterrupt):
                    going.leave()
                monkeypatch.setattr(WorkerThread, "wait", wait)
                may_copy.set()

    monkeypatch.setattr(Memory, "copy", late)
    going, sink = Outgoing(here, SIZE, refuge, ahead=0.5), Interrupts(here, refuge)
    going.begin(sink)
    going.send(SIZE, nothing)
    assert may_copy.is_set()
    assert sink.content == content
    going.end()


class Slow(Disk):
    """Counts what it wrote, one piece after the other."""

    block_bytes = PIECE

    def __init__(self) -> None:
        self.count = 0
        self._one_at_a_time = threading.Lock()

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        with self._one_at_a_time:
            threading.Event().wait(0.002)
            self.count += 1
        return super().write(fd, data, offset)


@pytest.mark.parametrize("ahead", [0.0, 0.5])
@pytest.mark.parametrize("left_after", range(1, 20, 3))
def test_who_leaves_waits_for_a_few_pieces_however_many_there_are_to_come(
    tmp_path: Path, ahead: float, left_after: int
) -> None:
    size = 64 * PIECE
    here, refuge, disk = Memory(size), Memory(size), Slow()
    here.put(os.urandom(size))
    content = bytes(here.view(size))
    going = Outgoing(here, size, refuge, ahead=ahead)
    folder = LocalWritableFolder(tmp_path, Blocks(disk), DigestAlgorithm.xxh3_128)

    def write() -> None:
        with folder.create("f") as sink:
            going.begin(sink)
            going.send(size, nothing)

    writing = threading.Thread(target=write)
    writing.start()
    while disk.count < left_after:
        threading.Event().wait(0.001)
    before = disk.count
    going.leave()
    assert disk.count - before <= 8
    here.put(bytes(size))
    writing.join()
    going.end()
    assert (tmp_path / "f").read_bytes() == content


def test_of_a_copy_nobody_asks_how_far_it_came(here: Memory, refuge: Memory) -> None:
    going = Outgoing(here, SIZE)
    going.begin(Places(here, refuge))
    going.send(SIZE, nothing)
    going.leave()
    assert going.reached is None
