"""Lists the checkpoints of a storage, and whether each is valid. Reads the disk at every call."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

from trainer_cli.checkpoint.manifest import Manifest, ManifestError
from trainer_cli.checkpoint.naming import MANIFEST_FILE, REMOVED_PREFIX, parse_step
from trainer_cli.checkpoint.policy import Saved
from trainer_cli.checkpoint.storage.interfaces import Storage
from trainer_cli.config.schema import CheckpointFormat
from trainer_cli.errors import one_line
from trainer_cli.trainer.progress import Progress

logger = logging.getLogger(__name__)

PARTIAL = "it has no manifest, so it is partial"
REMOVING = "it is being removed"
GONE = "it is not there"


@dataclass(frozen=True, slots=True)
class Entry:
    """One folder with the name of a checkpoint, or with a manifest."""

    name: str
    step: int
    manifest: Manifest | None
    problem: str | None
    """Why it is not valid: partial, damaged, or in conflict with its name."""
    pinned: bool = False

    @property
    def partial(self) -> bool:
        """Whether it has no manifest: it was never committed, or its removal has begun."""
        return self.manifest is None and self.problem in (PARTIAL, REMOVING, GONE)

    @property
    def removed(self) -> bool:
        """Whether its removal has begun or is done."""
        return self.problem in (REMOVING, GONE)

    @property
    def is_copy(self) -> bool:
        """Whether it was saved under another name: a user copied or renamed it. It is no checkpoint of a run by itself:
        nothing counts, resumes or removes it unless it is named."""
        return self.manifest is not None and self.manifest.name not in (None, self.name)

    @property
    def valid(self) -> bool:
        """Whether manifest, files and sizes fit. Digests are verified when it is read."""
        return self.manifest is not None and self.problem is None

    @property
    def resumable(self) -> bool:
        """True for a valid one whose weights are finite; no resume chooses another by itself."""
        return self.valid and self.manifest is not None and self.manifest.finite

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files; 0 if they are unknown."""
        return sum(file.size_bytes for file in self.manifest.files.values()) if self.manifest is not None else 0

    def saved(self) -> Saved | None:
        """The facts for the policy; None if it is not valid."""
        if self.manifest is None or not self.valid:
            return None
        return Saved(
            self.name,
            self.step,
            self.manifest.kind,
            finished=self.manifest.finished is not None,
            pinned=self.pinned,
            finite=self.manifest.finite,
            metrics=self.manifest.metrics,
            progress=Progress.of(self.manifest.progress),
        )


class Catalog:
    """The checkpoints of one storage: folders called `step{N}`, and all others that hold a manifest, but no copies."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def names(self) -> list[str]:
        """The folders that may be checkpoints, by name or because they have a manifest; no manifest is read."""
        return [
            name
            for name in self.storage.names()
            if parse_step(name) is not None or MANIFEST_FILE in self.storage.sizes(name)
        ]

    def entries(self) -> list[Entry]:
        """All checkpoints by step, partial and damaged ones too, but no copies. Sizes are checked."""
        found = [entry for name in self.storage.names() if (entry := self._look(name)) is not None]
        return sorted(found, key=lambda entry: (entry.step, entry.name))

    def entry(self, name: str) -> Entry:
        """The checkpoint of that name, or the copy."""
        step = parse_step(name)
        manifest, problem = examine(self.storage, name)
        if manifest is not None and manifest.name is not None:
            step = manifest.step
        elif manifest is not None and problem is None and step not in (None, manifest.step):
            problem = f"its manifest is of step {manifest.step}"
        if manifest is not None and problem is None and manifest.format not in tuple(CheckpointFormat):
            problem = f"its format {one_line(manifest.format[:40])!r} is unknown"
        try:
            pinned = self.storage.is_pinned(name)
        except OSError as error:
            logger.warning("cannot see whether %s is pinned, so it is kept: %s", name, error)
            pinned = True
        if step is None:
            step = manifest.step if manifest is not None else 0
        return Entry(name, step, manifest, problem, pinned)

    def valid(self, run_id: str | None = None) -> list[Entry]:
        """The valid checkpoints of a run, or of any run, by step."""
        valid = [entry for entry in self.entries() if entry.valid]
        return [entry for entry in valid if entry.manifest and run_id in (None, entry.manifest.run_id)]

    def newest_valid(self, run_id: str | None = None) -> Entry | None:
        """The newest one of a run, or of any run, that a resume may start from."""
        return next((entry for entry in reversed(self.valid(run_id)) if entry.resumable), None)

    def _look(self, name: str) -> Entry | None:
        """The entry of a folder; None if it does not exist, has neither a checkpoint's name nor a manifest, or is a
        copy."""
        entry = self.entry(name)
        is_other = entry.problem == PARTIAL and parse_step(name) is None
        return None if is_other or entry.is_copy or entry.problem == GONE else entry


@lru_cache(maxsize=4096)
def _parsed(data: bytes) -> Manifest:
    """Parse a manifest; the same bytes are parsed once."""
    return Manifest.parse(data)


def examine(storage: Storage, name: str) -> tuple[Manifest | None, str | None]:
    """The manifest of a checkpoint, and what is wrong with it, its files or their sizes.

    A problem counts only if the manifest is the same before and after: a removal in between looks like damage.
    """
    try:
        while True:
            data = storage.peek(name, MANIFEST_FILE)
            found = _without_manifest(storage, name) if data is None else _with_manifest(storage, name, data)
            if found[1] is None or storage.peek(name, MANIFEST_FILE) == data:
                return found
    except OSError as error:
        return None, f"it cannot be read: {error}"


def _with_manifest(storage: Storage, name: str, data: bytes) -> tuple[Manifest | None, str | None]:
    try:
        manifest = _parsed(data)
    except ManifestError as error:
        return None, str(error)
    sizes = storage.sizes(name)
    for file, entry in sorted(manifest.files.items()):
        if file not in sizes:
            return manifest, f"{file} is missing"
        if sizes[file] != entry.size_bytes:
            return manifest, f"{file} has {sizes[file]:,} bytes instead of {entry.size_bytes:,}"
    return manifest, None


def _without_manifest(storage: Storage, name: str) -> tuple[None, str]:
    if any(file.startswith(REMOVED_PREFIX) for file in storage.sizes(name)):
        return None, REMOVING
    return None, PARTIAL if name in storage.names() else GONE
