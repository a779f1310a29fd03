"""How much memory this process has, and how much more it can have."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def resident_bytes(proc: Path = _PROC) -> int | None:
    """Resident memory now; None without the counters of Linux in the folder `proc`."""
    try:
        pages = int((proc / "self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize()


def peak_resident_bytes() -> int:
    """The largest resident memory since the process began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In bytes on macOS, in KiB elsewhere.
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int | None:
    """Memory that this process can allocate without swapping, within its control groups; None if unknown."""
    machine = machine_bytes()
    limits = (_free_bytes() if machine is None else machine, *_control_group_bytes())
    return min([size_bytes for size_bytes in limits if size_bytes is not None], default=None)


def machine_bytes(proc: Path = _PROC) -> int | None:
    """Memory that the machine can give without swapping; None without the counters of Linux in the folder `proc`."""
    try:
        return _parse_table((proc / "meminfo").read_text(encoding="ascii"))["MemAvailable:"] * 1024
    except (OSError, ValueError, KeyError):
        return None


def _free_bytes() -> int | None:
    """Free memory of the machine; None if the system does not tell it."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * resource.getpagesize()
    except (OSError, ValueError):
        return None


def _control_group_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Free memory of each control group (version 2) of this process: a container, a batch job, a service."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers:
            continue
        # In a container the path may be one of the host, while the group itself is mounted at the root.
        group = root / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            try:
                limit = int((folder / "memory.max").read_text(encoding="ascii"))
                used = int((folder / "memory.current").read_text(encoding="ascii"))
                cached = _parse_table((folder / "memory.stat").read_text(encoding="ascii"))["inactive_file"]
            except (OSError, ValueError, KeyError):
                continue
            # Inactive pages of the page cache count as used, but are freed on demand.
            yield max(limit - used + cached, 0)


def _parse_table(text: str) -> dict[str, int]:
    """First word of each line -> the number after it."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
