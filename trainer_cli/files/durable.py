"""Lock files, append to them, and replace them so that a crash leaves the old or the new content.

An OSError of these functions names the file, also if it comes from a write or a sync.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trainer_cli.errors import UserError

log = logging.getLogger(__name__)
REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that does not support an operation."""
_CHUNK_BYTES = 1 << 20
_private: set[int] = set()
"""Open descriptors that a forked child closes."""


def open_private(path: str | Path, flags: int) -> int:
    """Open a file so that forked children, such as data workers, close its descriptor. `close_private` closes it.

    A lock belongs to the open file: a child with its descriptor would keep the file locked after this process has
    closed it or was killed, and keep the blocks of a file that is removed.
    """
    _close_in_forks()
    # 0o666: the user's umask applies.
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    _private.add(descriptor)
    return descriptor


def close_private(descriptor: int) -> None:
    """Close a file of `open_private`, and release its lock. Does nothing in a forked child, which has closed it."""
    if descriptor not in _private:
        return
    _private.discard(descriptor)
    try:
        # A child that was forked in the middle of `open_private` has the descriptor too: to close it releases nothing.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError:
        pass  # Its file system has no locks.
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def private_file(path: str | Path, flags: int) -> Iterator[int]:
    """The descriptor of a file of `open_private`, which is closed at the end of the block."""
    descriptor = open_private(path, flags)
    try:
        yield descriptor
    finally:
        close_private(descriptor)


@contextlib.contextmanager
def locked_file(path: Path, flags: int = os.O_WRONLY | os.O_CREAT, *, wait: bool = True) -> Iterator[int]:
    """Like `private_file`; this process alone holds the file, or folder, until the end of the block.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
        UserError: the file system has no locks.
    """
    with private_file(path, flags) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in (*REFUSED, errno.ENOLCK):
                raise
            message = f"{path} cannot be locked: {error.strerror}"
            raise UserError(message, cure="Its file system has no file locks; choose a folder on another.") from error
        yield descriptor


@cache
def _close_in_forks() -> None:
    """Register, once in a process, that forked children close the files of `open_private`."""

    def close_all() -> None:
        while _private:
            os.close(_private.pop())

    os.register_at_fork(after_in_child=close_all)


class AppendedFile:
    """A file that grows by whole records. Without a buffer: a failed write is not repeated at close."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it."""
        self.path = path
        # O_APPEND: the kernel writes at the end, also after `append` has truncated the file.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def append(self, content: bytes) -> None:
        """Write a record. After an OSError nothing of it is in the file, as far as the file can still be changed."""
        remaining = memoryview(content)
        with naming(self.path):
            try:
                # A write may take fewer bytes than it is given, and report no error.
                while remaining:
                    remaining = remaining[os.write(self._descriptor, remaining) :]
            except OSError:
                if written := len(content) - len(remaining):
                    # A full disk may take a part of the record. To truncate needs no space.
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise

    def sync(self) -> None:
        """fsync the file."""
        with naming(self.path):
            sync(self._descriptor)

    def close(self) -> None:
        """Close the file; call it once."""
        with naming(self.path):
            os.close(self._descriptor)


def sync(file: int | Path) -> None:
    """Return once the content of a file, or the names in a folder, survive a power cut.

    If the file system does not offer that for files, as some that show an object store as a folder, one warning is
    logged. If it offers it for files alone, as some network file systems, none is.

    Args:
        file: the descriptor of an open file, or the path of a file or folder.
    """
    if isinstance(file, int):
        _sync_or_warn(file)
        return
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(file):
            _sync_or_warn(descriptor)
    finally:
        os.close(descriptor)


def _sync_or_warn(descriptor: int) -> None:
    """fsync an open file or folder; if the file system refuses it, warn for a file and ignore it for a folder."""
    try:
        _sync(descriptor)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            warn_of_no_fsync(os.strerror(error.errno))


def _sync(descriptor: int) -> None:
    """Write an open file through to the medium of the drive."""
    # Plain fsync on macOS stops at the drive's cache. Some file systems do not support the stronger call.
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in REFUSED:
                raise
    os.fsync(descriptor)


@cache
def warn_of_no_fsync(reason: str) -> None:
    """Warn, once in a process, of what a file system without fsync does not promise."""
    log.warning(
        "a file system in use refuses fsync (%s): what is saved there survives a kill of this process, but a power "
        "cut, or the loss of the machine, may take it",
        reason,
    )


def staged_path(path: Path) -> Path:
    """The temporary name under which `replace` writes a file. A kill may leave it behind."""
    # In the same folder: a rename is atomic only within one filesystem.
    return path.with_name(f".tmp.{path.name}")


def replace(path: Path, content: Iterable[bytes]) -> None:
    """Write and fsync a file under a temporary name, then rename it. One writer at a time."""
    staged = staged_path(path)
    try:
        with naming(path), open(staged, "wb") as file:
            for chunk in content:
                file.write(chunk)
            # Python's own buffer first: fsync covers only what the kernel has.
            file.flush()
            # Before the rename, which may reach the disk before the data does.
            sync(file.fileno())
        os.replace(staged, path)
    # Ctrl-C too: no temporary file stays behind.
    except BaseException:
        with contextlib.suppress(OSError):
            staged.unlink()
        raise
    # Makes the rename itself durable.
    sync(path.parent)


def keep_spans(path: Path, spans: Iterable[tuple[int, int]]) -> bool:
    """Keep only these byte ranges (start, stop) of a file, given in rising order; True if anything was dropped.

    If only an end is dropped, which is the usual case, the file is truncated: that works on a full disk too. Otherwise
    it is rewritten.
    """
    kept = list(_merge_adjacent(spans))
    size = path.stat().st_size
    if kept == [(0, size)] or (not kept and size == 0):
        return False
    drops_end_alone = not kept or (len(kept) == 1 and kept[0][0] == 0)
    if drops_end_alone:
        with naming(path), open(path, "r+b") as file:
            file.truncate(kept[0][1] if kept else 0)
            sync(file.fileno())
    else:
        replace(path, _read_spans(path, kept))
    return True


class FileIdentity(NamedTuple):
    """What tells two contents of a replaced or appended file apart."""

    inode: int
    size_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity of the file with this status."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)

    @classmethod
    def at(cls, path: Path) -> FileIdentity | None:
        """The identity of the file at a path; None without one."""
        try:
            return cls.of(os.stat(path))
        except OSError:
            return None


def is_gone(folder: Path) -> bool:
    """Whether a folder was moved or deleted. A file system that answers with another error may still have it."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager that puts the name of a file into an OSError: those of writes and syncs have none."""
    try:
        yield
    except OSError as error:
        # os.write and os.fsync know only a descriptor.
        error.filename = str(path)
        raise


def _merge_adjacent(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans, with each that begins where the one before it ends joined to that one."""
    merged: tuple[int, int] | None = None
    for start, stop in spans:
        if merged and merged[1] == start:
            merged = (merged[0], stop)
            continue
        if merged:
            yield merged
        merged = (start, stop)
    if merged:
        yield merged


def _read_spans(path: Path, spans: list[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of a file in these spans, in chunks."""
    with open(path, "rb") as file:
        for start, stop in spans:
            file.seek(start)
            while start < stop and (chunk := file.read(min(_CHUNK_BYTES, stop - start))):
                start += len(chunk)
                yield chunk
