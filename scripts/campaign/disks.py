"""File systems of a trial's own: memory of a given size, or ext4 in a file. Only the superuser may mount them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_IMAGE_BYTES = 32 << 20


@cache
def why_no_tmpfs() -> str | None:
    """Why no memory can be mounted here; None where it can."""
    if os.geteuid() != 0:
        return "only the superuser may mount a file system"
    with tempfile.TemporaryDirectory() as folder:
        return _why_not_mounted(Path(folder), "-t", "tmpfs", "none")


@cache
def why_no_ext4() -> str | None:
    """Why no ext4 can be mounted here; None where it can."""
    if os.geteuid() != 0:
        return "only the superuser may mount a file system"
    if shutil.which("mkfs.ext4") is None:
        return "there is no mkfs.ext4"
    with tempfile.TemporaryDirectory() as folder:
        return _why_not_mounted(Path(folder), "-o", "loop", str(make_image(Path(folder, "image"))))


def _why_not_mounted(folder: Path, *what: str) -> str | None:
    try:
        with mounted(folder / "disk", *what):
            return None
    except subprocess.CalledProcessError as error:
        return f"nothing can be mounted: {error.stderr.strip()}"


def make_image(path: Path) -> Path:
    """Make a file that holds an empty ext4."""
    with open(path, "wb") as image:
        image.truncate(_IMAGE_BYTES)
    _run("mkfs.ext4", "-qF", str(path))
    return path


def copy_image(image: Path, copy: Path) -> None:
    """Copy a disk that is nearly empty, in as few blocks."""
    _run("cp", "--sparse=always", str(image), str(copy))


@contextmanager
def mounted(folder: Path, *what: str) -> Iterator[Path]:
    """A file system, mounted on a folder until the end of the block."""
    folder.mkdir(exist_ok=True)
    _run("mount", *what, str(folder))
    try:
        yield folder
    finally:
        try:
            _run("umount", str(folder))
        except subprocess.CalledProcessError:
            # A process that hangs may still use it.
            _run("umount", "--lazy", str(folder))


def fsync_new_file(path: Path) -> None:
    """Write a file and fsync it, as another program on the disk does: that writes the journal out."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, b"of another program")
    os.fsync(descriptor)
    os.close(descriptor)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
