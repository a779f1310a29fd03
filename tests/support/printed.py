"""What is printed: streams to print to, and errors read back as the messages that they are in logs and in Python."""

from __future__ import annotations

import io
import re

from trainer_cli.errors import ConfigError, ConfigErrors, TrainError

_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (?!(INFO|WARNING|ERROR|DEBUG|METRICS) )")
PLACE, HELP = "  --> ", "help: "


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, and keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def message(printed: str) -> str:
    """The message of the error, or of all mistakes, at the end of what was printed on stderr."""
    text = printed[printed.index("error: ") :]
    *blocks, last = text.rstrip("\n").split("\n\n")
    if blocks and last == f"Found {len(blocks)} mistakes.":
        parts = [_parts(block) for block in blocks]
        return str(ConfigErrors([ConfigError(what, location=place, hint=cure) for what, place, cure in parts])).rstrip()
    what, place, cure = _parts(text.rstrip("\n"))
    return str(TrainError(f"{what}\n" if "\n" in what else what, where=place, cure=cure))


def untimed(printed: str) -> str:
    """What was printed where stderr is not a terminal, without the time in front of each line."""
    return _STAMP.sub("", printed)


def _parts(block: str) -> tuple[str, str | None, str | None]:
    what, place, cure = block.removeprefix("error: "), None, None
    if f"\n{HELP}" in what:
        what, _, cure = what.partition(f"\n{HELP}")
    if f"\n{PLACE}" in what:
        what, _, place = what.partition(f"\n{PLACE}")
    return what, place, cure
