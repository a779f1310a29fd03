"""Power cuts of an ext4 file system, by its own ioctl. The superuser may shut it down."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_EXT4_IOC_SHUTDOWN = 0x8004587D
_FLUSHED, _NOT_FLUSHED = 1, 2
"""EXT4_GOING_FLAGS_LOGFLUSH and EXT4_GOING_FLAGS_NOLOGFLUSH."""


def shut_down(disk: str | Path, *, flush_journal: bool = False) -> None:
    """Shut an ext4 down: what is not on its device is lost, and every access fails from now on.

    Without `flush_journal` the journal in memory is lost too, as in a power cut.
    """
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _FLUSHED if flush_journal else _NOT_FLUSHED))
    finally:
        os.close(descriptor)
