"""Plan the replay of steps of a run: the checkpoint that it begins with, the config, and how long it takes.

    RUN@step437   on the disk, or replayed before: that checkpoint
                  else: the newest valid checkpoint before it, or the start of the run, and the steps up to it

Without `verify` only small files are read, and torch is not imported.
"""

from __future__ import annotations

import logging
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.catalog import Catalog, Entry
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.keys import WITHOUT_EFFECT
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.running import import_torch, showing_import
from trainer_cli.runs import Run, RunDir
from trainer_cli.selection import StoredCheckpoint
from trainer_cli.steps import RunStatus
from trainer_cli.strict_json import read_number
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.config import Change, Composed

log = logging.getLogger(__name__)


_MOST_RATES = 50
"""Pairs of records whose times are used to estimate the duration of a step."""


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
    """The run's checkpoints after the start up to the last step, by step, with which the replay is compared."""
    seconds: float | None
    """Estimate from the times of the run's records, without the start of the process; None if there are too few."""
    records: Sequence[Mapping[str, Any]] = field(default=(), repr=False, compare=False)
    """The lines of `metrics.jsonl`, with which the replay is compared."""
    doubts: Sequence[str] = ()
    """Why its steps may be others than those of the run, with what to do: each is shown where they are not equal."""
    went_back: bool = False
    """Whether the run may have gone back after these steps, and made them again with other data."""

    @property
    def began_with(self) -> str:
        """The name of the checkpoint that is loaded, in words."""
        return "the start of the run" if self.start is None else self.start.name

    def __str__(self) -> str:
        took = "" if self.seconds is None else f", about {max(1, round(self.seconds)):,} s"
        return f"replays {format_count(self.last - self.start_step, 'step')} from {self.began_with}{took}"


