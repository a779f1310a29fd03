"""Temporary folders that outlive no process: what a killed one has left is removed by the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer_cli.errors import UserError
from trainer_cli.files import locked_file, private_file

_LOCK = "lock"


@contextmanager
def scratch_folder(prefix: str) -> Generator[Path, None, None]:
    """A new folder among those for temporary files, held for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with private_file(folder / f"{_LOCK}.part", os.O_RDWR | os.O_CREAT) as lock:
            # Where a filesystem has no locks, no process removes what others left: only what has a lock counts as ours.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Under its name it is never seen unlocked while this process lives.
                os.rename(folder / f"{_LOCK}.part", folder / _LOCK)
            _clear_what_is_left(folder.parent, prefix)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_what_is_left(parent: Path, prefix: str) -> None:
    """Remove such folders of this user whose processes were killed."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError, UserError):
            # In a folder that all users share, another could have planted a link.
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                # Raises while the process that made it lives.
                with locked_file(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW, wait=False):
                    shutil.rmtree(folder, ignore_errors=True)
