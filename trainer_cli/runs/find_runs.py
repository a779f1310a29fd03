"""Find the runs below a folder repeatedly; a directory is listed again only after it has changed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trainer_cli.errors import UserError
from trainer_cli.layout import SWEEP_FOLDER
from trainer_cli.runs.run_dir import RunDir

_SETTLED_NS = 2_000_000_000
"""A directory that changed this shortly before it was listed may change again without a new time of modification."""


class FoundRun(NamedTuple):
    """A run directory, or, with the reason in `unreadable`, a directory that cannot be listed and may be a run."""

    path: Path
    unreadable: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries of a directory that do not begin with a dot."""

    folders: tuple[str, ...]
    files: frozenset[str]
    changed_ns: int
    listed_ns: int


class Listings:
    """Cache of directory listings, each valid until the directory's time of modification changes."""

    def __init__(self) -> None:
        self._cache: dict[Path, Listing] = {}

    def of(self, folder: Path) -> Listing:
        """The listing of a directory.

        Raises:
            OSError: it cannot be listed.
        """
        changed_ns = os.stat(folder).st_mtime_ns
        cached = self._cache.get(folder)
        is_same = cached is not None and cached.changed_ns == changed_ns
        if cached is not None and is_same and cached.listed_ns - changed_ns > _SETTLED_NS:
            return cached
        # The time before the listing: a change during it must look newer.
        listed_ns = time.time_ns()
        folders: list[str] = []
        files: list[str] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    # The directory entry knows the type, so that no call for each file is needed.
                    (folders if entry.is_dir() else files).append(entry.name)
        listing = Listing(tuple(sorted(folders)), frozenset(files), changed_ns, listed_ns)
        self._cache[folder] = listing
        return listing


class RunFinder:
    """Finds the runs below a folder, and the folder itself if it is a run. Symbolic links are followed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.listings = Listings()

    def find(self) -> list[FoundRun]:
        """All runs that exist now."""
        return list(self._find_below(self.root, set()))

    def _find_below(self, folder: Path, seen: set[tuple[int, int]]) -> Iterator[FoundRun]:
        """The runs in a folder and below it, without the folders in `seen`, to which it is added."""
        try:
            # Device and inode are compared, so that a circle of symbolic links ends.
            identity = os.stat(folder)
            if (identity.st_dev, identity.st_ino) in seen:
                return
            seen.add((identity.st_dev, identity.st_ino))
            listing = self.listings.of(folder)
        except OSError as error:
            if isinstance(error, PermissionError):
                yield FoundRun(folder, f"its directory cannot be read: {error.strerror}")
            return
        run = RunDir(folder)
        is_run = {run.config_file.name, run.environment_file.name} <= listing.files
        if is_run:
            yield FoundRun(folder)
        for name in listing.folders:
            # Within a run only the folder of a sweep holds runs.
            if not is_run or name == SWEEP_FOLDER:
                yield from self._find_below(folder / name, seen)


def refuse_nested(path: Path) -> None:
    """Refuse a new run inside another one, or around others: `train top` and reports would not show the inner runs.

    Raises:
        UserError: it names the other run.
    """
    for above in path.parents:
        if RunDir(above).exists_as_run() and path.relative_to(above).parts[0] != SWEEP_FOLDER:
            raise UserError(
                f"{path} is inside the run {above}, where it would not be shown as a run",
                where="run_dir",
                cure="Choose a name= or run_dir= that is not below it.",
            )
    for name in os.listdir(path) if path.is_dir() else ():
        if name == SWEEP_FOLDER or name.startswith("."):
            continue
        inner_runs = [run for run in RunFinder(path / name).find() if run.unreadable is None]
        if inner_runs:
            raise UserError(
                f"{path} holds other runs, such as {inner_runs[0].path}, which would not be shown as runs any more",
                where="run_dir",
                cure="Choose another name= or run_dir=.",
            )
