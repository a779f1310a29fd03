"""The bottom line of a terminal, kept for a display; whatever is printed scrolls above it.

The terminal itself does this (DECSTBM, as `apt` uses it): lines of other threads, of data workers and of libraries in
C come out whole, and a debugger's prompt can be typed at. Each drawing is one write, so nothing comes in between.
"""

from __future__ import annotations

import atexit
import os
from typing import TextIO

from trainer_cli.terminal import columns

_SAVE, _RESTORE, _TO_END = "\x1b7", "\x1b8", "\x1b[J"
_FEWEST_ROWS = 4


class BottomLine:
    """Keeps the bottom line of the terminal that a stream is connected to, from `draw` to `close`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._size: tuple[int, int] | None = None
        self._pid = os.getpid()
        try:
            self._number: int | None = stream.fileno()
        except (OSError, ValueError):
            self._number = None  # Text in memory, as in tests.

    @property
    def columns(self) -> int:
        """Columns that a line may have: one less than the terminal, whose last one would wrap."""
        return max(columns(self._stream) - 1, 1)

    def draw(self, line: str) -> None:
        """Show a line, which may have colours. A terminal that changed its size, or is too low, is taken note of.

        Raises:
            OSError: the terminal is gone.
        """
        size = self._present_size()
        if size != self._size:
            self.close()
            if size[1] < _FEWEST_ROWS:
                return
            self._size = size
            atexit.register(self.close)
            # The new line moves the cursor off the bottom; setting the region would move it to the top.
            self._write(f"\n{_SAVE}\x1b[1;{size[1] - 1}r{_RESTORE}\x1b[1A")
        self._write(f"{_SAVE}\x1b[{size[1]};1H\x1b[2K{line}{_RESTORE}")

    def close(self) -> None:
        """Give the line back, empty."""
        if self._size is None or os.getpid() != self._pid:
            return
        self._size = None
        atexit.unregister(self.close)
        self._write(f"{_SAVE}\x1b[r{_RESTORE}{_TO_END}")

    def _present_size(self) -> tuple[int, int]:
        try:
            return tuple(os.get_terminal_size(self._number)) if self._number is not None else (80, 24)  # type: ignore[return-value]
        except OSError:
            return (80, 24)

    def _write(self, text: str) -> None:
        if self._number is None:
            self._stream.write(text)
            return
        left = text.encode(errors="replace")
        while left:
            left = left[os.write(self._number, left) :]
