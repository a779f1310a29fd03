"""Plan the replay of steps of a run: the checkpoint that it begins with, the config, and how long it takes.

    RUN@step437   on the disk, or replayed before: that checkpoint
                  else: the newest valid checkpoint before it, or the start of the run, and the steps up to it

Without `verify` only small files are read, and torch is not imported.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.catalog import Entry, catalog_of, why_damaged
from trainer_cli.core.run_status import RunStatus
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.loggers.text_files import read_number
from trainer_cli.runs.attempts import (
    RunHistory,
    attempt_number,
    bytes_of_config,
    first_step,
    kept_entries,
    read_history,
)
from trainer_cli.runs.import_torch import import_torch, showing_import
from trainer_cli.runs.replayed import beginnings_of, is_on_course, replayed_entries
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)

WITHOUT_EFFECT = ("name", "run_dir", "resume", "resume_allow", "trust", "checkpoint", "loggers", "logging", "restarts")
"""Sections of a config on which no number of a training depends."""
_MOST_RATES = 50
"""Records whose times are used to estimate the duration of a step."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Which steps are computed again, and from which state."""

    run: Path
    run_id: str
    start: Path | None
    """The checkpoint that is loaded; None: the start of the run."""
    start_step: int
    last: int
    """The last step that is made."""
    attempt: int
    """The attempt that made it, whose config is used."""
    config: Path | str
    """That config: the file, or the text itself for one in an object store."""
    reference: Path | None
    """A checkpoint of the run whose samples and source are compared with those here; None without any."""
    kept: Mapping[int, Path]
    """The run's checkpoints after the start up to `end`, by step: the replay is compared with those that it passes."""
    end: int
    """The last step that the run has recorded or saved before another config trained it, at least `last`."""
    seconds: float | None
    """Estimate from the times of the run's records, without the start of the process; None if there are too few."""
    before: ReplayPlan | None = None
    """What writes the checkpoint to begin with: the end of an earlier attempt, which had another config or had finished
    the run."""
    records: Sequence[Mapping[str, Any]] = field(default=(), repr=False, compare=False)
    """The lines of `metrics.jsonl`, with which the replay is compared."""

    @property
    def origin(self) -> ReplayPlan:
        """The plan that begins with what is on the disk."""
        return self if self.before is None else self.before.origin

    @property
    def steps(self) -> int:
        """Number of steps to make."""
        return self.last - self.origin.start_step

    def without_records(self) -> ReplayPlan:
        """The plan for a rank that compares nothing."""
        return replace(self, records=(), before=None if self.before is None else self.before.without_records())

    def __str__(self) -> str:
        path = self.origin.start
        start = "the start of the run" if path is None else path.name
        took = "" if self.seconds is None else f", about {max(1, round(self.seconds)):,} s"
        return f"replays {format_count(self.steps, 'step')} from {start}{took}"


def find_step(run: Path, step: int) -> Path | None:
    """The valid checkpoint of a step of a run: one that was kept, else one that was replayed; None without any."""
    directory = RunDir(run)
    for entry, path in [*kept_entries(directory), *_replayed_in(directory, directory.attempts)]:
        if entry.step == step:
            return path
    return None


def plan_replay(run: Path, last: int, *, first: int | None = None, verify: bool = True) -> ReplayPlan:
    """Plan how to reach a step of a run.

    Args:
        run: the directory of a run, or `RUN@attempt2`: the run as that attempt left it.
        last: the last step to make.
        first: the first step of which more than the resulting state is wanted, so that it is computed again even if its
            checkpoint was kept; by default none is.
        verify: whether every byte of the checkpoint to begin with is read; else its sizes alone are checked.

    Raises:
        UserError: there is no such run, or it has not made that step.
        CheckpointError: no valid checkpoint is early enough, and the run did not begin at step 0.
    """
    history = read_history(run)
    end = _check_step(history, last)
    latest_start = last if first is None else first - 1
    if verify:
        # Before a format imports torch without what this sets.
        with showing_import():
            import_torch()
    replayed = _replayed_in(history.run, history.attempts) if history.is_whole else []
    candidates = [*history.entries, *replayed]
    # A kept one before a replayed one of the same step; the sort is stable.
    candidates.sort(key=lambda candidate: candidate[0].step, reverse=True)
    start = next(_usable(candidates, latest_start, verify=verify), None)
    if start is None and first_step(history.attempts) != 0:
        raise CheckpointError(
            f"{run} has no valid checkpoint at or before step {latest_start}, and was not begun at step 0 there",
            cure=f"The earliest valid one is step {history.entries[0][0].step}." if history.entries else None,
        )
    return _Planner(history, end).plan(start, last)


