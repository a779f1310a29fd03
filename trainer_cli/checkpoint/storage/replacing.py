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
        if os.path.lexists(output):
            os.rename(output, old)
        os.rename(place, output)
        _fsync(output.parent)
    finally:
        _delete(place)
        _delete(old)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
