"""The command, killed at its N-th change to the disk: `python mortal.py N FAULT FILE ARGUMENT...`.

A change is what python asks the system for: each opening of a file to write, write, fsync, renaming, removal and new
folder, of checkpoints, logs and records alike. FAULT is `kill` (before the change) or `tear` (half of a write is done).
With N = 0 the command lives, and FILE lists its changes, and each message `committed ...` in its place among them.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import warm_server

CHANGES = frozenset({
    "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.utime",
})  # fmt: skip
"""Events of sys.addaudithook."""
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Mortal:
    """Counts changes below the current folder, and ends the process at one of them."""

    def __init__(self, at: int, *, tears: bool) -> None:
        self.at = at
        self.tears = tears
        self.changes: list[str] = []
        self._folder = os.getcwd() + os.sep
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Count from here on."""
        sys.addaudithook(self._on_event)
        for name in ("write", "pwrite"):
            setattr(os, name, self._watched_write(getattr(os, name)))
        fsync = os.fsync

        def watched_fsync(fd: Any) -> None:
            self._count("fsync", fd)
            fsync(fd)

        os.fsync = watched_fsync

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _TO_WRITE:
            self._count("open", arguments[0])
        elif event == "os.remove" and not os.path.lexists(arguments[0]):
            # A look for a file that asks for something: how many there are depends on the clock.
            return
        elif event in CHANGES:
            # Of two paths the last is the new one.
            self._count(event, arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0])

    def _watched_write(self, write: Callable[..., int]) -> Callable[..., int]:
        def watched(fd: int, data: Any, *offset: int) -> int:
            if self._count(write.__name__, fd, dies=not self.tears):
                write(fd, memoryview(data).cast("B")[: len(data) // 2], *offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return write(fd, data, *offset)

        return watched

    def _count(self, name: str, on: Any, *, dies: bool = True) -> bool:
        """Count a change; at the chosen one die, or return True."""
        path = os.readlink(f"/proc/self/fd/{on}") if isinstance(on, int) else os.path.abspath(os.fsdecode(on))
        if not path.startswith(self._folder):
            return False
        with self._lock:
            self.changes.append(f"{name.removeprefix('os.')} {path.removeprefix(self._folder)}")
            count = sum(not change.startswith("committed") for change in self.changes)
        if count != self.at:
            return False
        if dies:
            # Not an exception: cleanup code must not run.
            os.kill(os.getpid(), signal.SIGKILL)
        return True


class Marks(logging.Handler):
    """Notes the announcements among the changes."""

    def __init__(self, mortal: Mortal) -> None:
        super().__init__()
        self._mortal = mortal

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("committed"):
            self._mortal.changes.append(record.getMessage())


def main(at: str, fault: str, file: str, *arguments: str) -> int:
    """Run the command."""
    # Deletions are made by the writer thread even where saves are not: waited for, all runs make the same changes.
    if "checkpoint.save_async=false" in arguments:
        warm_server.take_turns()
    mortal = Mortal(int(at), tears=fault == "tear")
    logging.getLogger("trainer_cli").addHandler(Marks(mortal))
    from trainer_cli.__main__ import main as train
    from trainer_cli.storage.disk import Disk

    # So that the files of a small model are written as large ones are: in blocks, past the cache.
    Disk.block_bytes = 4096
    mortal.watch()
    sys.argv[1:] = arguments
    code = train()
    with open(file, "w", encoding="utf-8") as operations:
        operations.writelines(f"{change}\n" for change in mortal.changes)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
