"""Read files of JSON lines that another process may append to, such as `metrics.jsonl` and `checkpoints.jsonl`.

A row is a line that holds a JSON object whose step, epoch and time, as far as it has them, are what a run can reach.
Other lines, which a crash truncated or another program wrote, are left out and counted. Text after the last newline is
truncated, or still being written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.bounds import is_amount, is_count, is_time
from trainer_cli.files.durable import FileIdentity

_BLOCK_BYTES = 1 << 16
_MARK_BYTES = 256


class Lines(NamedTuple):
    """Complete lines, without their newlines."""

    lines: list[bytes]
    restarted: bool = False
    """Whether the file was truncated or replaced since the last call: these then are its last lines, read anew."""


class Rows(NamedTuple):
    """The rows among some lines."""

    rows: list[dict[str, Any]]
    restarted: bool = False
    """See `Lines`."""


class GrowingFile:
    """Reads the lines that were appended since the last call; the first call reads the last `most` lines, or all.

    A line without its newline is returned once it is complete. A missing file has no lines. When a resume truncates or
    replaces the file, reading starts again with its last `most` lines.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self._path = path
        self._most = most
        self.unread = 0
        """Number of lines that `read_rows` has left out since it began with the file, without empty ones."""
        self._seen: FileIdentity | None = None
        """The file at the last call."""
        self._offset = 0
        """End, in bytes, of the last line that was returned."""
        self._mark = b""
        """The last bytes before `_offset`: if the file has others there, it was truncated and has grown again."""

    def read(self) -> Lines:
        """The new lines.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            # Not os.open: that opens a directory too, and reading it then raises an error without its name.
            file = open(self._path, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            restarted, self._seen, self._offset, self._mark = self._seen is not None, None, 0, b""
            return Lines([], restarted)
        with file:
            return self._new_lines(file.fileno())

    def read_rows(self, *needed: str) -> Rows:
        """The new lines as rows that have all `needed` keys.

        Raises:
            OSError: the file cannot be read.
        """
        lines, restarted = self.read()
        rows = [row for row in parse_rows(lines) if all(key in row for key in needed)]
        self.unread = sum(bool(line.strip()) for line in lines) - len(rows) + (0 if restarted else self.unread)
        return Rows(rows, restarted)

    def _new_lines(self, descriptor: int) -> Lines:
        """`read` for the open file."""
        status, before = os.fstat(descriptor), self._seen
        self._seen = FileIdentity.of(status)
        if self._seen == before:
            return Lines([])
        # A size that only grew proves nothing: compare the content before the offset.
        mark = os.pread(descriptor, len(self._mark), self._offset - len(self._mark))
        restarted = before is not None and (self._seen.inode != before.inode or mark != self._mark)
        from_last_lines = before is None or restarted
        if from_last_lines:
            start = 0 if self._most is None else _offset_of_last(descriptor, status.st_size, self._most)
            self._offset, self._mark = start, b""
        content = os.pread(descriptor, max(0, status.st_size - self._offset), self._offset)
        # A line without its newline is still being written.
        content = content[: content.rfind(b"\n") + 1]
        self._offset += len(content)
        self._mark = (self._mark + content)[-_MARK_BYTES:]
        lines = content.splitlines()
        if from_last_lines and self._most is not None:
            lines = lines[max(0, len(lines) - self._most) :]
        return Lines(lines, restarted)


def _offset_of_last(descriptor: int, size: int, count: int) -> int:
    """The offset of a line from which at least `count` complete lines follow, or 0 if the file has fewer."""
    # From the end, because a file of a long run has many more lines than are shown.
    length = _BLOCK_BYTES
    while length < size:
        content = os.pread(descriptor, length, size - length)
        if content.count(b"\n") > count:
            return size - length + content.index(b"\n") + 1
        length *= 2
    return 0


def read_rows(file: Path) -> list[dict[str, Any]]:
    """All rows of a file; a missing file has none.

    Raises:
        OSError: it cannot be read.
    """
    return GrowingFile(file).read_rows().rows


def read_last_row(file: Path) -> dict[str, Any]:
    """The last line of a file; empty if the file is missing, or that line is no row."""
    return next(iter(GrowingFile(file, 1).read_rows().rows), {})


def parse_rows(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The rows among complete lines."""
    texts = [line for line in lines if line.strip()]
    try:
        # One array is parsed much faster than line by line.
        values = json.loads(b"[" + b",".join(texts) + b"]")
    except (ValueError, RecursionError):
        values = [parse_object(text) for text in texts]
    return [value for value in values if _is_row(value)]


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None if it holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_row(value: Any) -> bool:
    """Whether a value of JSON is a row, as the head of this module says."""
    if not isinstance(value, dict) or not is_count(value.get("step", 0)):
        return False
    return is_amount(value.get("epoch", 0)) and is_time(value.get("time", 0))
