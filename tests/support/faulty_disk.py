"""Faults on demand: a disk whose N-th operation fails, tears, hangs or is the process's last."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from trainer_cli.storage import Disk

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

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        def half() -> int:
            return super(FaultyDisk, self).write(fd, data[: len(data) // 2], offset)

        return self._do("write", fd, lambda: super(FaultyDisk, self).write(fd, data, offset), half)

    def exchange(self, first: Path, second: Path) -> None:
        self._do("exchange", second, lambda: super(FaultyDisk, self).exchange(first, second))

    def link(self, old: Path, new: Path) -> None:
        self._do("link", new, lambda: super(FaultyDisk, self).link(old, new))

    def _do(self, name: str, on: str | Path | int, act: Callable[[], T], half: Callable[[], T] | None = None) -> T:
        self.operations.append(f"{name} {'file' if isinstance(on, int) else os.path.basename(on)}")
        # Counted before it is done: a fault is named by the number of its operation.
        count = len(self.operations)
        if self.at is None or count < self.at or (count > self.at and not self.persistent):
            return act()
        if self.fault is Fault.error:
            raise OSError(self.number, os.strerror(self.number), None if isinstance(on, int) else str(on))
        if self.fault is Fault.delay:
            time.sleep(self.delay_s)
            return act()
        if self.fault is Fault.tear:
            # The process ends here, so an error cannot be reported.
            with suppress(OSError):
                (half or act)()
        # Not an exception: cleanup code must not run, as it does not in a power cut.
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def _faulty(name: str) -> Callable[..., Any]:
    """An operation of the disk that may fail; its first argument is the path or the file."""
    operation = getattr(Disk, name)

    def faulty(self: FaultyDisk, on: str | Path | int, /, *arguments: Any, **options: Any) -> Any:
        return self._do(name.removesuffix("_to_lock"), on, lambda: operation(self, on, *arguments, **options))

    return faulty


for _name in (
    "mkdir", "open_new", "open", "open_to_lock", "bypass_cache", "truncate", "read", "fsync", "fsync_dir", "rename",
    "unlink", "rmdir", "listdir", "stat",
):  # fmt: skip
    setattr(FaultyDisk, _name, _faulty(_name))
