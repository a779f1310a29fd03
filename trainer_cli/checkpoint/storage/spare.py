"""The large files of a removed folder, kept for the next save to write over, as their blocks are allocated already."""

from __future__ import annotations

import logging
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from trainer_cli.checkpoint.storage.sink import Blocks

logger = logging.getLogger(__name__)


class Spare:
    """At most one removed folder, the newest, and only where it holds a large file.

    Whoever gives a folder has made sure that no power cut brings it back as a checkpoint. A file is taken
    out of it for good before anybody looks at it, so that nobody can open it any more, and then only if
    nobody has it open, mapped, or under another name. Whatever fails here is no failure of a save: it makes
    a new file instead.
    """

    def __init__(self, blocks: Blocks, discard: Callable[[Path], object]) -> None:
        self._blocks = blocks
        self._discard = discard
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def keep(self, folder: Path) -> None:
        """Have a removed folder wait in the place of the one before; discard what does not."""
        with self._lock:
            before, self._folder = self._folder, folder if self._holds_large_file(folder) else None
            kept = self._folder
        for one in (before, folder):
            if one is not None and one is not kept:
                self._discard(one)

    def take(self, file: str, place: Path) -> int | None:
        """Move the file of that name to its new place and open it for writing; None where none can be had."""
        with self._lock:
            if self._folder is None:
                return None
            old = self._folder / file
            try:
                if not self._is_large(old) or not self._is_as_new(old, place.parent):
                    return None
                self._blocks.disk.rename(old, place)
            except FileNotFoundError:
                return None
            except OSError as error:
                logger.debug("%s is not written over: %s", old, error)
                return None
        return self._opened(place)

    def give_up(self) -> bool:
        """Discard it, and say whether there was one."""
        with self._lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            self._discard(folder)
        return folder is not None

    def _opened(self, place: Path) -> int | None:
        try:
            fd = self._blocks.disk.open_old(place)
            try:
                if self._blocks.disk.is_alone(fd):
                    return fd
            except BaseException:
                self._blocks.disk.close(fd)
                raise
            self._blocks.disk.close(fd)
        except OSError as error:
            logger.debug("%s is not written over: %s", place, error)
        self._blocks.disk.unlink(place)
        return None

    def _holds_large_file(self, folder: Path) -> bool:
        try:
            return any(self._is_large(folder / name) for name in self._blocks.disk.listdir(folder))
        except OSError:
            return False

    def _is_large(self, path: Path) -> bool:
        found = self._blocks.disk.stat(path, follow=False)
        return stat.S_ISREG(found.st_mode) and found.st_size >= self._blocks.disk.block_bytes

    def _is_as_new(self, path: Path, folder: Path) -> bool:
        """True where a new file in that folder would have the same owner and could be used by the same people."""
        file, made = self._blocks.disk.stat(path, follow=False), self._blocks.disk.stat(folder)
        return (file.st_mode & 0o7777, file.st_uid) == (made.st_mode & 0o666, made.st_uid)
