"""The replayed checkpoints of a run, and which checkpoints lie on its course.

An attempt that goes back to an earlier checkpoint computes later steps again: what earlier attempts saved there is off
the course of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_cli.checkpoint.catalog import Entry, catalog_of
from trainer_cli.errors import RunDirectoryError
from trainer_cli.runs.run_dir import RunDir

SEARCHES = "bisect"
"""The folder in `RUN/replayed` in which `train bisect` keeps what it evaluated."""


def replayed_entries(run: RunDir, attempts: Sequence[Mapping[str, Any]] | None = None) -> list[Entry]:
    """The valid checkpoints in a run's folder of replayed ones that lie on its course, by step.

    Args:
        attempts: those of the course; None: all of the run.
    """
    if not run.replayed_folder.is_dir():
        return []
    try:
        run_id = run.run_id
    except RunDirectoryError:
        return []
    catalog = catalog_of(run.replayed_folder)
    course = beginnings_of(run.attempts if attempts is None else attempts)
    entries = [entry for name in catalog.names() if (entry := catalog.entry(name)).valid and entry.is_replayed]
    of_run = [entry for entry in entries if entry.manifest is not None and entry.manifest.run_id == run_id]
    return sorted((entry for entry in of_run if is_on_course(entry, course)), key=lambda entry: entry.step)


def is_on_course(entry: Entry, beginnings: Sequence[tuple[int, int]]) -> bool:
    """Whether no later attempt has gone back to a step before this checkpoint.

    Args:
        beginnings: number and start step of each attempt.
    """
    number = 0 if entry.manifest is None else entry.manifest.attempt
    return not any(later > number and start_step < entry.step for later, start_step in beginnings)


def beginnings_of(attempts: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Number and start step of each attempt."""
    return [(int(attempt.get("attempt") or 0), int(attempt.get("start_step") or 0)) for attempt in attempts]
