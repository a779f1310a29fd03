"""Writing one file from its first byte to its last: in large blocks past the page cache, digested on the way."""

from __future__ import annotations

import ctypes
import errno
import logging
from concurrent.futures import Future, wait
from mmap import mmap
from threading import Thread

from trainer_cli.checkpoint.manifest import FileEntry, new_digest
from trainer_cli.checkpoint.storage.disk import REFUSED, Disk
from trainer_cli.checkpoint.storage.interfaces import Bytes
from trainer_cli.config.schema import DigestAlgorithm

logger = logging.getLogger(__name__)

PAGE = 4096
"""A write past the page cache has a size, a place in the file and an address that are multiples of this."""
DIGEST_THREAD_BYTES = 1 << 26
"""From this size on, memory is digested in a thread of its own while it is written: both take about as long."""
WRITE_BYTES = 1 << 25
"""The most that one call writes, so that an error is noticed and a write is counted soon."""


class BlockPool:
    """Blocks of memory in which files of one storage gather small pieces; each is used by one file after another.

    Files are written past the page cache until the file system refuses that.
    """

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.direct = True
        self._free: list[memoryview] = []

    def borrow(self) -> memoryview:
        """A block that begins at a page."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap(-1, self.disk.block_bytes))

    def give_back(self, block: memoryview) -> None:
        """Let another file use it."""
        self._free.append(block)

    def bypass_cache(self, fd: int) -> bool:
        """Have a file written past the page cache from now on, where the file system offers that."""
        if not self.direct:
            return False
        try:
            self.disk.bypass_cache(fd, on=True)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            self.refused(error)
            return False
        return True

    def refused(self, error: OSError) -> None:
        """Write every file through the page cache from now on."""
        self.direct = False
        logger.debug("files are written through the page cache, since the file system says: %s", error)


class LocalFileWriter:
    """Appends to one file. Aligned memory is written from where it is; all else is gathered in one block first.

    A file smaller than a block is written at the end, through the page cache.
    """

    def __init__(self, fd: int, pool: BlockPool, algorithm: DigestAlgorithm) -> None:
        self._fd = fd
        self._pool = pool
        self._algorithm = algorithm
        self._digest = new_digest(algorithm)
        self._size_bytes = self._written_bytes = 0
        self._is_large = self._direct = False
        self._block = pool.borrow()
        self._gathered = 0

    def write(self, data: Bytes) -> None:
        """Append bytes, which are taken before this returns."""
        view = memoryview(data).cast("B")
        self._size_bytes += len(view)
        if not self._is_large and self._size_bytes >= len(self._block):
            self._is_large = True
            self._direct = self._pool.bypass_cache(self._fd)
        while view:
            in_place = self._in_place_bytes(view)
            if in_place:
                self._write_out(view[:in_place])
                view = view[in_place:]
            else:
                view = self._gather(view)

    def finish(self) -> FileEntry:
        """Write what is gathered and fsync the file. An fsync that failed is never repeated: the save fails."""
        size_bytes = self._size_bytes
        if self._gathered:
            end = self._gathered
            # Past the page cache only whole pages can be written; the file is cut to its size afterwards.
            padded = end + -end % PAGE if self._direct else end
            self._block[end:padded] = bytes(padded - end)
            self._write_out(self._block[:padded], digested_bytes=end)
        if self._written_bytes != size_bytes:
            self._pool.disk.truncate(self._fd, size_bytes)
        self._pool.disk.fsync(self._fd)
        return FileEntry(size_bytes, f"{self._algorithm.value}:{self._digest.hexdigest()}")

    def close(self) -> None:
        """Give the block back."""
        self._pool.give_back(self._block)

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
            self._write_out(self._block)
            self._gathered = 0
        return view[len(piece) :]

    def _write_out(self, view: memoryview, digested_bytes: int | None = None) -> None:
        """Digest and write; the digest leaves out what pads the last page."""
        digesting = self._start_digest(view[:digested_bytes])
        try:
            for start in range(0, len(view), WRITE_BYTES):
                self._write_block(view[start : start + WRITE_BYTES])
        finally:
            # The caller may reuse the memory as soon as this returns or raises.
            wait([digesting])
        digesting.result()

    def _start_digest(self, view: memoryview) -> Future[None]:
        """Digest small memory at once, and large memory in a thread; the future holds what that raised."""
        done: Future[None] = Future()
        if len(view) >= DIGEST_THREAD_BYTES:
            try:
                Thread(target=self._update_digest, args=(view, done), name="digest").start()
                return done
            except RuntimeError as error:
                logger.debug("the digest is computed before the write: %s", error)
        self._update_digest(view, done)
        return done

    def _update_digest(self, view: memoryview, done: Future[None]) -> None:
        try:
            self._digest.update(view)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _write_block(self, block: memoryview) -> None:
        while block:
            try:
                count = self._pool.disk.write(self._fd, block, self._written_bytes)
            except OSError as error:
                if not (self._direct and error.errno in REFUSED):
                    raise
                self._pool.refused(error)
                self._use_cache()
                continue
            if count <= 0:
                raise OSError(errno.EIO, "The disk took no bytes")
            self._written_bytes += count
            block = block[count:]
            if self._direct and count % PAGE:
                self._use_cache()

    def _use_cache(self) -> None:
        """Write the rest of this file through the page cache."""
        self._pool.disk.bypass_cache(self._fd, on=False)
        self._direct = False


def _address_of(view: memoryview) -> int:
    """The address of writable memory; 1, which is aligned to nothing, for memory that may only be read."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
