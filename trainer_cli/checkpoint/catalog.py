"""What is there: every checkpoint of a storage, and whether it can be trusted. Always asked of the disk."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from trainer_cli.checkpoint.manifest import Manifest, ManifestError
from trainer_cli.checkpoint.naming import MANIFEST_FILE, parse_step
from trainer_cli.checkpoint.policy import Saved
from trainer_cli.checkpoint.storage.port import Storage

logger = logging.getLogger(__name__)

PARTIAL = "it has no manifest, so it is partial"


@dataclass(frozen=True, slots=True)
class Entry:
    """One folder with a checkpoint's name."""

    name: str
    step: int
    manifest: Manifest | None
    problem: str | None
    """Why it is not valid: partial, damaged, or not what its name says."""
    pinned: bool = False

    @property
    def partial(self) -> bool:
        """True where nothing says that it was ever complete."""
        return self.manifest is None and self.problem == PARTIAL

    @property
    def valid(self) -> bool:
        """True where manifest, files and sizes fit. Digests are verified when it is read."""
        return self.manifest is not None and self.problem is None

    @property
    def resumable(self) -> bool:
        """True for a valid one whose weights are finite: weights with NaN are never chosen by themselves."""
        return self.valid and self.manifest is not None and self.manifest.finite

    def saved(self) -> Saved | None:
        """The facts for retention; None for one that has no say there."""
        if self.manifest is None or not self.resumable:
            return None
        finished = self.manifest.finished is not None
        return Saved(self.name, self.step, self.manifest.kind, finished=finished, pinned=self.pinned)


class Catalog:
    """The checkpoints of one storage, called `step{N}`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def entries(self) -> list[Entry]:
        """All of them by step, partial and damaged ones too. Sizes are checked."""
        found = [(step, name) for name in self.storage.names() if (step := parse_step(name)) is not None]
        return [self._entry(name, step) for step, name in sorted(found)]

    def entry(self, name: str) -> Entry:
        """The one of that name; where the name tells no step, its manifest does."""
        step = parse_step(name)
        if step is None:
            manifest, _ = examine(self.storage, name)
            step = manifest.step if manifest is not None else 0
        return self._entry(name, step)

    def valid(self, run_id: str | None = None) -> list[Entry]:
        """Those of a run, or of any run, that can be loaded, by step."""
        valid = [entry for entry in self.entries() if entry.valid]
        return [entry for entry in valid if entry.manifest and run_id in (None, entry.manifest.run_id)]

    def newest_valid(self, run_id: str | None = None) -> Entry | None:
        """The newest one of a run, or of any run, that a resume may start from."""
        return next((entry for entry in reversed(self.valid(run_id)) if entry.resumable), None)

    def _entry(self, name: str, step: int) -> Entry:
        try:
            manifest, problem = examine(self.storage, name)
        except OSError as error:
            manifest, problem = None, f"it cannot be read: {error}"
        if manifest is not None and problem is None and manifest.step != step:
            problem = f"its manifest is of step {manifest.step}"
        try:
            pinned = self.storage.is_pinned(name)
        except OSError as error:
            logger.warning("cannot see whether %s is pinned, so it is kept: %s", name, error)
            pinned = True
        return Entry(name, step, manifest, problem, pinned)


def examine(storage: Storage, name: str) -> tuple[Manifest | None, str | None]:
    """The manifest of a checkpoint, and what is wrong with it, its files or their sizes."""
    try:
        data = storage.peek(name, MANIFEST_FILE)
        if data is None:
            return None, PARTIAL
        manifest = Manifest.parse(data)
        sizes = storage.sizes(name)
    except ManifestError as error:
        return None, str(error)
    except OSError as error:
        return None, f"it cannot be read: {error}"
    for file, entry in sorted(manifest.files.items()):
        if file not in sizes:
            return manifest, f"{file} is missing"
        if sizes[file] != entry.size_bytes:
            return manifest, f"{file} has {sizes[file]:,} bytes instead of {entry.size_bytes:,}"
    return manifest, None
