"""The folder that a check works in: it goes with the check, and what a killed check left goes with the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "train-check-"
_LOCK = "lock"


@contextmanager
def scratch() -> Generator[Path, None, None]:
    """A new folder among those for temporary files, held for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        held = os.open(folder / f"{_LOCK}.part", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Where a filesystem has no locks, nobody clears up after anybody: only what has a lock is taken for ours.
            with suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Under its name it is never seen unlocked while this process lives.
                os.rename(folder / f"{_LOCK}.part", folder / _LOCK)
            _clear_what_is_left(folder.parent)
            yield folder
        finally:
            os.close(held)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_what_is_left(parent: Path) -> None:
    """Remove folders of checks of this user that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