def find_step(run: Path, step: int) -> Path | None:
    """The valid checkpoint of a step of a run: one that was kept, else one that was replayed; None without any."""
    history = Run(run)
    for entry, path in [*history.kept, *history.replayed]:
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
        CheckpointError: no valid checkpoint is early enough, and the run did not begin at step 0; or steps of attempts
            with several configs are between it and the last step.
    """
    history = Run.open(run)
    _check_step(history, last)
    latest_start = last if first is None else first - 1
    if verify:
        # Before a format imports torch without what this sets.
        with showing_import():
            import_torch()
    candidates = [*history.entries, *history.replayed]
    # A kept one before a replayed one of the same step; the sort is stable.
    candidates.sort(key=lambda candidate: candidate[0].step, reverse=True)
    start, path = next(_usable(candidates, latest_start, verify=verify), (None, None))
    if start is None and history.first_step != 0:
        raise CheckpointError(
            f"{run} has no valid checkpoint at or before step {latest_start}, and was not begun at step 0 there",
            cure=f"The earliest valid one is step {history.entries[0][0].step}." if history.entries else None,
        )
    start_step, attempt = 0 if start is None else start.step, history.attempt_of(last)
    if (boundary := find_boundary(history, start_step, last)) is not None:
        step, reason = boundary
        is_kept = any(entry.step == step for entry, _ in candidates)
        raise CheckpointError(
            f"steps {start_step + 1} to {last} of {run} cannot be made in one replay: {reason}",
            cure=f"Make steps {start_step + 1} to {step}, and {step + 1} to {last}."
            if is_kept
            else f"The checkpoint of step {step} is gone: only steps up to it, or after the next one, can be made.",
        )
    doubts = []
    if (several := find_boundary(history, start_step, last, strict=True)) is not None:
        doubts.append(f"{several[1]}: first make {history.directory.path}@step{several[0]}")
    returns = [(begin, end) for begin, end in find_returns(history) if begin < last < end]
    doubts += [
        f"the run passed over data between steps {begin} and {end}, as after a rollback: replay up to step {end}"
        for begin, end in returns
    ]
    return ReplayPlan(
        run=history.directory.path,
        run_id=history.directory.run_id,
        start=path,
        start_step=start_step,
        last=last,
        attempt=attempt,
        config=config_of(history, attempt),
        reference=_reference_of(history, attempt, start_step),
        kept={entry.step: kept for entry, kept in history.entries if start_step < entry.step <= last},
        seconds=_estimate_s(history.records, start_step, last),
        records=history.records,
        doubts=doubts,
        went_back=bool(returns),
    )


def find_boundary(history: Run, start_step: int, last: int, *, strict: bool = False) -> tuple[int, str] | None:
    """The last step between two that no replay can pass, because the attempts had several configs, and why.

    Args:
        strict: also one at which another source began and whose checkpoint is gone. A replay passes it with the source
            of the last step, and its numbers are those of the run if the edit changed none.
    """
    attempts = {attempt.get("attempt"): attempt for attempt in history.attempts}
    later = history.attempt_of(last)
    while start_step < (began := int(attempts.get(later, {}).get("start_step") or 0)):
        earlier = history.attempt_of(began)
        if earlier == later:
            # A summary that was lost knows no attempt before it.
            return None
        # At its end a run logs and evaluates what it otherwise would later.
        is_finished = attempts.get(earlier, {}).get("status") == RunStatus.finished
        is_kept = any(entry.step == began for entry, _ in [*history.entries, *history.replayed])
        sources = [attempts.get(number, {}).get("source") for number in (earlier, later)]
        has_other_source = (is_kept or strict) and None not in sources and sources[0] != sources[1]
        if is_finished or has_other_source or _trains_otherwise(history, earlier, later):
            other = "source" if has_other_source else "config"
            why = "continued the finished run" if is_finished else f"has another {other} than the one before"
            return began, f"attempt {later}, which {why}, began at step {began}"
        later = earlier
    return None


def find_returns(history: Run) -> list[tuple[int, int]]:
    """Steps of neighbouring checkpoints between which the run passed over data, as a rollback does."""
    manifests = [entry.manifest for entry, _ in history.entries if entry.manifest is not None]
    passed = [(manifest.step, manifest.progress.get("passed_over", 0)) for manifest in manifests]
    if history.first_step == 0:
        passed.insert(0, (0, 0))
    return [(begin, end) for (begin, before), (end, after) in pairwise(passed) if after > before]


def split_steps(history: Run, first: int, last: int) -> list[tuple[int, int]]:
    """Divide steps into those that one replay each can make."""
    boundary = find_boundary(history, first - 1, last)
    if boundary is None:
        return [(first, last)]
    return [*split_steps(history, first, boundary[0]), (boundary[0] + 1, last)]


def config_of(history: Run, attempt: int) -> Path | str:
    """The config of an attempt: the run's file if it is the last, else that of a checkpoint of it.

    It is the file, or the text itself for a checkpoint in an object store.

    Raises:
        CheckpointError: no checkpoint of the attempt is left, and it is the one that the history was asked for.
    """
    run = history.directory
    numbers = [entry.get("attempt") for entry in run.attempts]
    if numbers and attempt != numbers[-1]:
        for entry, path in history.entries:
            manifest = entry.manifest
            if manifest is not None and manifest.attempt == attempt and CONFIG_FILE in manifest.files:
                return StoredCheckpoint(path).read_config()[0]
        if not history.is_whole and attempt == history.attempts[-1].get("attempt"):
            raise CheckpointError(f"{history.path}: no checkpoint of that attempt is left, so its config is unknown")
    return run.config_file


def bytes_of_config(source: Path | str) -> bytes:
    """The content of a config: of its file, or of the text itself."""
    return source.encode() if isinstance(source, str) else source.read_bytes()


def _reference_of(history: Run, attempt: int, start_step: int) -> Path | None:
    """A kept checkpoint of the attempt; else the newest one before the replay, or the first.

    None that was replayed: its source is that of the process which replayed it.
    """
    of_attempt = [
        (entry, path)
        for entry, path in history.entries
        if entry.manifest is not None and entry.manifest.attempt == attempt
    ]
    candidates = of_attempt or history.entries
    earlier = [path for entry, path in candidates if entry.step <= start_step]
    return earlier[-1] if earlier else next((path for _, path in candidates), None)


def _trains_otherwise(history: Run, earlier: int, later: int) -> bool:
    """Whether two attempts had different configs, beside what no number depends on."""
    first, second = config_of(history, earlier), config_of(history, later)
    # Most runs have one config, and OmegaConf takes 0.1 s to import.
    return bytes_of_config(first) != bytes_of_config(second) and bool(find_changes(first, read_config(second)))


def read_config(source: Path | str) -> Composed:
    """A stored config, whose classes are not imported."""
    from trainer_cli.config import from_yaml

    return from_yaml(source, trusted=True, missing_ok=True)


def find_changes(source: Path | str, other: Composed) -> list[Change]:
    """What another config has changed since a stored one, and may change numbers."""
    from trainer_cli.config import diff

    return [change for change in diff(read_config(source).raw, other.raw) if change.path[0] not in WITHOUT_EFFECT]


def earliest_start(run: RunDir) -> int | None:
    """The earliest step whose state a replay can begin with: 0, or that of a checkpoint; None without any."""
    # Before its checkpoints are listed, which takes time and needs the id of the run.
    history = Run(run.path)
    if history.first_step == 0:
        return 0
    manifests = (entry.manifest for entry, _ in history.entries)
    return next((manifest.step for manifest in manifests if manifest is not None and not manifest.left_out), None)


def _usable(candidates: Sequence[tuple[Entry, Path]], latest: int, *, verify: bool) -> Iterator[tuple[Entry, Path]]:
    """Those that a replay can begin with, the newest first."""
    for entry, path in candidates:
        if entry.step > latest or entry.manifest is None:
            continue
        if entry.manifest.left_out:
            log.warning("%s is skipped: it was saved without %s", path, ", ".join(entry.manifest.left_out))
            continue
        try:
            problem = Catalog.of(path.parent).why_damaged(entry) if verify else None
        except OSError as error:
            problem = f"it cannot be read: {error}"
        if problem is None:
            yield entry, path
        else:
            log.warning("%s is skipped: %s", path, problem)


def _check_step(history: Run, step: int) -> None:
    """Refuse a step that the run has not made."""
    path, reached = history.path, history.reached
    if history.is_whole and history.directory.is_locked():
        # It may log records while it is replayed, and its next checkpoint may not come.
        if step > reached:
            raise UserError(
                f"{path} is being trained, and its newest checkpoint is of step {reached}: step {step} cannot be "
                "replayed yet"
            )
        return
    # The step that raised an error was begun too, and it is the one to look at.
    begun = reached + (not history.is_finished)
    if not 0 <= step <= begun:
        raise UserError(f"{path} has made {format_count(reached, 'step')}, so there is no step {step}")


def _estimate_s(records: Sequence[Mapping[str, Any]], start: int, last: int) -> float | None:
    """Seconds that the steps after `start` up to `last` took, by the times of the records nearest to `last`."""
    points = sorted(
        (int(record["step"]), at)
        for record in records
        if isinstance(record.get("step"), int) and (at := read_number(record.get("time"))) is not None
    )
    nearest = sorted(pairwise(points), key=lambda pair: abs(pair[1][0] - last))[:_MOST_RATES]
    # The median, because evaluations, saves and pauses between two attempts lie between some of them.
    rates = [
        (at - before_at) / (step - before)
        for (before, before_at), (step, at) in nearest
        if step > before and at > before_at
    ]
    return statistics.median(rates) * (last - start) if rates else None


def describe_commands(run: Path, first: int, last: int, *, loads: bool = True) -> str | None:
    """A sentence with the commands that look at steps of a run; None if they cannot be replayed.

    Several steps are those in which the loss began not to be finite.

    Args:
        loads: whether the samples can be loaded.
    """
    start = earliest_start(RunDir(run))
    if start is None or start >= last:
        return None
    first = max(first, start + 1)
    name = shlex.quote(str(run))
    if first < last:
        # No --show: of many steps it would load and draw each sample.
        search = f"`train bisect {name} '{TRAIN_PREFIX}loss is not finite'` finds the step and its samples"
        return f"{search}, and `train replay {name} {first}..{last}` computes these steps again."
    words = f"{name} {first}"
    shows = " --show` shows" if loads else "` lists"
    return f"`train replay {words}` computes the step again, and `train data {words}{shows} the samples."


def describe_evaluation(run: Path, step: int) -> str | None:
    """A sentence with the command that looks at the evaluation after a step; None if it cannot be replayed."""
    start = earliest_start(RunDir(run))
    if start is None or start >= step:
        return None
    return f"`train replay {shlex.quote(str(run))} {step}` evaluates again, and names the sample."
