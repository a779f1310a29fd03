"""What a disk can do by itself: aligned direct writes and reads, and the page cache emptied of a file."""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

BLOCK = 64 << 20
PAGE = 4096


class Image:
    """So many bytes in page-aligned memory, to be written as they are: the limit for every saver."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = mmap.mmap(-1, -(-size_bytes // PAGE) * PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        pattern = os.urandom(PAGE)
        for start in range(0, len(self.memory), PAGE):
            self.memory[start : start + PAGE] = pattern

    def write(self, path: Path, *, direct: bool, anew: bool = True) -> None:
        """Write and fsync, `anew` or over what is there. OSError where direct writes are refused."""
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if anew else 0) | (os.O_DIRECT if direct else 0)
        file = os.open(path, flags, 0o644)
        try:
            view, done = memoryview(self.memory), 0
            while done < len(view):
                done += os.write(file, view[done : done + BLOCK])
            os.fsync(file)
        finally:
            os.close(file)


def takes_direct_writes(folder: Path) -> bool:
    """Whether the file system does: tmpfs and some network file systems refuse."""
    probe = folder / "probe"
    try:
        Image(PAGE).write(probe, direct=True)
    except (OSError, AttributeError):
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def read(path: Path, buffer: mmap.mmap) -> None:
    """Read a file, or all of a folder, through the page cache into a buffer that is used again and again."""
    for file in files(path):
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def forget(path: Path) -> None:
    """Have the page cache drop what it holds of a file, or of all files of a folder, that are on the disk."""
    for file in files(path):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def sync(path: Path) -> None:
    """fsync a file, or every file of a folder and the folder."""
    for one in (*files(path), *([path] if path.is_dir() else [])):
        handle = os.open(one, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(path: Path) -> None:
    """A file or a folder, where it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
