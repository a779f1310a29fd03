"""Looking after checkpoints: what is there, is it sound, pin it, remove it, prune a run by its own rules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.catalog import Entry
from trainer_cli.checkpoint.naming import MANIFEST_FILE
from trainer_cli.checkpoint.policy import BestRule, RetentionRules, why_keep, why_remove
from trainer_cli.checkpoint.soundness import catalog_of, why_unsound
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.config.schema import CheckpointConfig
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.run.rundir import RunDir
from trainer_cli.run.select import all_of, best_of
from trainer_cli.trainer.duration import Duration
from trainer_cli.trainer.timetable import Cadence

_READERS = 4


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint, or what should have become one."""

    path: Path
    entry: Entry
    saved_at: float | None
    """Unix seconds."""
    best: bool = False

    @property
    def state(self) -> str:
        """`valid`, or why not."""
        return "valid" if self.entry.problem is None else self.entry.problem

    def record(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        manifest = self.entry.manifest
        return {
            "path": str(self.path),
            "step": self.entry.step,
            "valid": self.entry.valid,
            "problem": self.entry.problem,
            "pinned": self.entry.pinned,
            "best": self.best,
            "kind": manifest.kind.value if manifest else None,
            "reason": manifest.reason if manifest else None,
            "finished": manifest.finished if manifest else None,
            "finite": manifest.finite if manifest else None,
            "size_bytes": self.entry.size_bytes,
            "saved_at": self.saved_at,
            "metrics": {name: _plain(value) for name, value in manifest.metrics.items()} if manifest else {},
        }


def look(patterns: Sequence[str]) -> list[Item]:
    """What the patterns name, by folder and step.

    Raises:
        CheckpointError: a pattern names nothing.
    """
    paths = list(dict.fromkeys(path for pattern in patterns for path in all_of(pattern)))
    items: list[Item] = []
    for folder in dict.fromkeys(path.parent for path in paths):
        wanted = {path.name for path in paths if path.parent == folder}
        entries = catalog_of(folder).entries()
        best = best_of([entry for entry in entries if entry.valid], run_of(folder).path)
        items += [
            Item(
                folder / entry.name, entry, _saved_at(folder / entry.name), best is not None and entry.name == best.name
            )
            for entry in entries
            if entry.name in wanted
        ]
    return items


def run_of(folder: Path) -> RunDir:
    """The run that a folder of checkpoints belongs to, by its place."""
    return RunDir(folder.absolute().parent if folder == Path() else folder.parent)


def verify_all(items: Sequence[Item], told: Callable[[Item, str | None], None]) -> dict[Path, str]:
    """Read every file of every checkpoint, some at once; path -> what is wrong. `told` hears of each as it is done."""
    faults: dict[Path, str] = {}
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        for item, problem in zip(items, pool.map(_why_unsound, items), strict=True):
            if problem is not None:
                faults[item.path] = problem
            told(item, problem)
    return faults


def pin(items: Iterable[Item], *, pinned: bool) -> list[Path]:
    """Pin or unpin; those that were not so already.

    Raises:
        CheckpointError: one has no manifest, so that pinning it would keep nothing.
    """
    changed = []
    for item in items:
        if item.entry.manifest is None and pinned:
            raise CheckpointError(f"{item.path} is not valid: {item.state}", cure="Only a checkpoint can be pinned.")
        if item.entry.pinned is not pinned:
            _storage_of(item).pin(item.path.name, pinned=pinned)
            changed.append(item.path)
    return changed


def why_not_remove(items: Sequence[Item]) -> dict[Path, str]:
    """Which of these should not be removed without force, and why: pinned ones, and the last valid one of a run."""
    reasons = {item.path: "it is pinned" for item in items if item.entry.pinned}
    for folder, group in groupby(items, key=lambda item: item.path.parent):
        going = {item.path.name for item in group}
        valid = [entry for entry in catalog_of(folder).entries() if entry.resumable]
        if valid and {entry.name for entry in valid} <= going:
            reasons.setdefault(folder / valid[-1].name, "no other valid checkpoint of its run would be left")
    return reasons


def remove(item: Item) -> None:
    """Remove a checkpoint, or what is left of one.

    Raises:
        UserError: it is just being read.
        OSError: the disk refuses.
    """
    storage = _storage_of(item)
    name = item.path.name
    gone = storage.clear(name) if item.entry.partial else storage.remove(name)
    if not gone and item.path.exists():
        raise UserError(f"{item.path} is being read, or is no folder of its own", cure="Try again later.")


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a run's own rules of removal say of one folder of checkpoints."""

    run: RunDir
    keep: dict[Path, str]
    go: dict[Path, str]


def prunings(items: Sequence[Item]) -> Iterator[Pruning]:
    """What would go by the rules of each run that the items belong to; the items that are not valid are left alone.

    Raises:
        CheckpointError: a folder belongs to no run whose config can be read.
    """
    # Hydra would take most of the time of an answer that does not need it.
    from trainer_cli.config.compose import from_yaml

    for folder in dict.fromkeys(item.path.parent for item in items):
        run = run_of(folder)
        if not run.exists_as_run():
            raise CheckpointError(f"{folder} belongs to no run, so there are no rules to prune it by")
        settings = from_yaml(run.config_file, trusted=True, missing_ok=True).config.checkpoint
        entries = catalog_of(folder).valid(run.run_id)
        saved = [one for entry in entries if (one := entry.saved()) is not None]
        rules = _retention(settings, steps_per_epoch(entries))
        chosen = {item.path.name for item in items if item.path.parent == folder}
        keep, go = why_keep(saved, rules), why_remove(saved, rules)
        yield Pruning(
            run, _at(folder, keep), {path: why for path, why in _at(folder, go).items() if path.name in chosen}
        )


def carry_out(pruning: Pruning, items: Sequence[Item]) -> None:
    """Remove what a pruning says, with the run's lock held.

    Raises:
        RunDirectoryError: the run is training, and prunes by itself.
    """
    with ExitStack() as stack:
        stack.enter_context(pruning.run.lock())
        for item in items:
            if item.path in pruning.go:
                remove(item)


def steps_per_epoch(entries: Sequence[Entry]) -> int | None:
    """The length of an epoch, told from a checkpoint at an epoch's end; None where there is none."""
    for entry in entries:
        progress = entry.manifest.progress if entry.manifest is not None else {}
        epoch, step = progress.get("epoch", 0), progress.get("step", 0)
        if epoch and not progress.get("batch", 1) and (length := Fraction(step) / Fraction(epoch)).denominator == 1:
            return int(length)
    return None


def _retention(settings: CheckpointConfig, epoch: int | None) -> RetentionRules:
    def cadence(interval: Any, key: str) -> Cadence | None:
        if interval is None:
            return None
        try:
            return Cadence(Duration.parse(interval), epoch)
        except ValueError:
            raise UserError(
                f"checkpoint.{key}={interval} cannot be told without knowing how many steps an epoch has, and no "
                "checkpoint was saved at an epoch's end",
                where=f"checkpoint.{key}",
            ) from None

    best = settings.keep_best
    return RetentionRules(
        remove=settings.remove,
        max_checkpoints=settings.max_checkpoints,
        keep_every=cadence(settings.keep_every, "keep_every"),
        keep_best=None if best.metric is None else BestRule(best.metric, best.mode, best.count),
        fixed_steps=frozenset(settings.fixed_steps),
        save_interval=cadence(settings.save_interval, "save_interval"),
    )


def _storage_of(item: Item) -> LocalStorage:
    """The storage that marks what it removes as the run's own, so that the run would clear it away."""
    manifest = item.entry.manifest
    run_id = manifest.run_id if manifest is not None and manifest.run_id else "local"
    return LocalStorage(item.path.parent, run_id=run_id, attempt=manifest.attempt if manifest is not None else 0)


def _why_unsound(item: Item) -> str | None:
    try:
        return why_unsound(catalog_of(item.path.parent).storage, item.entry)
    except OSError as error:
        return f"it cannot be read: {error}"


def _saved_at(path: Path) -> float | None:
    try:
        return (path / MANIFEST_FILE).stat().st_mtime
    except OSError:
        return None


def _at(folder: Path, reasons: Mapping[str, str]) -> dict[Path, str]:
    return {folder / name: why for name, why in reasons.items()}


def _plain(value: float) -> float | str:
    return value if value - value == 0 else str(value)
