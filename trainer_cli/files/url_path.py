"""Paths of object stores, such as `s3://bucket/run`, that can be joined and split as local paths are."""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath

from trainer_cli.errors import UserError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+")


class UrlPath(PosixPath):
    """The path of a folder or file in an object store.

    No file can be opened by it: `exists`, `is_dir` and `is_file` are False. The storage of its scheme reads it.
    """

    __slots__ = ()

    def __str__(self) -> str:
        # Joining paths collapses the two slashes of the scheme to one.
        return _SCHEME.sub(r"\1://", super().__str__(), count=1)

    def __fspath__(self) -> str:
        return str(self)

    @property
    def scheme(self) -> str:
        """`s3`, `gs` and so on."""
        return str(self).partition("://")[0]

    def absolute(self) -> UrlPath:
        """Return this path: it depends on no current folder."""
        return self

    def resolve(self, strict: bool = False) -> UrlPath:
        """Return this path: it has no symbolic links."""
        return self

    def is_absolute(self) -> bool:
        """True."""
        return True


def is_url(text: str | os.PathLike[str]) -> bool:
    """Whether a string or path is the URL of an object store. `file://` is a local path."""
    return "://" in str(text) and not str(text).startswith("file://")


def is_web(text: str | os.PathLike[str]) -> bool:
    """Whether a string or path is an address of a web server."""
    return str(text).startswith(("http://", "https://"))


def as_path(text: str | os.PathLike[str], setting: str = "path") -> Path:
    """The path that a string names: local, or in an object store. `~` is the home folder.

    Args:
        setting: its name, for messages.

    Raises:
        UserError: it is neither a string nor a path.
    """
    # Otherwise a folder called `3` or `None` would be made.
    if not isinstance(text, str | os.PathLike):
        raise UserError(f"{setting}: expected a path, got {type(text).__name__}")
    return UrlPath(text) if is_url(text) else Path(os.path.expanduser(str(text).removeprefix("file://")))


def local_path(text: str | os.PathLike[str], setting: str = "it") -> Path:
    """The path of a file or folder that is written on this machine.

    Args:
        setting: its name, for messages.

    Raises:
        UserError: it is no path, or a URL: a folder called `s3:` would be made.
    """
    if is_url(text):
        raise UserError(
            f"{setting} is '{text}', but it must be a local path", cure="Write it locally, and copy it after."
        )
    return as_path(text, setting)
