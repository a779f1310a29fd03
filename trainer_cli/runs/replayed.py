"""Which checkpoints lie on the course of a run, and those in its folder of replayed ones.

An attempt that goes back to an earlier checkpoint computes later steps again: what earlier attempts saved there is off
the course of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_cli.catalog import Catalog, Entry
from trainer_cli.errors import RunDirectoryError
from trainer_cli.runs.run_dir import RunDir


def replayed_entries(run: RunDir) -> list[Entry]:
    """The valid checkpoints in a run's folder of replayed ones that lie on its course, by step."""
    if not run.replayed_folder.is_dir():
        return []
    try:
        run_id = run.run_id
    except RunDirectoryError:
        return []
    catalog, attempts = Catalog.of(run.replayed_folder), run.attempts
    entries = [entry for name in catalog.names() if (entry := catalog.entry(name)).valid and entry.is_replayed]
    of_run = [entry for entry in entries if entry.manifest is not None and entry.manifest.run_id == run_id]
    return sorted((entry for entry in of_run if is_on_course(entry, attempts)), key=lambda entry: entry.step)


def is_on_course(entry: Entry, attempts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no later attempt has gone back to a step before this checkpoint."""
    number = 0 if entry.manifest is None else entry.manifest.attempt
    return not any(
        int(attempt.get("attempt") or 0) > number and int(attempt.get("start_step") or 0) < entry.step
        for attempt in attempts
    )
