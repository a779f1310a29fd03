"""The primitive operations on a disk. Tests make each of them fail, or kill the process in it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from functools import cache
from os import stat_result
from pathlib import Path

_FULL_FSYNC = getattr(fcntl, "F_FULLFSYNC", None)
"""On macOS a plain fsync stops at the drive's own cache."""
StrPath = str | Path
"""Strings are several times faster than paths where thousands of names are examined."""
REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of a file system that does not offer an operation."""
_NOT_OFFERED = (*REFUSED, errno.ENOLCK)
_AT_FDCWD = -100
"""Paths are relative to the current directory."""
_SWAP = 2
"""RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_CACHE = getattr(fcntl, "F_NOCACHE", None)


class Disk:
    """The real disk. Checkpointing accesses files through it alone."""

    block_bytes = 16 * 1024 * 1024
    """What is gathered and written at once; files smaller than this are written the plain way."""
    offers_bypass = True
    """Whether files may be written past the page cache; False once the file system has refused it."""

    def mkdir(self, path: Path) -> None:
        """Make one directory; its parent exists, it does not."""
        os.mkdir(path)

    def open_new(self, path: Path) -> int:
        """Open a file that must not exist yet, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open(self, path: StrPath) -> int:
        """Open a file for reading, without waiting for a writer where it is a pipe."""
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def open_to_lock(self, path: StrPath) -> int:
        """Open a file that may be locked against all others: NFS wants it open for writing, where that is allowed."""
        try:
            return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return Disk.open(self, path)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write the beginning of `data` at a place in the file, and say how many bytes it was. From any thread."""
        return os.pwrite(fd, data, offset)

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        """Have what is written go past the page cache, or through it again.

        Past it, memory, sizes and places in the file must be multiples of 4,096.
        """
        if _DIRECT:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
        elif _NO_CACHE is not None:
            fcntl.fcntl(fd, _NO_CACHE, int(on))
        elif on:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Cut a file to a size."""
        os.ftruncate(fd, size_bytes)

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Fill the beginning of `into`, one after another, from a place in the file; how many bytes it was, and 0
        at the end of the file. From any thread."""
        return os.preadv(fd, into, offset)

    def fsync(self, fd: int) -> None:
        """Return once the file's content survives a power cut."""
        if _FULL_FSYNC is not None:
            try:
                fcntl.fcntl(fd, _FULL_FSYNC)
                return
            except OSError as error:
                if error.errno not in _NOT_OFFERED:
                    raise
        os.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        """Return once the names in a directory survive a power cut, where the file system offers that."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fsync_names(fd)
        finally:
            os.close(fd)

    def _fsync_names(self, fd: int) -> None:
        try:
            Disk.fsync(self, fd)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name, all at once."""
        os.rename(old, new)

    def exchange(self, first: Path, second: Path) -> None:
        """Swap the names of two files or folders, all at once. An errno of `REFUSED` where that is not offered."""
        swap = _swap()
        if swap is None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(first))
        if swap(os.fsencode(first), os.fsencode(second)):
            number = ctypes.get_errno()
            # A kernel without the call offers it on no file system.
            raise OSError(errno.ENOTSUP if number == errno.ENOSYS else number, os.strerror(number), str(first))

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name, where the file system offers that."""
        try:
            os.link(old, new)
        except OSError as error:
            if error.errno not in (*REFUSED, errno.EPERM):
                raise

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def listdir(self, path: StrPath) -> list[str]:
        """The names in a directory, sorted."""
        return sorted(os.listdir(path))

    def stat(self, path: StrPath, *, follow: bool = True) -> stat_result:
        """What a path is."""
        return os.stat(path, follow_symlinks=follow)

    def lock(self, fd: int, *, exclusive: bool) -> bool:
        """Take a lock that the kernel drops with the process; False if another one holds it.

        A file system without locks gives every lock that is asked for.
        """
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
        return True

    def free_bytes(self, path: Path) -> int:
        """How many bytes this user can still write there."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def free_files(self, path: Path) -> int | None:
        """How many files this user can still make there; None where the file system has no such limit."""
        found = os.statvfs(path)
        return found.f_favail if found.f_files else None


@cache
def _swap() -> Callable[[bytes, bytes], int] | None:
    """The system's call that swaps two names, which Python does not offer; None where the C library has none."""
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "renameat2"):
        call = library.renameat2
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        return lambda first, second: int(call(_AT_FDCWD, first, _AT_FDCWD, second, _SWAP))
    if hasattr(library, "renamex_np"):
        call = library.renamex_np
        call.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint]
        return lambda first, second: int(call(first, second, _SWAP))
    return None
