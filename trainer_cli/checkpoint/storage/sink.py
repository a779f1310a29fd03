"""Writing one file as fast as the disk takes it: in large blocks past the page cache, digested on the way."""

from __future__ import annotations

import ctypes
import errno
import logging
import threading
from collections.abc import Callable
from mmap import mmap
from typing import Any

from trainer_cli.checkpoint.manifest import FileEntry, new_digest
from trainer_cli.checkpoint.storage.disk import FULL, REFUSED, Disk
from trainer_cli.checkpoint.storage.port import Bytes
from trainer_cli.checkpoint.threads import WorkerThread, close_all, wait_for_all
from trainer_cli.config.schema import DigestAlgorithm

logger = logging.getLogger(__name__)

PAGE = 4096
"""What a write past the page cache is a multiple of: its place in memory, its place in the file, its size."""
_LARGE_PIECE = 256 * 1024
"""A smaller piece is gathered with others, wherever it lies: a write of its own would cost more than the copy."""
_STAYING_BLOCKS = 2
"""So many are written at a time of memory that stays: nobody waits for it, and each time takes a processor away."""
_WRITERS = 2
"""So many write past the page cache: while one waits for its turn on a busy processor, the disk has work."""

_Piece = tuple[memoryview, int]
"""Bytes, and their place in the file."""


