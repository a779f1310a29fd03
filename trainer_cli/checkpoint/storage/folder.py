"""Files of one folder on a local disk: written front to back, read from any place.

Write a file or folder beside its place, and put it there as a whole.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path

from trainer_cli.checkpoint.storage.disk import Disk, LocalFileWriter, StrPath
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.manifest import FileEntry
from trainer_cli.core.naming import is_plain
from trainer_cli.errors import UserError


@contextmanager
def replacing(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A hidden path beside `output`; what was written there is fsynced and takes its place on clean exit.

    A file replaces a file in one rename. A folder takes two: a process that dies between them leaves the old one as
    `.NAME.PID.old`, and nothing at `output`.

    Raises:
        UserError: `output` exists, and may not be replaced.
    """
    if os.path.lexists(output) and not overwrite:
        raise UserError(f"{output} exists", cure="Choose another --output, or add --overwrite.")
    output.parent.mkdir(parents=True, exist_ok=True)
    place = output.parent / f".{output.name}.{os.getpid()}"
    old = output.parent / f".{output.name}.{os.getpid()}.old"
    try:
        yield place
        for path in (*(place.iterdir() if place.is_dir() else ()), place):
            _fsync(path)
        if os.path.lexists(output) and (output.is_dir() or place.is_dir()):
            # No rename replaces a folder that is not empty.
            os.rename(output, old)
        try:
            os.replace(place, output)
        except OSError:
            if os.path.lexists(old):
                os.rename(old, output)
            raise
        _fsync(output.parent)
        delete(old)
    finally:
        delete(place)


def point_link(link: Path, target: str) -> None:
    """Make a symbolic link, or replace it in one rename, so that it always points to something.

    Raises:
        OSError: there is a folder of that name, or no link can be made.
    """
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)  # Of a process that died here.
    os.symlink(target, new)
    os.replace(new, link)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def delete(path: Path) -> None:
    """Delete a file, or a folder with all in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_MOST_BUFFERS = 1000
"""In one call; most systems take 1,024."""


class LocalWritableFolder:
    """A staged folder and the files finished in it."""

    def __init__(
        self, path: Path, disk: Disk, digest: DigestAlgorithm, publish: Callable[[], object] = lambda: None
    ) -> None:
        self.path = path
        self.files: dict[str, FileEntry] = {}
        self._publish = publish
        self._disk = disk
        self._digest = digest

    @contextmanager
    def create(self, file: str) -> Iterator[LocalFileWriter]:
        if not is_plain(file):
            raise ValueError(f"{file!r} is not a plain name of a file")
        fd = self._disk.open_new(self.path / file)
        _watch_forks()
        _being_written.add(fd)
        try:
            writer = LocalFileWriter(fd, self._disk, self._digest)
            yield writer
            self.files[file] = writer.finish()
        finally:
            _being_written.discard(fd)
            self._disk.close(fd)

    @property
    def place(self) -> str:
        """Its hidden name."""
        return self.path.name

    def publish(self) -> None:
        self._publish()


_being_written: set[int] = set()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_close_files)


def _close_files() -> None:
    """A forked data worker would keep the file open, and its blocks allocated after it is removed."""
    while _being_written:
        os.close(_being_written.pop())


def write_file(disk: Disk, path: Path, content: bytes) -> None:
    """Write one small file and fsync its content (not its name)."""
    fd = disk.open_new(path)
    try:
        view, offset = memoryview(content), 0
        while offset < len(view):
            offset += disk.write(fd, view[offset:], offset)
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
