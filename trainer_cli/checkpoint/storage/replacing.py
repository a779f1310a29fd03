"""Write a file or folder beside its place, and put it there as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
