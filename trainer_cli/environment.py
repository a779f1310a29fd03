"""Facts about this process for bug reports and run directories: versions, host, git. Does not import torch."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from trainer_cli.bounds import is_time

PACKAGES = (
    "trainer-cli", "torch", "numpy", "hydra-core", "omegaconf",
    "safetensors", "tensorboard", "rich", "xxhash",
)  # fmt: skip
_GIT_TIMEOUT_S = 5.0


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(project_root: Path, argv: Sequence[str], *, now: float) -> dict[str, Any]:
    """Facts about this process. No environment variable is recorded, so no secret.

    torch is not imported: the caller adds what it knows of devices.
    """
    return {
        "time": timestamp(now),
        "argv": list(argv),
        "host": socket.gethostname(),
        "project_root": str(project_root),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "versions": versions(),
        "git": git_facts(project_root),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Installed versions of packages, without importing them; None for a package that is not installed."""
    return {package: _installed_version(package) for package in packages}


@cache
def _installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    # Read once: a start of a training asks twice, and each answer parses a file.
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_facts(folder: Path) -> dict[str, Any] | None:
    """The commit of a repository, and whether tracked files differ from it; None outside one or without git."""
    commit = run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def run_git(folder: Path, *arguments: str) -> str | None:
    """The output of a command of git in a folder; None if it fails, or git is not installed."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            # A repository on a slow network must not delay a training for long.
            timeout=_GIT_TIMEOUT_S,
            # `git status` would otherwise lock and write the index, beside a git command of the user.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def timestamp(now: float) -> str:
    """Unix seconds as an ISO date in UTC."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")


def unix(text: Any) -> float | None:
    """The unix time, in seconds, of an ISO date; None if the text is no date, or one before 1970."""
    try:
        at = datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return None
    return at if is_time(at) else None
