"""Writing one file from its first byte to its last: in large blocks past the page cache, digested on the way."""

from __future__ import annotations

import ctypes
import errno
import logging
from mmap import mmap

from trainer_cli.checkpoint.manifest import FileEntry, new_digest
from trainer_cli.checkpoint.storage.disk import REFUSED, Disk
from trainer_cli.checkpoint.storage.interfaces import Bytes
from trainer_cli.config.schema import DigestAlgorithm

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
