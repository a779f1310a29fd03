"""Find the checkpoints that a command names, and verify, pin or remove them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_cli.catalog import Catalog, CheckpointHistory, Entry
from trainer_cli.errors import CheckpointError, TrainError
from trainer_cli.layout import MANIFEST_FILE, is_run_id
from trainer_cli.runs import RunDir
from trainer_cli.selection import NamedFolder, StoredCheckpoint, best_of, select_all
from trainer_cli.storage import Storage, open_storage

_READERS = 4
_TRIES = 5
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint, complete or not."""

    path: Path
    entry: Entry
    run: Path | None = None
    """The directory of its run; None if the command names only a folder of checkpoints."""
    best: bool = False
    named: bool = False
    """Whether the command names this checkpoint itself, not by a glob or a run."""

    @property
    def state(self) -> str:
        """`valid`, `not finite`, `damaged`, `partial` or `being removed`."""
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
        """Unix time of the commit in seconds; None if there is no manifest."""
        try:
            return os.stat(self.path / MANIFEST_FILE).st_mtime
        except OSError:
            return None

    def record(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
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


def find_items(patterns: Sequence[str]) -> list[Item]:
    """The checkpoints that the patterns name, by folder and step.

    Checkpoints that a run removes meanwhile are left out, so that the list may be empty.

    Raises:
        CheckpointError: a pattern matches nothing, or the checkpoint that it names is removed meanwhile.
    """
    # They are grouped by folder, so that each folder is read once.
    matches: dict[Path, dict[str, NamedFolder]] = {}
    for path, match in select_all(patterns).items():
        matches.setdefault(path.parent, {})[path.name] = match
    items: list[Item] = []
    for folder, names in matches.items():
        catalog = Catalog.of(folder)
        entries = catalog.entries()
        missing = names.keys() - {entry.name for entry in entries}
        # The catalog does not list copies and replayed checkpoints, which a command may name.
        unlisted = [catalog.entry(name) for name in sorted(missing)]
        copies = [entry for entry in unlisted if names[entry.name].itself or entry.is_replayed]
        if lost := [entry.name for entry in copies if entry.manifest is None]:
            raise CheckpointError(f"{folder / min(lost)} is not a checkpoint, or was removed meanwhile")
        run = next((match.run for match in names.values() if match.run is not None), None)
        run_id = None if run is None else RunDir(run).known_id
        best = best_of([entry for entry in entries if entry.valid and entry.may_be_of(run_id)], run)
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
    """Read every file of every checkpoint, a few checkpoints at a time. Returns path -> its damage, or None if valid.

    Checkpoints that are removed meanwhile are left out.

    Args:
        show: called after each checkpoint with the number of those done.
    """
    problems: dict[Path, str | None] = {}
    # Threads: the digests are computed in C, without the interpreter's lock.
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        results = zip(items, pool.map(_verify, items), strict=True)
        for done, (item, (exists, problem)) in enumerate(results, start=1):
            if exists:
                problems[item.path] = problem
            show(done, item)
    return problems


def pin(items: Sequence[Item], *, pinned: bool) -> list[Path]:
    """Pin or unpin checkpoints. Returns those that changed.

    Raises:
        CheckpointError: one has no manifest, so that pinning it would keep nothing. None was changed.
    """
    for item in items:
        # Before any pin is set, so that a mistake in one name changes none.
        if item.entry.manifest is None and pinned:
            raise CheckpointError(f"{item.path}: {item.entry.problem}", cure="Only a checkpoint can be pinned.")
    changed = [item for item in items if item.entry.pinned is not pinned]
    for item in changed:
        _storage_of(item).pin(item.path.name, pinned=pinned)
    return [item.path for item in changed]


def why_not_remove(items: Sequence[Item]) -> dict[Path, str]:
    """The checkpoints that are removed only with `--force`, and why: pinned, or the last valid one of its run."""
    reasons = {item.path: "it is pinned" for item in items if item.entry.pinned}
    # Real paths: the same folder may be named through a link too.
    removed_names: dict[str, set[str]] = {}
    for item in items:
        removed_names.setdefault(os.path.realpath(item.path.parent), set()).add(item.path.name)
    for folder in dict.fromkeys(item.path.parent for item in items):
        # Id of a run -> the newest valid checkpoint; and the runs of which a valid one remains.
        last: dict[str, str] = {}
        remaining: set[str] = set()
        for entry in Catalog.of(folder).entries():
            if entry.resumable and entry.manifest is not None:
                last[entry.manifest.run_id] = entry.name
                if entry.name not in removed_names[os.path.realpath(folder)]:
                    remaining.add(entry.manifest.run_id)
        for run_id, name in last.items():
            if run_id not in remaining:
                reasons.setdefault(folder / name, "it is the last valid one of its run")
    return reasons


def remove(items: Iterable[Item], reasons: Mapping[Path, str] | None = None) -> tuple[list[Path], dict[Path, str]]:
    """Remove checkpoints and remains of partial ones. Returns the paths removed, and why each other one was kept.

    Args:
        reasons: what the history of the run records for each; by default `train ckpt rm`.
    """
    removed: list[Path] = []
    refused: dict[Path, str] = {}
    for item in items:
        # The run first: the config in the checkpoint may be all that names it.
        run, storage, name = _run_of(item), _storage_of(item), item.path.name
        # A partial one has no manifest, by which `remove` would mark the begin of the removal.
        is_removed = storage.clear(name) if item.entry.partial else storage.remove(name)
        # The run itself may have removed it at the same time.
        if is_removed or not item.path.exists():
            removed.append(item.path)
            if run is not None and not item.entry.partial:
                reason = (reasons or {}).get(item.path, "train ckpt rm")
                CheckpointHistory(RunDir(run).history_file).removed(name, reason)
        else:
            refused[item.path] = "it is a link" if item.path.is_symlink() else "it is being read"
    return removed, refused


def _run_of(item: Item) -> Path | None:
    """The run that saves in the folder of a checkpoint; None if it is unknown, or the folder is one of copies."""
    if item.run is not None:
        return item.run
    # The checkpoint may be damaged: then its run is unknown.
    with suppress(OSError, TrainError):
        run = StoredCheckpoint(item.path).find_run()
        if run is not None and os.path.realpath(RunDir(run).stored_checkpoints()) == os.path.realpath(item.path.parent):
            return run
    return None


def _storage_of(item: Item) -> Storage:
    """The storage, with the identity of the checkpoint's run, which later completes an interrupted removal."""
    manifest = item.entry.manifest
    # An id from a damaged manifest must not become part of a path.
    run_id = manifest.run_id if manifest is not None and is_run_id(manifest.run_id) else "local"
    return open_storage(item.path.parent, run_id=run_id, attempt=manifest.attempt if manifest is not None else 0)


def _verify(item: Item) -> tuple[bool, str | None]:
    """Whether a checkpoint still exists, and its damage or None."""
    catalog = Catalog.of(item.path.parent)
    problem: str | None = None
    for _ in range(_TRIES):
        try:
            problem = catalog.why_damaged(item.entry)
            break
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
            if not isinstance(error, FileNotFoundError) or catalog.entry(item.path.name).removed:
                break
        # A removal locks the checkpoint before it marks it: wait before a missing file counts as damage.
        time.sleep(_PAUSE_S)
    return problem is None or not catalog.entry(item.path.name).removed, problem
