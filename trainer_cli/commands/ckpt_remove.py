"""List, verify, pin and remove checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.catalog import Entry, catalog_of, why_damaged
from trainer_cli.checkpoint.history import CheckpointHistory
from trainer_cli.checkpoint.storage.base import Storage
from trainer_cli.checkpoint.storage.open import open_storage
from trainer_cli.core.naming import MANIFEST_FILE, is_run_id
from trainer_cli.errors import CheckpointError
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.runs.select import Named, all_of, best_of, id_of

_READERS = 4
_TRIES = 5
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint, or what should have become one."""

    path: Path
    entry: Entry
    run: Path | None = None
    """The directory of its run, where that is known."""
    best: bool = False
    named: bool = False
    """Whether the command named this one, not all that a glob or a run names."""

    @property
    def state(self) -> str:
        """In a word."""
        if self.entry.removed:
            return "being removed"
        if self.entry.problem is not None:
            return "partial" if self.entry.partial else "damaged"
        return "valid" if self.entry.resumable else "not finite"

    @property
    def finished(self) -> bool:
        """Whether its run ended with it."""
        return self.entry.manifest is not None and self.entry.manifest.finished is not None

    @property
    def saved_at(self) -> float | None:
        """Unix seconds."""
        try:
            return os.stat(self.path / MANIFEST_FILE).st_mtime
        except OSError:
            return None

    def record(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        manifest = self.entry.manifest
        return {
            "path": str(self.path),
            "run": None if self.run is None else str(self.run),
            "step": self.entry.step,
            "valid": self.entry.valid,
            "state": self.state,
            "problem": self.entry.problem,
            "pinned": self.entry.pinned,
            "best": self.best,
            "kind": manifest.kind.value if manifest else None,
            "reason": manifest.reason if manifest else None,
            "finished": manifest.finished if manifest else None,
            "finite": manifest.finite if manifest else None,
            "size_bytes": self.entry.size_bytes if manifest else None,
            "saved_at": self.saved_at,
            "metrics": dict(manifest.metrics) if manifest else {},
        }


def look(patterns: Sequence[str]) -> list[Item]:
    """What the patterns name, by folder and step; each folder is read once.

    What a run removes meanwhile is left out, so that there may be nothing.

    Raises:
        CheckpointError: a pattern names nothing, or one that is removed meanwhile.
    """
    named: dict[Path, dict[str, Named]] = {}
    for path, how in all_of(patterns).items():
        named.setdefault(path.parent, {})[path.name] = how
    items: list[Item] = []
    for folder, names in named.items():
        catalog = catalog_of(folder)
        entries = catalog.entries()
        missing = names.keys() - {entry.name for entry in entries}
        # A copy is none of the run's, but may be named itself.
        copies = [catalog.entry(name) for name in sorted(missing) if names[name].itself]
        if lost := [entry.name for entry in copies if entry.manifest is None]:
            raise CheckpointError(f"{folder / min(lost)} is no checkpoint, or was removed meanwhile")
        run = next((how.run for how in names.values() if how.run is not None), None)
        run_id = id_of(run)
        own = [one for one in entries if one.valid and one.manifest and run_id in (None, one.manifest.run_id)]
        best = best_of(own, run)
        items += [
            Item(
                folder / entry.name,
                entry,
                names[entry.name].run,
                best is not None and entry.name == best.name,
                names[entry.name].itself,
            )
            for entry in (*entries, *copies)
            if entry.name in names
        ]
    return items


def verify_all(items: Sequence[Item], show: Callable[[int, Item], None]) -> dict[Path, str | None]:
    """Read every file of every checkpoint, some at once: path -> what is wrong, or None if nothing is.

    One that is removed meanwhile is not among them. `show` is called after each, with the number of those done.
    """
    found: dict[Path, str | None] = {}
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        for done, (item, (there, problem)) in enumerate(zip(items, pool.map(_verified, items), strict=True), start=1):
            if there:
                found[item.path] = problem
            show(done, item)
    return found


def pin(items: Sequence[Item], *, pinned: bool) -> list[Path]:
    """Pin or unpin; those that were not so already.

    Raises:
        CheckpointError: one has no manifest, so that pinning it would keep nothing; none was changed.
    """
    for item in items:
        if item.entry.manifest is None and pinned:
            raise CheckpointError(f"{item.path}: {item.entry.problem}", cure="Only a checkpoint can be pinned.")
    changed = [item for item in items if item.entry.pinned is not pinned]
    for item in changed:
        _storage_of(item).pin(item.path.name, pinned=pinned)
    return [item.path for item in changed]


def why_not_remove(items: Sequence[Item]) -> dict[Path, str]:
    """Which of these should not be removed without force, and why: pinned ones, and the last valid one of a run."""
    reasons = {item.path: "it is pinned" for item in items if item.entry.pinned}
    going: dict[str, set[str]] = {}
    for item in items:
        going.setdefault(os.path.realpath(item.path.parent), set()).add(item.path.name)
    for folder in dict.fromkeys(item.path.parent for item in items):
        last: dict[str, str] = {}
        stays: set[str] = set()
        for entry in catalog_of(folder).entries():
            if entry.resumable and entry.manifest is not None:
                last[entry.manifest.run_id] = entry.name
                if entry.name not in going[os.path.realpath(folder)]:
                    stays.add(entry.manifest.run_id)
        for run_id, name in last.items():
            if run_id not in stays:
                reasons.setdefault(folder / name, "it is the last valid one of its run")
    return reasons


def remove(items: Iterable[Item], reasons: Mapping[Path, str] | None = None) -> tuple[list[Path], dict[Path, str]]:
    """Remove checkpoints, or what is left of them: those that are gone, and why others are not.

    Their runs record the removal, with the reason of each; without one it is `train ckpt rm`.
    """
    gone: list[Path] = []
    left: dict[Path, str] = {}
    for item in items:
        storage, name = _storage_of(item), item.path.name
        done = storage.clear(name) if item.entry.partial else storage.remove(name)
        if done or not item.path.exists():
            gone.append(item.path)
            if item.run is not None and not item.entry.partial:
                reason = (reasons or {}).get(item.path, "train ckpt rm")
                CheckpointHistory(RunDir(item.run).history_file).removed(name, reason)
        else:
            left[item.path] = "it is a link" if item.path.is_symlink() else "it is being read"
    return gone, left


def _storage_of(item: Item) -> Storage:
    """The storage that marks what it removes as the run's own, so that the run would clear it away."""
    manifest = item.entry.manifest
    run_id = manifest.run_id if manifest is not None and is_run_id(manifest.run_id) else "local"
    return open_storage(item.path.parent, run_id=run_id, attempt=manifest.attempt if manifest is not None else 0)


def _verified(item: Item) -> tuple[bool, str | None]:
    """Whether a checkpoint is still there, and what is wrong with it."""
    catalog = catalog_of(item.path.parent)
    problem: str | None = None
    for _ in range(_TRIES):
        try:
            problem = why_damaged(catalog.storage, item.entry)
            break
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
            if not isinstance(error, FileNotFoundError) or catalog.entry(item.path.name).removed:
                break
        # A removal locks a checkpoint shortly before it shows that it has begun.
        time.sleep(_PAUSE_S)
    return problem is None or not catalog.entry(item.path.name).removed, problem
