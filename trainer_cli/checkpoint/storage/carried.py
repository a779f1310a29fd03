"""A disk whose slow operations another process carries out, so that they are done although this one is killed.

What is asked here, such as whether something is there, is asked of the disk itself. What is written, brought to rest
and named goes to the carrier, in order, and nobody waits for it before `settle`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.sink import address_of

if TYPE_CHECKING:
    from trainer_cli.checkpoint.process.port import Carrier

_LARGE = 1024 * 1024
"""So much that lies in memory of this process is written by it."""
_MOST_COPIED = 64 * 1024 * 1024
"""So many bytes may be on their way that do not lie in shared memory."""


class CarriedDisk(Disk):
    """For the files of one folder at a time, from `mkdir` to `settle`."""

    def __init__(self, carrier: Carrier, block_bytes: int = Disk.block_bytes) -> None:
        self.block_bytes = block_bytes
        self._carrier = carrier
        self._known: set[int] = set()
        self._copied_bytes = 0
        self._sending = threading.Lock()
        """Two threads write one file. By the time it is closed and named, both are gone."""

    def mkdir(self, path: Path) -> None:
        """Make the folder that all is for. It stays locked as long as anybody is at work on it."""
        super().mkdir(path)
        self._known.clear()
        self._copied_bytes = 0
        self._carrier.begin()
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self.lock(fd, exclusive=True):
                self._carrier.send("hold", files=[fd])
        finally:
            os.close(fd)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        size = len(data)
        start = self._carrier.place_of(address_of(data), size) if size else None
        if start is not None:
            self._have_done("write", fd, offset, start, size)
        elif size >= _LARGE:
            # A copy of it would cost more than to write it here.
            return super().write(fd, data, offset)
        elif size:
            self._send_copy(fd, data, offset)
        return size

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._have_done("truncate", fd, size_bytes)

    def write_back(self, fd: int, start: int, size_bytes: int) -> None:
        self._have_done("write_back", fd, start, size_bytes)

    def fsync(self, fd: int) -> None:
        self._have_done("fsync", fd)

    def close(self, fd: int) -> None:
        if fd in self._known:
            self._known.discard(fd)
            # Where nobody listens any more, whatever comes next tells of it.
            with suppress(OSError):
                self._carrier.send("close", fd)
        super().close(fd)

    def fsync_dir(self, path: Path) -> None:
        self._carrier.send("fsync_dir", str(path.absolute()))

    def rename(self, old: Path, new: Path) -> None:
        self._carrier.send("rename", str(old.absolute()), str(new.absolute()))

    def settle(self) -> None:
        self._carrier.end()

    def let_go(self) -> None:
        self._carrier.forget()

    def _have_done(self, operation: str, fd: int, *about: int, files: Sequence[int] = ()) -> None:
        with self._sending:
            self._tell_of(fd)
            self._carrier.send(operation, fd, *about, files=files)

    def _tell_of(self, fd: int) -> None:
        if fd not in self._known:
            self._carrier.send("open", fd, files=[fd])
            self._known.add(fd)

    def _send_copy(self, fd: int, data: memoryview, offset: int) -> None:
        """What lies in memory of this process goes along as a file without a name."""
        with self._sending:
            self._copied_bytes += len(data)
            if self._copied_bytes > _MOST_COPIED:
                self._carrier.end()
                self._copied_bytes = len(data)
        memory = os.memfd_create("trainer-cli", os.MFD_CLOEXEC)
        try:
            left = data
            while left:
                left = left[os.write(memory, left) :]
            self._have_done("copy", fd, offset, len(data), files=[memory])
        finally:
            os.close(memory)
