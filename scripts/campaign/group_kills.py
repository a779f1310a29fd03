"""Kill a command that starts processes, one of these, or all of them, at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from command import Running, running

from campaign.kills import wait_until

KILLS = 3
"""So many starts of the command are killed, one after the other."""
WHAT = ("the command", "a process of it", "all processes")


def kill_starts(
    words: Sequence[str], folder: Path, chance: random.Random, took_s: float, *, codes: Collection[int]
) -> str | None:
    """Start a command in a folder, and kill at a random moment; so often. Returns what is wrong, or None.

    Args:
        took_s: how long the command takes without a fault.
        codes: with which it may end where it is not killed itself.
    """
    for number in range(KILLS):
        what, delay_s = chance.choice(WHAT), took_s * chance.random()
        with running(*words, cwd=folder) as command:
            moment = time.monotonic() + delay_s
            wait_until(command, lambda: time.monotonic() >= moment)  # noqa: B023  (called in this round)
            kill(command, what, chance)
            result = command.end()
        if result.code not in (-signal.SIGKILL, *codes):
            return f"start {number} ends with {result.code} after {what} was killed after {delay_s:.2f} s: {result.err}"
    return None


def kill(command: Running, what: str, chance: random.Random) -> None:
    """Kill one of `WHAT`: the command where it has started no process."""
    processes = [pid for pid in list_group(command.process.pid) if pid != command.process.pid]
    if what == "all processes":
        command.signal(signal.SIGKILL, group=True)
    elif what == "a process of it" and processes:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(processes), signal.SIGKILL)
    else:
        command.signal(signal.SIGKILL)


def list_group(group: int) -> list[int]:
    """The processes of a process group, in order."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # After the name, which may have spaces: the state, the parent, the group.
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(folder.name))
    return sorted(found)
