"""Files of one folder on a local disk: written front to back and digested on the way, read from any place."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from trainer_cli.checkpoint.manifest import FileEntry, new_digest
from trainer_cli.checkpoint.naming import is_plain
from trainer_cli.checkpoint.storage.disk import Disk, StrPath
from trainer_cli.checkpoint.storage.port import Bytes
from trainer_cli.config.schema import DigestAlgorithm

_SMALL = 64 * 1024
_BLOCK = 4 * 1024 * 1024
_MOST_BUFFERS = 1000
"""In one call; most systems take 1,024."""


class LocalWritableFolder:
    """A staged folder and the files finished in it."""

    def __init__(self, path: Path, disk: Disk, digest: DigestAlgorithm) -> None:
        self.path = path
        self.files: dict[str, FileEntry] = {}
        self._disk = disk
        self._digest = digest

    @contextmanager
    def create(self, file: str) -> Iterator[LocalSink]:
        if not is_plain(file):
            raise ValueError(f"{file!r} is not a plain name of a file")
        fd = self._disk.open_new(self.path / file)
        try:
            sink = LocalSink(fd, self._disk, self._digest)
            yield sink
            self.files[file] = sink.finish()
        finally:
            self._disk.close(fd)


class LocalSink:
    """Writes and digests in blocks that fit the processor's caches; small pieces are gathered first."""

    def __init__(self, fd: int, disk: Disk, algorithm: DigestAlgorithm) -> None:
        self._fd = fd
        self._disk = disk
        self._algorithm = algorithm
        self._digest = new_digest(algorithm)
        self._gathered = bytearray()
        self._size_bytes = 0

    def write(self, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        if len(view) < _SMALL:
            self._gathered += view
            if len(self._gathered) >= _BLOCK:
                self._flush()
            return
        self._flush()
        self._write_out(view)

    def finish(self) -> FileEntry:
        """Bring the file to rest. An fsync that failed is never tried again: the whole save begins anew."""
        self._flush()
        self._disk.fsync(self._fd)
        return FileEntry(self._size_bytes, f"{self._algorithm.value}:{self._digest.hexdigest()}")

    def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._write_out(memoryview(gathered))

    def _write_out(self, view: memoryview) -> None:
        for start in range(0, len(view), _BLOCK):
            block = view[start : start + _BLOCK]
            self._digest.update(block)
            while block:
                written = self._disk.write(self._fd, block)
                if written <= 0:
                    raise OSError(errno.EIO, "The disk took no bytes")
                self._size_bytes += written
                block = block[written:]


def write_file(disk: Disk, path: Path, content: bytes) -> None:
    """Make one small file, at rest when this returns (but for its name)."""
    fd = disk.open_new(path)
    try:
        view = memoryview(content)
        while view:
            view = view[disk.write(fd, view) :]
        disk.fsync(fd)
    finally:
        disk.close(fd)


class LocalReadableFolder:
    """A folder on this machine."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk

    @contextmanager
    def open(self, file: str) -> Iterator[LocalSource]:
        if not is_plain(file):
            raise ValueError(f"{file!r} is not a plain name of a file")
        source = open_source(self._disk, self.path / file)
        try:
            yield source
        finally:
            source.close()


def open_source(disk: Disk, path: StrPath) -> LocalSource:
    """Open a plain file for reading; the caller closes it."""
    fd = disk.open(path)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "Not a plain file", str(path))
        return LocalSource(fd, disk, found.st_size, path)
    except BaseException:
        disk.close(fd)
        raise


class LocalSource:
    """Reads from any place."""

    def __init__(self, fd: int, disk: Disk, size_bytes: int, path: StrPath) -> None:
        self.size_bytes = size_bytes
        self._fd = fd
        self._disk = disk
        self._path = path

    def close(self) -> None:
        """Let go of the file."""
        self._disk.close(self._fd)

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> None:
        left = deque(buffer for buffer in buffers if buffer)
        while left:
            count = self._disk.read(self._fd, list(islice(left, _MOST_BUFFERS)), offset)
            if count <= 0:
                raise OSError(errno.EIO, "The file is shorter than it was", str(self._path))
            offset += count
            while count and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]
