"""Chooses the lines of `train.log` that a reader is shown."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

_MESSAGE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (\w+)")
"""The time and the level at the beginning of a message; its other lines, such as a traceback, have neither."""


class LogLine(NamedTuple):
    """A line of a message, with the time of the message in Unix seconds."""

    time: float
    text: str


class MessageFilter:
    """Yields the lines of messages that are shown; call `shown` with the lines as they are read.

    Messages of the level debug are hidden unless `shows_debug`, as are lines before the first message: they may belong
    to a hidden one.
    """

    def __init__(self, *, shows_debug: bool) -> None:
        self._shows_debug = shows_debug
        self._is_shown = False
        """Whether the last message is shown, to which lines without a time belong."""
        self._time = 0.0

    def shown(self, lines: Iterable[bytes]) -> Iterator[LogLine]:
        """The lines that are shown."""
        for line in lines:
            text = line.decode(errors="replace")
            if (message := _MESSAGE.match(text)) is not None:
                self._is_shown = self._shows_debug or message[2] != "DEBUG"
                with contextlib.suppress(ValueError):
                    self._time = datetime.strptime(message[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            if self._is_shown:
                yield LogLine(self._time, text)