class Blocks:
    """How files of one storage are written: with blocks of memory that one file after the other uses.

    Past the page cache, until the file system refuses that.
    """

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.direct = True
        self._free: list[memoryview] = []

    def borrow(self) -> memoryview:
        """A block that begins at a page; memory is taken from the system where no other is free."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap(-1, self.disk.block_bytes))

    def give_back(self, block: memoryview) -> None:
        """Let another file have it."""
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
        """Write through the page cache from now on."""
        self.direct = False
        logger.debug("files are written through the page cache, since the file system says: %s", error)


class LocalSink:
    """Appends to one file. Memory that lies as the file system wants it is written from where it is.

    All other pieces are gathered in one block while the one before it is written. Threads do the writing, and another
    the digest, which is of the very bytes that are written; all are gone when the sink is. The last block, which is all
    of a small file, is the caller's.

    Args:
        overwrites: the file has content, which is written over and cut off.
        on_full: makes room on a full disk, and says whether it did.
    """

    def __init__(
        self,
        fd: int,
        blocks: Blocks,
        algorithm: DigestAlgorithm,
        *,
        overwrites: bool = False,
        on_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._fd = fd
        self._blocks = blocks
        self._algorithm = algorithm
        self._digest = new_digest(algorithm)
        self._cut_off = overwrites
        self._on_full = on_full
        self._room = threading.Lock()
        self._rooms = 0
        """So often room was made."""
        self._size_bytes = self._sent_bytes = self._handed_over = 0
        self._is_large = self._direct = False
        self._block = blocks.borrow()
        self._gathered = 0
        self._spare_block: memoryview | None = None
        self._writers: list[WorkerThread[_Piece]] = []
        self._digesting: list[WorkerThread[memoryview]] = []

    def write(self, data: Bytes, *, stays: bool = False) -> None:
        view = memoryview(data).cast("B")
        self._size_bytes += len(view)
        if not self._is_large and self._size_bytes >= len(self._block):
            self._begin_blocks()
        while view:
            straight = self._straight(view)
            if straight:
                self._flush()
                self._hand_over(view[:straight], _STAYING_BLOCKS if stays and self._direct else 1)
                if not stays:
                    self.wait()
                view = view[straight:]
            else:
                view = self._gather(view)

    def wait(self, *, but_last: bool = False, timeout_s: float | None = None) -> None:
        wait_for_all(self._threads, but_last=but_last, timeout_s=timeout_s)

    def finish(self) -> FileEntry:
        """Bring the file to rest. An fsync that failed is never tried again: the whole save begins anew."""
        self._flush_last()
        if self._cut_off:
            self._blocks.disk.truncate(self._fd, self._size_bytes)
        self._blocks.disk.fsync(self._fd)
        return FileEntry(self._size_bytes, f"{self._algorithm.value}:{self._digest.hexdigest()}")

    def close(self) -> None:
        """Let go of memory and threads, once no block is being written any more."""
        close_all(self._threads)
        for block in (self._block, self._spare_block):
            if block is not None:
                self._blocks.give_back(block)

    @property
    def _threads(self) -> list[WorkerThread[Any]]:
        return [*self._writers, *self._digesting]

    def _begin_blocks(self) -> None:
        """It is a large file: from here on its beginning is at rest block by block."""
        self._direct = self._blocks.bypass_cache(self._fd)
        self._spare_block = self._spare_block or self._blocks.borrow()
        self._is_large = True
        # Through the cache one write waits for the other, and each takes a processor.
        while len(self._writers) < (_WRITERS if self._direct else 1):
            self._writers.append(WorkerThread("checkpoint-write", self._write_out))
        self._digesting.append(WorkerThread("checkpoint-digest", self._digest.update))

    def _straight(self, view: memoryview) -> int:
        """How many bytes can be written from where they are."""
        if not self._is_large or len(view) < min(_LARGE_PIECE, len(self._block)):
            return 0
        if not self._direct:
            return len(view)
        if self._gathered % PAGE or address_of(view) % PAGE:
            return 0
        return len(view) - len(view) % PAGE

    def _gather(self, view: memoryview) -> memoryview:
        """Copy the beginning of a piece; what is left of it."""
        piece = view[: len(self._block) - self._gathered]
        end = self._gathered + len(piece)
        self._block[self._gathered : end] = piece
        self._gathered = end
        if end == len(self._block) and self._is_large:
            self._flush()
        return view[len(piece) :]

    def _flush(self) -> None:
        """Have what is gathered written, and go on in the other block."""
        if self._gathered and self._spare_block is not None:
            self.wait()
            self._hand_over(self._block[: self._gathered])
            self._block, self._spare_block, self._gathered = self._spare_block, self._block, 0

    def _flush_last(self) -> None:
        """The last block is written whole where only that can be; the file is cut to its size afterwards."""
        self.wait()
        end = self._gathered
        self._digest.update(self._block[:end])
        if self._direct and end % PAGE:
            padded = end + -end % PAGE
            self._block[end:padded] = bytes(padded - end)
            end = padded
            self._cut_off = True
        self._write_out((self._block[:end], self._sent_bytes))

    def _hand_over(self, view: memoryview, blocks: int = 1) -> None:
        """Have bytes written and digested behind, so many blocks at a time."""
        size_bytes = blocks * len(self._block)
        for start in range(0, len(view), size_bytes):
            block = view[start : start + size_bytes]
            self._writers[self._handed_over % len(self._writers)].hand_over((block, self._sent_bytes))
            self._digesting[0].hand_over(block)
            self._handed_over += 1
            self._sent_bytes += len(block)

    def _write_out(self, piece: _Piece) -> None:
        view, place = piece
        while view:
            direct, rooms = self._direct, self._rooms
            try:
                written = self._blocks.disk.write(self._fd, view, place)
            except OSError as error:
                if direct and error.errno in REFUSED:
                    self._blocks.refused(error)
                    self._use_cache()
                elif error.errno not in FULL or not self._make_room(rooms):
                    raise
                continue
            if written <= 0:
                raise OSError(errno.EIO, "The disk took no bytes")
            view, place = view[written:], place + written
            if direct and written % PAGE:
                self._use_cache()
        if self._is_large and not self._direct:
            # Once named again a block is mostly at rest, and leaves a cache that would have to be searched for room.
            start = max(0, place - 3 * len(self._block))
            self._blocks.disk.write_back(self._fd, start, place - start)

    def _make_room(self, rooms: int) -> bool:
        """Whether there may be room now: what made some for another piece made it for this one."""
        with self._room:
            if self._rooms == rooms:
                self._rooms += self._on_full()
            return self._rooms != rooms

    def _use_cache(self) -> None:
        """Write the rest of this file through the page cache."""
        # The file first: who finds it is not direct is never refused.
        self._blocks.disk.bypass_cache(self._fd, on=False)
        self._direct = False


def address_of(view: memoryview) -> int:
    """Where it is in memory; 1 where that is not told, as of memory that may only be read."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
