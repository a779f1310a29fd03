"""Every operation of checkpointing on a local disk, so that tests can make each one fail, or kill the process in it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from functools import cache
from os import stat_result
from pathlib import Path

from trainer_cli.files import REFUSED, close_private, open_private, sync

Bytes = bytes | bytearray | memoryview
StrPath = str | Path
"""Strings are several times faster than paths where thousands of names are examined."""
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of an operation on files that this user may only read."""
_AT_FDCWD = -100
"""Paths are relative to the current directory."""
_SWAP = 2
"""RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS."""
PAGE = 4096
"""Unit of writes past the page cache."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_CACHE = getattr(fcntl, "F_NOCACHE", None)


class Disk:
    """The real disk."""

    block_bytes = 16 * 1024 * 1024
    """Size of the buffer that a file is written from; smaller files go through the page cache."""
    offers_bypass = True
    """Whether files can be written past the page cache; False once the file system has refused it."""

    def mkdir(self, path: Path) -> None:
        """Make one directory; its parent exists, it does not."""
        os.mkdir(path)

    def open_new(self, path: Path) -> int:
        """Open a file that must not exist yet, for writing."""
        # O_EXCL: a file that is there is an error, and never written over.
        return open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open(self, path: StrPath) -> int:
        """Open a file for reading."""
        # O_NONBLOCK: to open a pipe would otherwise wait for its writer.
        return open_private(path, os.O_RDONLY | os.O_NONBLOCK)

    def open_to_lock(self, path: StrPath) -> int:
        """Open a file for an exclusive lock."""
        # NFS grants an exclusive lock only on a file that is open for writing.
        try:
            return open_private(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            return Disk.open(self, path)

    def close(self, fd: int) -> None:
        """Close a file, which releases its lock."""
        close_private(fd)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write the beginning of `data` at an offset of the file; returns the number of bytes. From any thread."""
        # Not os.write: threads share the descriptor, and with it the position in the file.
        return os.pwrite(fd, data, offset)

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        """Write past the page cache from now on, or through it again.

        Past it, the address, the size and the offset of each write must be multiples of `PAGE`.
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
        """Fill the buffers in order from an offset of the file; returns the number of bytes, 0 at the end of the file.
        From any thread."""
        # At an offset, as threads share the descriptor; into several buffers, so that nothing is copied again.
        return os.preadv(fd, into, offset)

    def fsync(self, fd: int) -> None:
        """Return once the content of the file survives a power cut, if the file system supports that."""
        sync(fd)

    def fsync_dir(self, path: Path) -> None:
        """Return once the names in a directory survive a power cut, if the file system supports that."""
        sync(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder, atomically."""
        os.rename(old, new)

    def exchange(self, first: Path, second: Path) -> None:
        """Swap the names of two files or folders, atomically. OSError with an errno of `REFUSED` if not supported."""
        swap = _swap()
        if swap is None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(first))
        if swap(os.fsencode(first), os.fsencode(second)):
            number = ctypes.get_errno()
            # A kernel without the call offers it on no file system.
            raise OSError(errno.ENOTSUP if number == errno.ENOSYS else number, os.strerror(number), str(first))

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name, if the file system supports hard links."""
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
        """Type, size and identity of a file or folder."""
        return os.stat(path, follow_symlinks=follow)

    def lock(self, fd: int, *, exclusive: bool) -> bool:
        """Take a lock, which the kernel releases when the process ends; False if another process holds it.

        On a file system without locks every lock is granted.
        """
        try:
            # LOCK_NB: the caller decides whether to wait. A removal does not: a reader may take hours.
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (*REFUSED, errno.ENOLCK):
                raise
        return True

    def free_bytes(self, path: Path) -> int | None:
        """Number of bytes that this user can still write; None if the file system does not say."""
        status = os.statvfs(path)
        # f_bfree counts blocks that only root may use. Some file systems over a network report no blocks at all.
        free_blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
        return free_blocks * status.f_frsize if status.f_blocks else None

    def free_files(self, path: Path) -> int | None:
        """Number of files that this user can still create; None if the file system has no such limit."""
        status = os.statvfs(path)
        # A file system without a table of inodes, such as btrfs, reports 0 of them.
        return status.f_favail if status.f_files else None


def exists(disk: Disk, path: StrPath) -> bool:
    """Whether a path exists; a symbolic link to nothing does."""
    try:
        disk.stat(path, follow=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_folder(disk: Disk, path: StrPath) -> bool:
    """Whether a path is a folder, or a symbolic link to one."""
    try:
        return stat.S_ISDIR(disk.stat(path).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def is_same_file(disk: Disk, fd: int, path: Path) -> bool:
    """Whether a path still names the file that was opened as `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), disk.stat(path))
    except FileNotFoundError:
        return False


def delete_tree(disk: Disk, path: Path) -> None:
    """Delete a file or a folder with its content, if it exists. Symbolic links are deleted, not followed."""
    try:
        mode = disk.stat(path, follow=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        disk.unlink(path)
        return
    # Not shutil.rmtree: a test can make each of these operations fail.
    for name in disk.listdir(path):
        delete_tree(disk, path / name)
    disk.rmdir(path)


@cache
def _swap() -> Callable[[bytes, bytes], int] | None:
    """The system call that swaps two names, which Python lacks; None if the C library has none."""
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
