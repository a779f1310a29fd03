"""Failures of a save because of the disk: what a person reads, and the check for room before a save begins."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.checkpoint.disk_space import FreeSpace, NeededSpace, files_of_checkpoint, why_no_room
from trainer_cli.errors import DISK_CURES, NO_SPACE, NoSpaceError, NotDurableError, SaveError, disk_cure
from trainer_cli.files import is_url
from trainer_cli.storage import UnsyncedError
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.storage import Storage


def check_room(storage: Storage, where: str, size_bytes: int, files: Mapping[str, bytes], world_size: int = 1) -> None:
    """Check that a checkpoint fits on the disk and leaves room for the logs, before any of it is written.

    Args:
        size_bytes: size of the state, of all ranks together.
        files: the small files in it: name -> content.

    Raises:
        NoSpaceError: it does not fit, with what it needs and what is free.
    """
    needed = NeededSpace(size_bytes + sum(map(len, files.values())), files_of_checkpoint(world_size, len(files)))
    if not size_bytes or why_no_room(needed, FreeSpace(storage.free_bytes(), storage.free_files())) is None:
        return
    # Another thread may be deleting checkpoints that were removed: count what it will free. In this order, because a
    # file that is deleted between the two calls would otherwise be counted by neither.
    removed_bytes, free_bytes = storage.removed_bytes(), storage.free_bytes()
    free = FreeSpace(None if free_bytes is None else free_bytes + removed_bytes, storage.free_files())
    if (why := why_no_room(needed, free)) is not None:
        raise NoSpaceError(
            f"the checkpoint was not started: {why}",
            where=where,
            cure=f"{older_ones(where)} {DISK_CURES[errno.ENOSPC]}",
        )


def disk_error(
    error: OSError, where: str | Path, size_bytes: int | None = None, storage: Storage | None = None
) -> SaveError:
    """An error of the disk as the failure of a save: which checkpoint, what the system said, and what to do.

    Args:
        size_bytes: what the checkpoint would have taken.
        storage: is asked what the file system has left.
    """
    reason = error.strerror or str(error)
    cure = f"{older_ones(where)} {disk_cure(error)}"
    # The rename has happened, so that to save again under this name would be refused.
    if isinstance(error, UnsyncedError):
        message = (
            f"the checkpoint was written, but may not survive a power cut: its directory could not be fsynced: {reason}"
        )
        return NotDurableError(message, where=str(where), cure=cure)
    message = f"the checkpoint could not be saved: {reason}"
    folder = Path(where).absolute().parent
    if error.filename is not None and folder not in Path(error.filename).absolute().parents:
        message += f": {error.filename}"
    elif error.errno in NO_SPACE and size_bytes is not None:
        message += _why_no_space(error, size_bytes, storage)
    kind = NoSpaceError if error.errno in NO_SPACE else SaveError
    return kind(message, where=str(where), cure=cure)


def _why_no_space(error: OSError, size_bytes: int, storage: Storage | None) -> str:
    """The space that a checkpoint needs, and what the file system has left, if that explains the error."""
    needed = f"; it needs {format_count(size_bytes, 'byte')}"
    # A quota (EDQUOT) is no property of the file system, whose free bytes would mislead.
    if storage is None or error.errno != errno.ENOSPC:
        return needed
    if storage.free_files() == 0:
        return "; the file system can hold no more files (no inode is free)"
    free_bytes = storage.free_bytes()
    if free_bytes is None:
        return needed
    free = f"{format_count(free_bytes, 'byte')} are free"
    if free_bytes > size_bytes:
        return f"{needed}, and {free} now: a quota may be used up, or space was freed since"
    return f"{needed}, {free}"


def older_ones(where: str | Path) -> str:
    """A sentence about the older checkpoints in the same folder: intact, unless the folder is gone."""
    if is_url(where):
        return "Older checkpoints were not touched."
    folder = Path(where).absolute().parent
    return "Older checkpoints are intact." if folder.is_dir() else f"{folder} is not there (any more)."
