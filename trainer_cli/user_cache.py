"""The user's cache: copies of what is in stores, what was extracted from archives, what was compiled, and locks of
GPUs."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from pathlib import Path

from trainer_cli.errors import UserError


def cache_of(url: str) -> Path:
    """The folder for copies of the content of a URL."""
    return _cache() / hashlib.sha256(url.encode()).hexdigest()[:16]


def folder_of_devices() -> Path:
    """The folder for the locks of this machine's GPUs: several machines may have one home folder."""
    return _cache() / "devices" / socket.gethostname()


def folder_of_compiled(version: str) -> Path:
    """The folder for what a version of torch compiles: apart for each processor, whose instructions it uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return _cache() / "compiled" / f"{version}-{hashlib.sha256(processor.encode()).hexdigest()[:8]}"


def is_cached(path: Path) -> bool:
    """Whether a path is in the cache."""
    return _cache() in path.parents


def _cache() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # The home of a user who has none stays "~".
    if folder.startswith("~"):
        raise UserError(
            "there is no folder for downloads: HOME is not set, and the user has no home folder",
            cure="Set XDG_CACHE_HOME to a folder with space for them.",
        )
    return Path(folder) / "trainer-cli"
