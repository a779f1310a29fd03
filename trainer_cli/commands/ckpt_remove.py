"""List, verify, pin and remove checkpoints.

Apply a run's retention rules to its checkpoints now, as its next save would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.catalog import Entry, catalog_of, is_intact, why_damaged
from trainer_cli.checkpoint.history import CheckpointHistory
from trainer_cli.checkpoint.storage.base import Storage
from trainer_cli.checkpoint.storage.open import open_storage
from trainer_cli.config.arguments import SAVER
from trainer_cli.config.compose import from_yaml
from trainer_cli.core.intervals import Duration, Interval
from trainer_cli.core.naming import MANIFEST_FILE, is_run_id
from trainer_cli.core.policy import RetentionRules, retention_rules, settings_of, why_keep, why_remove
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.runs.select import Named, best_of, id_of, select_all

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
    for path, how in select_all(patterns).items():
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


@dataclass(frozen=True, slots=True)
class Pruning:
    """The result of the rules for one folder of checkpoints."""

    run: RunDir
    keep: dict[Path, str]
    go: dict[Path, str]


def prunings(items: Sequence[Item]) -> Iterator[Pruning]:
    """What the rules of each run that the items belong to would remove.

    Checkpoints of other runs, damaged or partial ones, and those newer than the newest valid one are in neither list.

    Raises:
        CheckpointError: a folder belongs to no run whose config can be read.
    """
    for folder in dict.fromkeys(item.path.parent for item in items):
        here = [item for item in items if item.path.parent == folder]
        run = RunDir(next((item.run for item in here if item.run is not None), folder))
        if not run.exists_as_run():
            raise CheckpointError(
                f"{folder} is in no run's directory, so its rules are unknown",
                cure="Name the run: train ckpt prune RUN_DIRECTORY.",
            )
        entries = _usable(folder, run.run_id)
        saved = [one for entry in entries if (one := entry.saved()) is not None]
        rules = _rules(run, entries)
        chosen = {item.path for item in here}
        go = {folder / name: why for name, why in why_remove(saved, rules).items() if folder / name in chosen}
        yield Pruning(run, {folder / name: why for name, why in why_keep(saved, rules).items()}, go)


def apply_pruning(pruning: Pruning, items: Sequence[Item]) -> tuple[list[Path], dict[Path, str]]:
    """Remove, with the run's lock held, what the rules still remove; what was removed, and what was not and why.

    Raises:
        RunDirectoryError: the run is training, and applies the rules itself.
    """
    with pruning.run.lock():
        own = [item for item in items if item.path in pruning.keep or item.path in pruning.go]
        still = {path: f"train ckpt prune: {why}" for now in prunings(own) for path, why in now.go.items()}
        return remove([item for item in own if item.path in pruning.go and item.path in still], still)


def steps_per_epoch(entries: Sequence[Entry]) -> int | None:
    """The length of an epoch, computed from a checkpoint at an epoch's end; None if there is none."""
    for entry in entries:
        progress: Mapping[str, Any] = entry.manifest.progress if entry.manifest is not None else {}
        epoch, step = progress.get("epoch", 0), progress.get("step", 0)
        if epoch and not progress.get("batch", 1) and (length := Fraction(step) / Fraction(epoch)).denominator == 1:
            return int(length)
    return None


def _usable(folder: Path, run_id: str) -> list[Entry]:
    """The run's valid checkpoints up to the one that a resume would load."""
    catalog = catalog_of(folder)
    entries = catalog.valid(run_id)
    while entries and (not entries[-1].resumable or not is_intact(catalog.storage, entries[-1])):
        entries.pop()
    return entries


def _rules(run: RunDir, entries: Sequence[Entry]) -> RetentionRules:
    config = from_yaml(run.config_file, trusted=True, missing_ok=True).config
    settings = settings_of(config.checkpoint, config.callbacks.get(SAVER))
    epoch = config.loop.steps_per_epoch or steps_per_epoch(entries)

    def interval(key: str, duration: Any) -> Interval | None:
        if duration is None:
            return None
        try:
            return Interval(Duration.parse(duration).within(Duration.parse(config.loop.max_duration)), epoch)
        except ValueError:
            raise UserError(
                f"checkpoint.{key}={duration} needs the number of steps of an epoch, and no "
                "checkpoint was saved at an epoch's end",
                where=os.fspath(run.config_file),
            ) from None

    return retention_rules(settings, interval)
