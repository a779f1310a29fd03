"""Read a text file that another process appends to, without reading any line twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_BLOCK_BYTES = 1 << 16
_MARK_BYTES = 256


class Lines(NamedTuple):
    """Complete lines, without their ends."""

    lines: list[bytes]
    restarted: bool = False
    """Whether the file was cut back or replaced since the last call: these lines then are its last ones again."""


class GrowingFile:
    """Returns at each call the lines that came since the last one; the first call returns the last `most` lines.

    A line without its end is returned once it is complete. A file that is missing has no lines. When a resume cuts
    the file back, or replaces it, reading starts again with its last `most` lines.
    """

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._most = most
        self._seen: tuple[int, int, int] | None = None
        """Inode, size and time of change at the last call."""
        self._offset = 0
        """Bytes up to the end of the last line that was returned."""
        self._mark = b""
        """The bytes before `_offset`: if they differ, the file was cut back and has grown again."""

    def read(self) -> Lines:
        """The new lines.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            restarted, self._seen, self._offset, self._mark = self._seen is not None, None, 0, b""
            return Lines([], restarted)
        try:
            return self._new_lines(descriptor)
        finally:
            os.close(descriptor)

    def _new_lines(self, descriptor: int) -> Lines:
        found, before = os.fstat(descriptor), self._seen
        self._seen = found.st_ino, found.st_size, found.st_mtime_ns
        if self._seen == before:
            return Lines([])
        marked = os.pread(descriptor, len(self._mark), self._offset - len(self._mark))
        restarted = before is not None and (self._seen[0] != before[0] or marked != self._mark)
        begins = before is None or restarted
        if begins:
            self._offset, self._mark = _begin_of_last(descriptor, found.st_size, self._most), b""
        new = os.pread(descriptor, max(0, found.st_size - self._offset), self._offset)
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        self._mark = (self._mark + new)[-_MARK_BYTES:]
        lines = new.splitlines()
        return Lines(lines[max(0, len(lines) - self._most) :] if begins else lines, restarted)


def _begin_of_last(descriptor: int, size: int, lines: int) -> int:
    """An offset at which a line begins, with at least so many complete lines after it, if the file has them."""
    length = _BLOCK_BYTES
    while length < size:
        content = os.pread(descriptor, length, size - length)
        if content.count(b"\n") > lines:
            return size - length + content.index(b"\n") + 1
        length *= 2
    return 0