@dataclass(frozen=True, slots=True)
class _Planner:
    """Divides the way to a step where a later attempt changed what trains."""

    history: RunHistory
    end: int
    """The last step that the run has recorded or saved."""

    def plan(self, start: tuple[Entry, Path] | None, last: int) -> ReplayPlan:
        """The plan from a checkpoint, or from the start of the run, to a step."""
        start_step = 0 if start is None else start[0].step
        path = None if start is None else start[1]
        before = None
        if (boundary := self._boundary(start_step, last)) is not None:
            before = self.plan(start, boundary)
            start_step, path = boundary, self.history.run.replayed_folder / f"step{boundary}"
        attempt, end = attempt_number(self.history.attempts, last), self._end_after(last)
        return ReplayPlan(
            run=self.history.run.path,
            run_id=self.history.run.run_id,
            start=path,
            start_step=start_step,
            last=last,
            attempt=attempt,
            config=self.history.config_of(attempt),
            reference=self._reference_of(attempt, start_step),
            kept={entry.step: path for entry, path in self.history.entries if start_step < entry.step <= end},
            end=end,
            seconds=_estimate_s(self.history.records, 0 if start is None else start[0].step, last),
            before=before,
            records=self.history.records,
        )

    def _reference_of(self, attempt: int, start_step: int) -> Path | None:
        """A kept checkpoint of the attempt; else the newest one before the replay, or the first.

        None that was replayed: its source is that of the process which replayed it.
        """
        of_attempt = [
            (entry, path)
            for entry, path in self.history.entries
            if entry.manifest is not None and entry.manifest.attempt == attempt
        ]
        earlier = [path for entry, path in of_attempt or self.history.entries if entry.step <= start_step]
        return earlier[-1] if earlier else next((path for _, path in of_attempt or self.history.entries), None)

    def _boundary(self, start_step: int, last: int) -> int | None:
        """The last step between these two at which an attempt began with another config, or after the run's end."""
        number = attempt_number(self.history.attempts, last)
        began = int(self._attempt(number).get("start_step") or 0)
        if began <= start_step or began >= last:
            return None
        if self._is_boundary(attempt_number(self.history.attempts, began), number):
            return began
        return self._boundary(start_step, began)

    def _end_after(self, last: int) -> int:
        """The last recorded step that is reached from `last` without a boundary."""
        number = attempt_number(self.history.attempts, last)
        for beginning in self.history.attempts:
            later, began = int(beginning.get("attempt") or 0), int(beginning.get("start_step") or 0)
            # One that a later attempt has replaced from before its first step has left nothing.
            if later <= number or began < last or attempt_number(self.history.attempts, began + 1) != later:
                continue
            if began >= self.end or self._is_boundary(number, later):
                return max(last, min(began, self.end))
            number = later
        return max(last, self.end)

    def _is_boundary(self, earlier: int, later: int) -> bool:
        """Whether the steps of two consecutive attempts cannot be made in one replay."""
        # At its end a run logs and evaluates what it otherwise would later.
        is_finished = self._attempt(earlier).get("status") == RunStatus.finished
        return is_finished or self._trains_otherwise(earlier, later)

    def _attempt(self, number: int) -> Mapping[str, Any]:
        return next((attempt for attempt in self.history.attempts if attempt.get("attempt") == number), {})

    def _trains_otherwise(self, earlier: int, later: int) -> bool:
        """Whether two attempts had different configs, beside what no number depends on."""
        sources = [self.history.config_of(number) for number in (earlier, later)]
        if sources[0] == sources[1] or bytes_of_config(sources[0]) == bytes_of_config(sources[1]):
            return False
        # Imported here: most runs have one config, and OmegaConf takes 0.1 s to import.
        from trainer_cli.config.compose import diff, from_yaml

        configs = [from_yaml(source, trusted=True, missing_ok=True).raw for source in sources]
        return any(change.path[0] not in WITHOUT_EFFECT for change in diff(*configs))


def earliest_start(run: RunDir) -> int | None:
    """The earliest step whose state a replay can begin with: 0, or that of a checkpoint; None without any."""
    attempts = run.attempts
    if first_step(attempts) == 0:
        return 0
    beginnings = beginnings_of(attempts)
    entries = (entry for entry, _ in kept_entries(run) if is_on_course(entry, beginnings))
    return next((entry.step for entry in entries if entry.manifest is not None and not entry.manifest.left_out), None)


def _replayed_in(run: RunDir, attempts: Sequence[Mapping[str, Any]]) -> list[tuple[Entry, Path]]:
    return [(entry, run.replayed_folder / entry.name) for entry in replayed_entries(run, attempts)]


def _usable(candidates: Sequence[tuple[Entry, Path]], latest: int, *, verify: bool) -> Iterator[tuple[Entry, Path]]:
    """Those that a replay can begin with, the newest first."""
    for entry, path in candidates:
        if entry.step > latest or entry.manifest is None:
            continue
        if entry.manifest.left_out:
            log.warning("%s is skipped: it was saved without %s", path, ", ".join(entry.manifest.left_out))
            continue
        try:
            problem = why_damaged(catalog_of(path.parent).storage, entry) if verify else None
        except OSError as error:
            problem = f"it cannot be read: {error}"
        if problem is None:
            yield entry, path
        else:
            log.warning("%s is skipped: %s", path, problem)


def _check_step(history: RunHistory, step: int) -> int:
    """Refuse a step that the run has not made; the last step that it has recorded or saved."""
    path, reached = history.path, history.reached
    if history.is_whole and history.run.is_locked():
        # It may log records while it is replayed, and its next checkpoint may not come.
        if step > reached:
            raise UserError(
                f"{path} is being trained, and its newest checkpoint is of step {reached}: step {step} cannot be "
                "replayed yet"
            )
        return reached
    # The step that raised an error was begun too, and it is the one to look at.
    begun = reached + (not history.is_finished)
    if not 0 <= step <= begun:
        raise UserError(f"{path} has made {format_count(reached, 'step')}, so there is no step {step}")
    return max(history.entries[-1][0].step if history.entries else 0, history.recorded)


def _estimate_s(records: Sequence[Mapping[str, Any]], start: int, last: int) -> float | None:
    """Seconds that the steps after `start` up to `last` took, by the times of the records around them."""
    points = [
        (int(record["step"]), at)
        for record in records
        if isinstance(record.get("step"), int) and (at := read_number(record.get("time"))) is not None
    ]
    points.sort(key=lambda point: abs(point[0] - (start + last) / 2))
    points = sorted(points[:_MOST_RATES])
    # The median, because evaluations, saves and pauses between two attempts lie between some of them.
    rates = [
        (at - before_at) / (step - before)
        for (before, before_at), (step, at) in pairwise(points)
        if step > before and at > before_at
    ]
    return statistics.median(rates) * (last - start) if rates else None
