"""Replayed checkpoints of a run, and which of its checkpoints later attempts have continued from.

An attempt that returns to an earlier checkpoint computes later steps again. What earlier attempts saved of these steps
is abandoned: the state of the run has not come from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_cli.catalog import Catalog, Entry
from trainer_cli.errors import RunDirectoryError
from trainer_cli.runs.run_dir import RunDir


def replayed_entries(run: RunDir) -> list[Entry]:
    """The valid checkpoints in a run's folder of replayed ones that are not abandoned, by step."""
    if not run.replayed_folder.is_dir():
        return []
    try:
        run_id = run.run_id
    except RunDirectoryError:
        return []
    catalog, attempts = Catalog.of(run.replayed_folder), run.attempts
    entries = [entry for entry in map(catalog.entry, catalog.names()) if entry.valid and entry.is_replayed]
    of_run = [entry for entry in entries if entry.may_be_of(run_id)]
    return sorted((entry for entry in of_run if not is_abandoned(entry, attempts)), key=lambda entry: entry.step)


def is_abandoned(entry: Entry, attempts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an attempt after the one that saved this checkpoint began at an earlier step."""
    saved_by = 0 if entry.manifest is None else entry.manifest.attempt
    later = [attempt for attempt in attempts if int(attempt.get("attempt") or 0) > saved_by]
    return any(int(attempt.get("start_step") or 0) < entry.step for attempt in later)
