"""Locks on a checkpoint's manifest: a reader holds a shared one, a removal or replacement needs the exclusive one.

`amend` gives a checkpoint a new manifest while readers hold a lock on the old one. The old file therefore keeps a
second name (`SUPERSEDED_PREFIX`) until its last reader ends, and a removal locks these files too.
"""

from __future__ import annotations

import errno
import logging
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from trainer_cli.layout import MANIFEST_FILE
from trainer_cli.storage.disk import Disk, exists, is_same_file
from trainer_cli.storage.hidden_names import SUPERSEDED_PREFIX

logger = logging.getLogger(__name__)

POLL_S = 0.005
"""Time between two attempts to take a lock."""
_READERS_S = 60.0
"""Maximum time that a replacement waits for readers of the old checkpoint."""


def lock_out_readers(disk: Disk, folder: Path, stack: ExitStack) -> bool:
    """Hold the exclusive lock of a checkpoint until `stack` ends; False if the checkpoint is being read."""
    fd = disk.open_to_lock(folder / MANIFEST_FILE)
    stack.callback(disk.close, fd)
    # Without waiting: a removal is tried again later, and must not hold up a save.
    if not disk.lock(fd, exclusive=True):
        return False
    for old in _superseded(disk, folder):
        # A crash in `amend` leaves a second name of the manifest itself, which is locked already.
        if not is_same_file(disk, fd, old):
            old_fd = disk.open_to_lock(old)
            stack.callback(disk.close, old_fd)
            if not disk.lock(old_fd, exclusive=True):
                return False
    return True


def wait_for_readers(disk: Disk, folder: Path, stack: ExitStack) -> None:
    """Wait for the exclusive lock of a checkpoint, and hold it until `stack` ends.

    Raises:
        OSError: EBUSY, a reader has held its lock for too long.
    """
    deadline = time.monotonic() + _READERS_S
    while True:
        with ExitStack() as locks:
            if lock_out_readers(disk, folder, locks):
                # Only complete sets of locks are kept; a partial one is released before the next try, so that two
                # processes cannot wait for each other.
                stack.enter_context(locks.pop_all())
                return
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, "The existing checkpoint is being read", str(folder))
        time.sleep(POLL_S)


def keep_superseded(disk: Disk, folder: Path) -> None:
    """Give the manifest a second name before it is replaced, so that a removal still finds its readers' locks."""
    names = (Path(f"{folder / SUPERSEDED_PREFIX}{serial}") for serial in count())
    disk.link(folder / MANIFEST_FILE, next(name for name in names if not exists(disk, name)))


def delete_superseded(disk: Disk, folder: Path) -> None:
    """Delete the replaced manifests that have no reader. The others are deleted with the checkpoint."""
    try:
        for old in _superseded(disk, folder):
            fd = disk.open_to_lock(old)
            try:
                # A reader of the old manifest holds a shared lock, which a removal must still find.
                if disk.lock(fd, exclusive=True):
                    disk.unlink(old)
            finally:
                disk.close(fd)
    except OSError as error:
        logger.warning("cannot delete a replaced manifest of %s: %s", folder, error)


def _superseded(disk: Disk, folder: Path) -> list[Path]:
    return [folder / file for file in disk.listdir(folder) if file.startswith(SUPERSEDED_PREFIX)]
