"""Apply a run's retention rules to its checkpoints now, as its next save would."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from trainer_cli.catalog import Catalog, Entry
from trainer_cli.commands.ckpt_remove import Item, remove
from trainer_cli.components import SAVER
from trainer_cli.config import from_yaml
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.files import is_url
from trainer_cli.policy import RetentionRules
from trainer_cli.runs import RunDir
from trainer_cli.steps import Duration, Interval
from trainer_cli.storage import LocalStorage


@dataclass(frozen=True, slots=True)
class Pruning:
    """The result of the rules for one folder of checkpoints: path -> reason."""

    run: RunDir
    keep: dict[Path, str]
    remove: dict[Path, str]


def prunings(items: Sequence[Item]) -> Iterator[Pruning]:
    """Apply the rules of each run that the items belong to, without removing anything.

    Checkpoints of other runs, damaged or partial ones, and those newer than the newest valid one are in neither table.

    Raises:
        CheckpointError: a folder belongs to no run whose config can be read.
    """
    # Folder by folder: the rules count all checkpoints of a run, also those that the command does not name.
    for folder in dict.fromkeys(item.path.parent for item in items):
        in_folder = [item for item in items if item.path.parent == folder]
        parent = RunDir(folder.parent)
        if folder == parent.replayed_folder and parent.is_run():
            replayed = [item for item in in_folder if item.entry.is_replayed]
            keep = {item.path: "pinned" for item in replayed if item.entry.pinned}
            removals = {item.path: "it was replayed" for item in replayed if not item.entry.pinned}
            yield Pruning(parent, keep, removals)
            continue
        run = RunDir(next((item.run for item in in_folder if item.run is not None), folder))
        if not run.exists_as_run():
            raise CheckpointError(
                f"{folder} is not in a run's directory, so its retention rules are unknown",
                cure="Name the run: train ckpt prune RUN_DIRECTORY.",
            )
        entries = _list_usable(folder, run.run_id)
        saved = [entry.facts for entry in entries if entry.facts is not None]
        rules = _read_rules(run, entries)
        chosen = {item.path for item in in_folder}
        keep = {folder / name: why for name, why in rules.why_keep(saved).items()}
        removals = {folder / name: why for name, why in rules.why_remove(saved).items() if folder / name in chosen}
        yield Pruning(run, keep, removals)


def apply_pruning(pruning: Pruning, items: Sequence[Item]) -> tuple[list[Path], dict[Path, str]]:
    """Remove what the rules still remove once the run's lock is held. Returns the result of `remove`.

    Raises:
        RunDirectoryError: the run is training, and applies the rules itself.
    """
    with pruning.run.lock():
        # Applied again under the lock: the run may have saved or removed checkpoints since.
        items_of_run = [item for item in items if item.path in pruning.keep or item.path in pruning.remove]
        removed_now = {path: why for now in prunings(items_of_run) for path, why in now.remove.items()}
        still_removed = [item for item in items_of_run if item.path in pruning.remove and item.path in removed_now]
        return remove(still_removed, {path: f"train ckpt prune: {why}" for path, why in removed_now.items()})


def leftovers_in(runs: Sequence[RunDir]) -> dict[Path, str]:
    """The folders of runs that no save, removal or replay needs -> what each holds."""
    folders: dict[Path, str] = {}
    for run in runs:
        if run.searches_folder.is_dir():
            folders[run.searches_folder] = "what train bisect evaluated"
        if (storage := _storage_of(run)) is not None:
            leftovers = [storage.root / name for name in storage.leftovers()]
            folders |= dict.fromkeys(leftovers, "what a killed save or a failed removal left")
    return folders


def remove_leftovers(runs: Sequence[RunDir], folders: Collection[Path]) -> list[Path]:
    """Remove the folders that are still leftovers once the lock of their run is held. Returns those removed.

    Raises:
        RunDirectoryError: the run is training, or being replayed.
    """
    removed: list[Path] = []
    for run in runs if folders else ():
        with run.lock():
            # Only under the lock: an attempt that saves has such folders too.
            still_left = [folder for folder in leftovers_in([run]) if folder in folders]
            if (storage := _storage_of(run)) is not None:
                storage.sweep()
            for folder in still_left:
                if folder.parent == run.replayed_folder:
                    shutil.rmtree(folder)
            removed += [folder for folder in still_left if not folder.exists()]
    return removed


def _storage_of(run: RunDir) -> LocalStorage | None:
    """The storage of the checkpoints of a run, with its identity; None if they are in a store."""
    folder, run_id = run.stored_checkpoints(), run.known_id
    return None if is_url(folder) or run_id is None else LocalStorage(folder, run_id=run_id)


def steps_per_epoch(entries: Sequence[Entry]) -> int | None:
    """Steps of an epoch, computed from a checkpoint at the end of one; None without such a checkpoint."""
    for entry in entries:
        progress: Mapping[str, Any] = entry.manifest.progress if entry.manifest is not None else {}
        epoch, step = progress.get("epoch", 0), progress.get("step", 0)
        is_at_end = epoch and not progress.get("batch", 1)
        if is_at_end and (length := Fraction(step) / Fraction(epoch)).denominator == 1:
            return int(length)
    return None


def _list_usable(folder: Path, run_id: str) -> list[Entry]:
    """The run's valid checkpoints up to the one that a resume would load."""
    catalog = Catalog.of(folder)
    entries = catalog.valid(run_id)
    # From the newest: a run that resumes loads the first sound one, and counts its rules from there.
    while entries and (not entries[-1].resumable or not catalog.is_intact(entries[-1])):
        entries.pop()
    return entries


def _read_rules(run: RunDir, entries: Sequence[Entry]) -> RetentionRules:
    """The retention rules of a run's stored config.

    Raises:
        UserError: a rule needs the steps of an epoch, which neither the config nor a checkpoint shows.
    """
    config = from_yaml(run.config_file, trusted=True, missing_ok=True).config
    settings = config.checkpoint.overridden_by(config.callbacks.get(SAVER))
    epoch = config.loop.steps_per_epoch or steps_per_epoch(entries)

    def interval(key: str, duration: Any) -> Interval | None:
        """The interval of a setting, as `ToInterval` has it."""
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

    return RetentionRules.of(settings, interval)
