"""Rules of values that several sections have: folders, and lists of patterns. They raise `ConfigError`."""

from __future__ import annotations

from trainer_cli.errors import Code, ConfigError
from trainer_cli.patterns import check_pattern
from trainer_cli.terminal import format_count
from trainer_cli.values import unfit_value

_LONGEST_NAME = 255
"""Bytes of a file name on the usual file systems."""


def check_folder(key: str, value: str | None, *, instead: str, urls: bool = False) -> None:
    """Refuse an empty folder (it would be the current one), one that only a shell expands, and a URL unless `urls`;
    null passes."""
    if value is None:
        return
    if not value.strip():
        raise ConfigError(f"{key} is empty", location=key, hint=instead)
    if value.startswith("~"):
        hint = "Write the whole path, or ${oc.env:HOME}."
        raise ConfigError(f"{key} is {value!r}, but only a shell expands ~", location=key, hint=hint)
    if "://" in value and not urls:
        raise unfit_value(key, value, "a local folder", code=Code.wrong_value)
    check_length(key, value)


def check_length(key: str, folder: str) -> None:
    """Refuse a path with a name that no file system takes: the folders above it would be made first. A URL passes."""
    longest = max(len(name.encode(errors="surrogateescape")) for name in folder.split("/"))
    if longest > _LONGEST_NAME and "://" not in folder:
        fault = (
            f"{key} contains a name of {format_count(longest, 'byte')}, but a file system takes at most {_LONGEST_NAME}"
        )
        raise ConfigError(fault, location=key, hint="Choose a shorter name.")


def check_patterns(key: str, patterns: list[str]) -> None:
    """Refuse a regular expression that does not compile."""
    for pattern in patterns:
        check_pattern(pattern, key)
