"""Lines at the bottom of a terminal that stay there while other output scrolls above them.

The terminal itself reserves them (DECSTBM, as `apt` does), so that output of other threads, data workers and C
libraries scrolls above, and a debugger's prompt works. Each drawing is one write, so no other output comes in between.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import TextIO

from trainer_cli.terminal import columns

_SAVE, _RESTORE, _TO_END = "\x1b7", "\x1b8", "\x1b[J"
_FEWEST_ROWS = 3
"""Rows that must remain for other output."""


class BottomLines:
    """Reserves the bottom lines of the terminal of a stream, from `draw` to `close`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._size: tuple[int, int] | None = None
        self._count = 0
        self._pid = os.getpid()
        try:
            self._number: int | None = stream.fileno()
        except (OSError, ValueError):
            self._number = None  # Text in memory, as in tests.

    @property
    def columns(self) -> int:
        """Columns that a line may have: one less than the terminal, whose last one would wrap."""
        return max(columns(self._stream) - 1, 1)

    @property
    def rows(self) -> int:
        """Rows of the terminal now."""
        return self._present_size()[1]

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines, which may have colours. The size of the terminal is read again; one of few rows shows nothing.

        Raises:
            OSError: the terminal is gone.
        """
        size, count = self._present_size(), len(lines)
        if size != self._size or count != self._count:
            self.close()
            if size[1] < _FEWEST_ROWS + count:
                return
            self._size, self._count = size, count
            atexit.register(self.close)
            # New lines scroll what is at the bottom up. The cursor is saved, because setting the region moves it.
            new_lines = "\n" * count
            self._write(f"{new_lines}{_SAVE}\x1b[1;{size[1] - count}r{_RESTORE}\x1b[{count}A")
        first_row = size[1] - count + 1
        drawn = "".join(f"\x1b[{first_row + index};1H\x1b[2K{line}" for index, line in enumerate(lines))
        self._write(f"{_SAVE}{drawn}{_RESTORE}")

    def close(self) -> None:
        """Clear and release the lines."""
        # A forked child, such as a data worker, must not change the terminal when it exits.
        if self._size is None or os.getpid() != self._pid:
            return
        self._size = None
        atexit.unregister(self.close)
        self._write(f"{_SAVE}\x1b[r{_RESTORE}{_TO_END}")

    def _present_size(self) -> tuple[int, int]:
        """Columns and rows of the terminal; 80 and 24 if it has no size."""
        try:
            return tuple(os.get_terminal_size(self._number)) if self._number is not None else (80, 24)  # type: ignore[return-value]
        except OSError:
            return (80, 24)

    def _write(self, text: str) -> None:
        """Write a text to the terminal at once."""
        if self._number is None:
            self._stream.write(text)
            return
        # Not by the stream, which may split a drawing into several writes.
        content = text.encode(errors="replace")
        while content:
            content = content[os.write(self._number, content) :]
