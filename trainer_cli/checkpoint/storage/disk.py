"""The primitive operations on a disk. Tests make each of them fail, or kill the process in it.

Writing one file from its first byte to its last: in large blocks past the page cache, digested on the way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from mmap import mmap
from os import stat_result
from pathlib import Path

from trainer_cli.checkpoint.storage.base import Bytes
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.manifest import FileEntry, new_digest

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


logger = logging.getLogger(__name__)

PAGE = 4096
"""A write past the page cache has a size, a place in the file and an address that are multiples of this."""
WRITE_BYTES = 1 << 25
"""The most that is digested, then written by one call."""


class LocalFileWriter:
    """Appends to one file. Aligned memory is written from where it is; all else is gathered in one block first.

    A file smaller than a block is written at the end, through the page cache.
    """

    def __init__(self, fd: int, disk: Disk, algorithm: DigestAlgorithm) -> None:
        self._fd = fd
        self._disk = disk
        self._algorithm = algorithm
        self._digest = new_digest(algorithm)
        self._size_bytes = self._written_bytes = 0
        self._is_large = self._direct = False
        # Begins at a page. Pages that no byte is gathered in take no memory.
        self._block = memoryview(mmap(-1, disk.block_bytes))
        self._gathered = 0

    def write(self, data: Bytes) -> None:
        """Append bytes, which are taken before this returns."""
        view = memoryview(data).cast("B")
        self._size_bytes += len(view)
        if not self._is_large and self._size_bytes >= len(self._block):
            self._is_large = True
            self._bypass_cache()
        while view:
            in_place = self._in_place_bytes(view)
            if in_place:
                self._write_out(view[:in_place], in_place)
                view = view[in_place:]
            else:
                view = self._gather(view)

    def finish(self) -> FileEntry:
        """Write what is gathered and fsync the file. An fsync that failed is never repeated: the save fails."""
        if self._gathered:
            end = self._gathered
            # Past the page cache only whole pages can be written; the file is cut to its size afterwards.
            padded = end + -end % PAGE if self._direct else end
            self._block[end:padded] = bytes(padded - end)
            self._write_out(self._block[:padded], end)
        if self._written_bytes != self._size_bytes:
            self._disk.truncate(self._fd, self._size_bytes)
        self._disk.fsync(self._fd)
        return FileEntry(self._size_bytes, f"{self._algorithm.value}:{self._digest.hexdigest()}")

    def _in_place_bytes(self, view: memoryview) -> int:
        """How many bytes of a piece can be written from where they are."""
        if not self._is_large or self._gathered or len(view) < len(self._block):
            return 0
        if not self._direct:
            return len(view)
        return 0 if _address_of(view) % PAGE else len(view) - len(view) % PAGE

    def _gather(self, view: memoryview) -> memoryview:
        """Copy the beginning of a piece into the block; what is left of the piece."""
        piece = view[: len(self._block) - self._gathered]
        end = self._gathered + len(piece)
        self._block[self._gathered : end] = piece
        self._gathered = end
        if end == len(self._block) and self._is_large:
            self._write_out(self._block, end)
            self._gathered = 0
        return view[len(piece) :]

    def _write_out(self, view: memoryview, size_bytes: int) -> None:
        """Digest and write; the digest leaves out what pads the last page after `size_bytes`."""
        for start in range(0, len(view), WRITE_BYTES):
            end = start + WRITE_BYTES
            self._digest.update(view[start : min(end, size_bytes)])
            self._write_block(view[start:end])

    def _write_block(self, block: memoryview) -> None:
        while block:
            try:
                count = self._disk.write(self._fd, block, self._written_bytes)
            except OSError as error:
                if not (self._direct and error.errno in REFUSED):
                    raise
                self._refused(error)
                self._use_cache()
                continue
            if count <= 0:
                raise OSError(errno.EIO, "The disk took no bytes")
            self._written_bytes += count
            block = block[count:]
            if self._direct and count % PAGE:
                self._use_cache()

    def _bypass_cache(self) -> None:
        """Write the file past the page cache from now on, where the file system offers that."""
        if self._disk.offers_bypass:
            try:
                self._disk.bypass_cache(self._fd, on=True)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                self._refused(error)
            else:
                self._direct = True

    def _use_cache(self) -> None:
        """Write the rest of this file through the page cache."""
        self._disk.bypass_cache(self._fd, on=False)
        self._direct = False

    def _refused(self, error: OSError) -> None:
        """Write every later file of this disk through the page cache."""
        self._disk.offers_bypass = False
        logger.debug("files are written through the page cache, since the file system says: %s", error)


def _address_of(view: memoryview) -> int:
    """The address of writable memory; 1, which is aligned to nothing, for memory that may only be read."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
