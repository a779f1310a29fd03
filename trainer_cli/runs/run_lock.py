"""The lock of a run directory, and the exclusive lock of a file."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trainer_cli.errors import RunDirectoryError
from trainer_cli.files import close_private

_READERS_S = 0.1
"""How long to retry a held lock: a reader in `is_locked` holds it only for an instant."""


class RunLock:
    """The held lock of a run directory; released by `release`, `with`, or the end of the process.

    Args:
        descriptors: the open locked files, `.lock` first.
    """

    def __init__(self, descriptors: Iterable[int]) -> None:
        self._descriptors = [*descriptors]

    def name_holder(self) -> None:
        """Write the process id and host, for the message that a second process shows."""
        if self._descriptors:
            # Truncated only under the lock: until then the file names the process that holds it.
            try:
                os.ftruncate(self._descriptors[0], 0)
                os.pwrite(self._descriptors[0], f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            except OSError as error:
                message = f"the lock file of the run directory cannot be written: {error.strerror}. Free space, or"
                raise RunDirectoryError(f"{message} make the disk writable, and start again.") from error

    def hold(self, descriptor: int) -> None:
        """Hold one more locked file."""
        self._descriptors.append(descriptor)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        # Cleared before the close: a second release must not close a descriptor that was reused meanwhile.
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            close_private(descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_file_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def lock_file(descriptor: int) -> None:
    """Lock an open file exclusively. A held lock is retried briefly: `is_locked` of another process may hold it.

    Raises:
        BlockingIOError: another process holds it longer.
    """
    until = time.monotonic() + _READERS_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        # The lock is polled: a blocking flock would wait for a training too, for days.
        time.sleep(_READERS_S / 10)
