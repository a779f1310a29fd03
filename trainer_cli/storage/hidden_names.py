"""Names that hide a folder or a file while it is written, replaced or removed, so that no reader takes it for whole."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

REMOVED_PREFIX = ".removed."
"""Prefix of the manifest's name after the removal of its folder has begun."""
REPLACED_PREFIX = ".replaced."
"""Prefix of the name of a checkpoint that another one is about to replace, where names cannot be swapped."""
SUPERSEDED_PREFIX = ".superseded."
"""Prefix of a replaced manifest: readers that opened it before hold a lock on it."""
_HIDDEN = re.compile(r"\.(tmp|trash|aside)\.(.+)\.([A-Za-z0-9_-]{1,64})\.([0-9]+)(?:-([0-9]+))?")


class Hidden(StrEnum):
    """Why a folder has a hidden name."""

    tmp = "tmp"
    """Being written."""
    trash = "trash"
    """Being removed."""
    quarantined = "aside"
    """Partial or damaged. Never removed by this program."""


class HiddenName(NamedTuple):
    """The parts of a hidden name."""

    kind: Hidden
    name: str
    run_id: str
    attempt: int
    serial: int = 0

    def __str__(self) -> str:
        text = f".{self.kind}.{self.name}.{self.run_id}.{self.attempt}"
        return f"{text}-{self.serial}" if self.serial else text

    @classmethod
    def parse(cls, name: str) -> HiddenName | None:
        """The parts of a hidden name, or None for one that this program does not give."""
        match = _HIDDEN.fullmatch(name)
        if match is None:
            return None
        kind, plain, run_id, attempt, serial = match.groups()
        return cls(Hidden(kind), plain, run_id, int(attempt), int(serial or 0))


def removed_marker(run_id: str) -> str:
    """The manifest's name after the removal of its folder has begun; `sweep` finishes an interrupted removal."""
    return f"{REMOVED_PREFIX}{run_id}"
