"""What a class of faults is: a row of RELIABILITY.md, and how its trials are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from campaign.verdict import Outcome


class Size(StrEnum):
    """How long the campaign takes at most: 3, 10 or 60 minutes on two cores."""

    quick = "quick"
    full = "full"
    nightly = "nightly"


@dataclass(frozen=True)
class Trials:
    """The trials of a class, once what they share is prepared."""

    count: int
    """How many there are (an enumeration), or how many were asked for."""
    run: Callable[[int], Outcome]
    """Trial number, from 0 -> what came. It depends on the number alone, so that one trial can be repeated. An
    exception is a HARD_FAIL with its text."""
    together: int = 2
    """How many may run at once."""


def never_skipped() -> str | None:
    """For classes that run on every machine."""
    return None


@dataclass(frozen=True)
class FaultClass:
    """One class of faults.

    Args:
        key: its name on the command line: `--only kills`.
        title: the name of its row: "kill -9 at a random moment".
        what: what is done to the run, in one or two sentences.
        promises: those of docs/how-checkpoints-work.md that it tests: "L1 L2 L4 L6".
        counts: how many trials are asked for, by size; a size that is not named runs none.
        prepare: (an empty folder, the count, the size) -> the trials.
        skipped: the reason why this machine cannot run it (no superuser, no loop device), or None.
        share: the time that it may take, as a multiple of the other classes'.
        measures: what seconds its trials measure; the row shows the most.
        contender: whose runs meet the fault.
    """

    key: str
    title: str
    what: str
    promises: str
    counts: Mapping[Size, int]
    prepare: Callable[[Path, int, Size], AbstractContextManager[Trials]]
    skipped: Callable[[], str | None] = never_skipped
    share: float = 1.0
    measures: str = ""
    contender: str = "train"
