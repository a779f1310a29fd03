"""Faults on demand: a disk whose N-th operation fails, tears, hangs or is the process's last."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from os import stat_result
from pathlib import Path
from typing import TypeVar

from trainer_cli.checkpoint.storage.disk import Disk, StrPath

T = TypeVar("T")


class Fault(StrEnum):
    """What happens at the operation that was named."""

    error = "error"
    """OSError instead of the operation."""
    kill = "kill"
    """The process is killed before it."""
    tear = "tear"
    """Half of a write is done, then the process is killed; other operations are done whole."""
    delay = "delay"
    """It comes late."""


class FaultyDisk(Disk):
    """A disk that works until operation number `at`, counted from 1. `operations` lists what was asked of it.

    `persistent` means that every later operation meets the fault too. Without `at` it only counts. Files of
    `block_bytes` and more count as large, and are written in blocks of that size, a multiple of 4,096.
    """

    def __init__(
        self,
        at: int | None = None,
        fault: Fault = Fault.error,
        *,
        number: int = errno.EIO,
        persistent: bool = False,
        delay_s: float = 0.01,
        block_bytes: int = Disk.block_bytes,
    ) -> None:
        self.block_bytes = block_bytes
        self.at = at
        self.fault = fault
        self.number = number
        self.persistent = persistent
        self.delay_s = delay_s
        self.operations: list[str] = []

    @property
    def struck(self) -> bool:
        """True once the fault has happened."""
        return self.at is not None and len(self.operations) >= self.at

    def mkdir(self, path: Path) -> None:
        self._do("mkdir", path, lambda: super(FaultyDisk, self).mkdir(path))

    def open_new(self, path: Path) -> int:
        return self._do("open_new", path, lambda: super(FaultyDisk, self).open_new(path))

    def open(self, path: StrPath) -> int:
        return self._do("open", path, lambda: super(FaultyDisk, self).open(path))

    def open_to_lock(self, path: StrPath) -> int:
        return self._do("open", path, lambda: super(FaultyDisk, self).open_to_lock(path))

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        self._do("bypass_cache", fd, lambda: super(FaultyDisk, self).bypass_cache(fd, on=on))

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._do("truncate", fd, lambda: super(FaultyDisk, self).truncate(fd, size_bytes))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        def half() -> int:
            return super(FaultyDisk, self).write(fd, data[: len(data) // 2], offset)

        return self._do("write", fd, lambda: super(FaultyDisk, self).write(fd, data, offset), half)

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        return self._do("read", fd, lambda: super(FaultyDisk, self).read(fd, into, offset))

    def fsync(self, fd: int) -> None:
        self._do("fsync", fd, lambda: super(FaultyDisk, self).fsync(fd))

    def fsync_dir(self, path: Path) -> None:
        self._do("fsync_dir", path, lambda: super(FaultyDisk, self).fsync_dir(path))

    def rename(self, old: Path, new: Path) -> None:
        self._do("rename", old, lambda: super(FaultyDisk, self).rename(old, new))

    def link(self, old: Path, new: Path) -> None:
        self._do("link", new, lambda: super(FaultyDisk, self).link(old, new))

    def unlink(self, path: Path) -> None:
        self._do("unlink", path, lambda: super(FaultyDisk, self).unlink(path))

    def rmdir(self, path: Path) -> None:
        self._do("rmdir", path, lambda: super(FaultyDisk, self).rmdir(path))

    def listdir(self, path: StrPath) -> list[str]:
        return self._do("listdir", path, lambda: super(FaultyDisk, self).listdir(path))

    def stat(self, path: StrPath, *, follow: bool = True) -> stat_result:
        return self._do("stat", path, lambda: super(FaultyDisk, self).stat(path, follow=follow))

    def _do(self, name: str, on: StrPath | int, act: Callable[[], T], half: Callable[[], T] | None = None) -> T:
        self.operations.append(f"{name} {'file' if isinstance(on, int) else os.path.basename(on)}")
        count = len(self.operations)
        if self.at is None or count < self.at or (count > self.at and not self.persistent):
            return act()
        if self.fault is Fault.error:
            raise OSError(self.number, os.strerror(self.number), None if isinstance(on, int) else str(on))
        if self.fault is Fault.delay:
            time.sleep(self.delay_s)
            return act()
        if self.fault is Fault.tear:
            with suppress(OSError):
                (half or act)()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")
