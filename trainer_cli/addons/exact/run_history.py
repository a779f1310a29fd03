"""What a run has done up to the end of an attempt: its attempts, checkpoints and records.

RUN               the whole run
RUN@attempt2      the run as it was when attempt 2 ended; later attempts may have gone back, and made steps again
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer_cli.catalog import Catalog, Entry
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.files import as_path, read_rows
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.runs import RunDir, is_on_course, replayed_entries
from trainer_cli.selection import StoredCheckpoint
from trainer_cli.steps import RunStatus

log = logging.getLogger(__name__)

_AT_ATTEMPT = re.compile(r"(?P<run>.+)@attempt(?P<number>\d+)")


@dataclass(frozen=True)
class RunHistory:
    """What a run has done up to the end of an attempt."""

    run: RunDir
    attempts: Sequence[Mapping[str, Any]]
    """Those up to the last one that counts."""
    kept: Sequence[tuple[Entry, Path]]
    """The valid checkpoints of these attempts, by step."""
    replaced_after: int | None = None
    """The step at which the earliest later attempt began; None if there is no later one."""

    @classmethod
    def of(cls, run: RunDir) -> RunHistory:
        """The history of a whole run."""
        return cls(run, run.attempts, kept_entries(run))

    def until(self, number: int) -> RunHistory:
        """The run as it was when an attempt ended: without later attempts, and what they saved and recorded."""
        later = [attempt for attempt in self.attempts if (attempt.get("attempt") or 0) > number]
        if not later:
            return self
        return replace(
            self,
            attempts=[attempt for attempt in self.attempts if attempt not in later],
            kept=[pair for pair in self.kept if pair[0].manifest is not None and pair[0].manifest.attempt <= number],
            replaced_after=min(int(attempt.get("start_step") or 0) for attempt in later),
        )

    @property
    def is_whole(self) -> bool:
        """Whether the last attempt is that of the run."""
        return self.replaced_after is None

    # Read only where it is asked for: a long run has many.
    @cached_property
    def records(self) -> Sequence[Mapping[str, Any]]:
        """The lines of `metrics.jsonl` that no later attempt has replaced."""
        end, rows = self.replaced_after, read_rows(self.run.metrics_file)
        return rows if end is None else [row for row in rows if int(row.get("step") or 0) <= end]

    @property
    def entries(self) -> list[tuple[Entry, Path]]:
        """The checkpoints on its course, by step."""
        return [(entry, path) for entry, path in self.kept if is_on_course(entry, self.attempts)]

    @property
    def replayed(self) -> list[tuple[Entry, Path]]:
        """The checkpoints of steps that were computed again, by step; none of an earlier attempt."""
        folder = self.run.replayed_folder
        return [(entry, folder / entry.name) for entry in replayed_entries(self.run)] if self.is_whole else []

    @property
    def path(self) -> Path:
        """How a command names it."""
        return self.run.path if self.is_whole else Path(f"{self.run.path}@attempt{self.attempts[-1]['attempt']}")

    @property
    def reached(self) -> int:
        """The last step that was made, as far as it is known; of a run in training that of its newest checkpoint."""
        saved = max((entry.step for entry, _ in self.entries), default=0)
        if self.is_whole and self.run.is_locked():
            return saved
        return max(saved, self.recorded, int(self.end.get("step") or 0))

    @property
    def recorded(self) -> int:
        """The last step with a record."""
        return max((int(record.get("step") or 0) for record in self.records), default=0)

    @property
    def end(self) -> Mapping[str, Any]:
        """How it ended: the summary of the run, or the entry of the last attempt."""
        return self.run.read_summary() if self.is_whole else self.attempts[-1]

    @property
    def is_finished(self) -> bool:
        """Whether it reached the end that its config gave."""
        return self.end.get("status") == RunStatus.finished

    @property
    def first_step(self) -> int:
        """The step at which the first attempt began; 0 if none is recorded."""
        return int(self.attempts[0].get("start_step") or 0) if self.attempts else 0

    def attempt_of(self, step: int) -> int:
        """The number of the attempt that made a step: the last one that began before it."""
        earlier = [attempt for attempt in self.attempts if int(attempt.get("start_step") or 0) < max(step, 1)]
        return int((earlier or self.attempts or [{}])[-1].get("attempt") or 1)

    def config_of(self, attempt: int) -> Path | str:
        """The config of an attempt: the run's file if it is the last, else that of a checkpoint of it.

        It is the file, or the text itself for a checkpoint in an object store.

        Raises:
            CheckpointError: no checkpoint of the attempt is left, and it is the one that the history was asked for.
        """
        numbers = [entry.get("attempt") for entry in self.run.attempts]
        if numbers and attempt != numbers[-1]:
            for entry, path in self.entries:
                manifest = entry.manifest
                if manifest is not None and manifest.attempt == attempt and CONFIG_FILE in manifest.files:
                    return StoredCheckpoint(path).read_config()[0]
            if not self.is_whole and attempt == self.attempts[-1].get("attempt"):
                raise CheckpointError(f"{self.path}: no checkpoint of that attempt is left, so its config is unknown")
        return self.run.config_file


def bytes_of_config(source: Path | str) -> bytes:
    """The content of a config: of its file, or of the text itself."""
    return source.encode() if isinstance(source, str) else source.read_bytes()


def split_attempt(path: Path) -> tuple[Path, int | None]:
    """The run and the number of the attempt that `RUN@attempt2` names; None for the newest, and for any other path.

    Raises:
        UserError: the run has no such attempt.
    """
    match = None if path.exists() else _AT_ATTEMPT.fullmatch(str(path))
    if match is None:
        return path, None
    run, number = RunDir(match["run"]), int(match["number"])
    numbers = [attempt.get("attempt") for attempt in run.attempts]
    if run.exists_as_run() and number not in numbers:
        cure = f"Its attempts are {', '.join(map(str, numbers))}." if numbers else None
        raise UserError(f"{run.path} has no attempt {number}", cure=cure)
    return run.path, number if numbers and number != numbers[-1] else None


def read_history(path: Path) -> RunHistory:
    """The history of a run, or of `RUN@attempt2`.

    Raises:
        UserError: there is no such run, or no such attempt.
    """
    path, number = split_attempt(path)
    history = RunHistory.of(RunDir.open(path))
    return history if number is None else history.until(number)


def kept_entries(run: RunDir) -> list[tuple[Entry, Path]]:
    """The run's valid checkpoints by step, with those of its copies whose originals were removed."""
    folder, run_id = run.stored_checkpoints(), run.run_id
    entries = {entry.step: (entry, folder / entry.name) for entry in run.catalog(folder).valid(run_id)}
    config = run.values
    section = config.get("checkpoint")
    copy_to = section.get("copy_to") if isinstance(section, dict) else None
    copies = copy_to.get("folder") if isinstance(copy_to, dict) else None
    if isinstance(copies, str) and "${" not in copies:
        catalog = Catalog.of(
            as_path(copies.replace("{run_name}", str(config.get("name") or "default"))), run.copies_cache
        )
        try:
            for entry in catalog.valid(run_id):
                entries.setdefault(entry.step, (entry, catalog.folder / entry.name))
        except OSError as error:
            log.warning("the copies in %s cannot be listed, so none is used: %s", catalog.folder, error)
    return [entries[step] for step in sorted(entries)]
