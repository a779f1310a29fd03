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


def is_url(text: str | os.PathLike[str], *, web: bool = False) -> bool:
    """Whether a string or path is the URL of an object store or, with `web`, an address of a web server.

    `file://` is a local path.
    """
    if web:
        return str(text).startswith(("http://", "https://"))
    return "://" in str(text) and not str(text).startswith("file://")


def as_path(text: str | os.PathLike[str], setting: str = "path", *, local: bool = False) -> Path:
    """The path that a string names: local, or in an object store. `~` is the home folder.

    Args:
        setting: its name, for messages.
        local: whether it is written on this machine.

    Raises:
        UserError: it is neither a string nor a path, or a URL that must be `local`.
    """
    # `str` would accept any object, and a folder called `3` or `None` would be made.
    if not isinstance(text, str | os.PathLike):
        raise UserError(f"{setting}: expected a path, got {type(text).__name__}")
    if not is_url(text):
        return Path(os.path.expanduser(str(text).removeprefix("file://")))
    # Written as a local path, it would be a folder called `s3:`.
    if local:
        raise UserError(
            f"{setting} is '{text}', but it must be a local path", cure="Write it locally, and copy it after."
        )
    return UrlPath(text)
