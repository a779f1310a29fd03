"""The resident memory of this process, now and at its peak."""

from __future__ import annotations

import resource
import sys
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
