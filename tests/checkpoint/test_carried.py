"""A disk that another process carries out: what lies where that cannot see it is written here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from trainer_cli.checkpoint.format.memory import Memory
from trainer_cli.checkpoint.storage.carried import _LARGE, CarriedDisk


class LatePerson:
    """Carries nothing out before somebody waits for the end."""

    def __init__(self, lent: Memory) -> None:
        self.lent = lent
        self.sent: list[str] = []
        self._work: list[Callable[[], object]] = []
        self._files: dict[int, int] = {}

    def lend(self, file: int, address: int, size_bytes: int) -> None:
        raise AssertionError("it is lent already")

    def take_back(self) -> None:
        """Nothing was lent by this."""

    def is_ready(self) -> bool:
        return True

    def place_of(self, address: int, size_bytes: int) -> int | None:
        start = address - self.lent.address
        return start if start >= 0 and start + size_bytes <= self.lent.size_bytes else None

    def begin(self) -> None:
        self.sent.append("begin")

    def send(self, operation: str, *about: object, files: Sequence[int] = ()) -> None:
        self.sent.append(operation)
        if operation == "open":
            self._files[int(str(about[0]))] = files[0]
        elif operation == "write":
            name, offset, start, size = (int(str(one)) for one in about)
            self._work.append(lambda: os.pwrite(self._files[name], self.lent.view(start + size)[start:], offset))

    def end(self) -> None:
        self.sent.append("end")
        work, self._work = self._work, []
        for one in work:
            one()

    def forget(self) -> None:
        self.sent.append("forget")


@pytest.fixture
def lent() -> Memory:
    memory = Memory(1 << 16)
    memory.put(b"lent" * 1000)
    return memory


@pytest.mark.parametrize(
    ("order", "operations"),
    [
        ("own", []),
        ("own own lent", ["open", "write"]),
        ("lent own own lent own", ["open", "write", "write"]),
    ],
)
def test_a_large_piece_of_ones_own_is_written_here_whether_or_not_what_was_sent_is_carried_out(
    tmp_path: Path, lent: Memory, order: str, operations: list[str]
) -> None:
    carrier = LatePerson(lent)
    disk = CarriedDisk(carrier)
    own = memoryview(bytearray(b"own!" * (_LARGE // 4)))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    expected = b""
    for whose in order.split():
        piece = own if whose == "own" else lent.view(4000)
        assert disk.write(fd, piece, len(expected)) == len(piece)
        expected += bytes(piece)
    assert carrier.sent == operations
    carrier.end()
    assert (tmp_path / "file").read_bytes() == expected
    os.close(fd)


def test_a_small_piece_of_ones_own_goes_along(tmp_path: Path, lent: Memory) -> None:
    carrier = LatePerson(lent)
    disk = CarriedDisk(carrier)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert disk.write(fd, memoryview(bytearray(100)), 0) == 100
    assert carrier.sent == ["open", "copy"]
    os.close(fd)


def test_two_threads_that_write_one_file_tell_of_it_once(tmp_path: Path, lent: Memory) -> None:
    both = threading.Barrier(2)

    class Slow(LatePerson):
        def send(self, operation: str, *about: object, files: Sequence[int] = ()) -> None:
            if operation == "open":
                threading.Event().wait(0.05)
            super().send(operation, *about, files=files)

    def write() -> None:
        both.wait(60)
        disk.write(fd, lent.view(4000), 0)

    carrier = Slow(lent)
    disk = CarriedDisk(carrier)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert carrier.sent == ["open", "write", "write"]
    os.close(fd)
