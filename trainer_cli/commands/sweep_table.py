"""The status of a sweep's jobs, read from their run directories, as a table and as sweep.csv.

Plan a sweep: compose and check the config of every job before anything is written.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.catalog import catalog_of
from trainer_cli.config import search_path
from trainer_cli.config.compose import Composed, compose, freeze, from_yaml
from trainer_cli.config.overrides import COMMAND_LINE
from trainer_cli.config.sweep import Job, jobs
from trainer_cli.core.checkpoint_config import CheckpointConfig
from trainer_cli.core.files import replace
from trainer_cli.core.schema import ParallelConfig
from trainer_cli.core.stopping import reopens
from trainer_cli.errors import ConfigError, TrainError, UserError, raise_all
from trainer_cli.runs.compose_fit import refuse_shipped_default
from trainer_cli.runs.find_runs import refuse_nested
from trainer_cli.runs.metrics import best_rule, keep_best_of, shared_keep_best
from trainer_cli.runs.resume import changes_since, folder_of_checkpoints, holds_training, refuse_changes
from trainer_cli.runs.run_dir import RunDir, RunStatus, write_json
from trainer_cli.runs.select import run_config
from trainer_cli.runs.start import refuse_no_optimizer
from trainer_cli.terminal import table


@dataclass(frozen=True, slots=True)
class Planned:
    """A job whose config has been checked, before anything of it is written."""

    job: Job
    run: RunDir
    base: Path
    """The directory that the run would have outside the sweep."""
    frozen: str
    reopened: bool
    """Whether a finished run trains further under a longer config."""
    level: str
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    folders: Mapping[str, str] = field(default_factory=dict)
    """Key -> folder in which it saves or copies checkpoints outside of its directory."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, by what the run's directory says."""
        return not self.reopened and self.run.read_summary().get("status") == RunStatus.finished


def plan(
    arguments: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config", cwd: Path | None = None
) -> list[Planned]:
    """All jobs in order, each composed and checked; nothing is written.

    Raises:
        ConfigError: every mistake of every job, with the values that it is about; or jobs that do not differ.
    """
    search = search_path.SearchPath.of(config_dir, config_name, cwd)

    def options(group: str) -> list[str] | None:
        return list(search_path.options(search.dirs, group)) if search_path.is_group(search.dirs, group) else None

    planned: list[Planned] = []
    mistakes: dict[str, list[tuple[Job, TrainError]]] = {}
    found = jobs(arguments, options)
    for job in found:
        try:
            composed = compose(job.overrides, config_dir=config_dir, config_name=config_name, cwd=cwd)
            planned.append(_planned(job, composed))
        except TrainError as error:
            mistakes.setdefault(str(error), []).append((job, error))
    for same in mistakes.values():
        if len(same) == len(found):
            raise same[0][1]
    raise_all([_of_jobs(same) for same in mistakes.values()])
    _refuse_equal(planned)
    _refuse_one_folder(planned)
    return planned


def folder_of(bases: Sequence[Path]) -> Path:
    """`BASE/sweep`; where the jobs have several bases, `COMMON/A,B/sweep`, from what differs between them."""
    different = sorted(set(bases))
    if len(different) == 1:
        return different[0] / "sweep"
    common = Path(os.path.commonpath(different))
    ends = [re.sub(r"[^A-Za-z0-9_.-]", "-", str(base.relative_to(common))) for base in different]
    name = ",".join(ends)
    if len(name) > 100:
        digest = hashlib.sha256("\n".join(map(str, different)).encode()).hexdigest()[:12]
        name = f"{name[:87]}-{digest}"
    return common / name / "sweep"


def _planned(job: Job, composed: Composed) -> Planned:
    refuse_shipped_default(composed)
    refuse_no_optimizer(composed)
    config = composed.config
    if config.resume not in ("auto", "must", "never"):
        raise UserError(
            f"resume={config.resume} is one run, and a sweep is many",
            where="resume",
            cure="Leave resume= out: the same command again resumes.",
        )
    for key in composed.of_the_moment:
        raise ConfigError(
            f"{key} holds ${{now:…}}, different at each start, so a sweep could not be resumed",
            source=composed.where(key),
            hint="Leave the time out: each job has a directory of its own.",
        )
    end = f"sweep/{job.key}"
    run = RunDir(Path(config.run_dir) / end)
    reopened = False
    if run.exists_as_run():
        stored = from_yaml(run.config_file, trusted=True, missing_ok=True)
        folder = folder_of_checkpoints(run, config.checkpoint, stored.config.checkpoint)
        if holds_training(run, folder, config.checkpoint):
            refuse_changes(changes_since(run, stored, composed), composed, run.path)
        reopened = reopens(stored.config.loop, config.loop)
    else:
        refuse_nested(run.path)
        composed.check_targets()
    frozen = freeze(composed, end)
    return Planned(
        job,
        run,
        Path(config.run_dir),
        frozen,
        reopened,
        config.logging.level,
        config.parallel,
        _folders(config.checkpoint),
    )


def _folders(checkpoint: CheckpointConfig) -> dict[str, str]:
    folders = {"checkpoint.folder": checkpoint.folder, "checkpoint.copy_to.folder": checkpoint.copy_to.folder}
    return {key: folder for key, folder in folders.items() if folder is not None and checkpoint.enabled}


def _of_jobs(same: Sequence[tuple[Job, TrainError]]) -> ConfigError:
    """One mistake, with the swept values of the first job that has it."""
    job, error = same[0]
    more = f" and {len(same) - 1} more" if len(same) > 1 else ""
    return ConfigError(f"{_reported(job)}{more}: {error}")


def _reported(job: Job) -> str:
    return " ".join(f"{key}={text}" for key, text in job.swept.items())


def _refuse_one_folder(planned: Sequence[Planned]) -> None:
    """Refuse jobs that save their checkpoints in one folder."""
    seen: dict[str, Job] = {}
    for one in planned:
        for key, folder in one.folders.items():
            other = seen.setdefault(folder, one.job)
            if other is not one.job:
                raise ConfigError(
                    f"{_reported(other)} and {_reported(one.job)} both save in {folder}",
                    location=key,
                    hint="Leave it out: each job of a sweep has a directory of its own; or put the swept key into it.",
                )


def _refuse_equal(planned: Sequence[Planned]) -> None:
    """Refuse jobs whose configs do not differ: the swept key does nothing, or is set again by another."""
    seen: dict[str, Job] = {}
    for one in planned:
        text = re.sub(r"(?m)^run_dir: .*\n", "", one.frozen, count=1)
        other = seen.setdefault(text, one.job)
        if other is not one.job:
            raise ConfigError(
                f"{_reported(other)} and {_reported(one.job)} give the same config",
                source=COMMAND_LINE,
                hint="Sweep a key that nothing else sets.",
            )


NOT_BEGUN, QUEUED = "not begun", "queued"
ERROR = "error"
"""Suffix of the file with the error, next to the job's frozen config."""
_LONGEST = 160


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of one job."""

    key: str
    swept: Mapping[str, str]
    run_dir: Path
    status: str
    reason: str = ""
    step: int | None = None
    seconds: float | None = None
    attempts: int = 0
    best: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Validation metric -> its best value, the step of it, and whether best is `min` or `max`."""
    last: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.status == RunStatus.finished


def job_status(key: str, swept: Mapping[str, str], run: RunDir, failure: Path, *, now: str | None = None) -> JobStatus:
    """The status of a job from the disk.

    Args:
        failure: the file that `write_failure` wrote.
        now: `running` if it does; `queued` if it waits in a queue, or runs on another machine.
    """
    summary = run.read_summary()
    attempts = len(run.attempts)
    status, reason = str(summary.get("status") or NOT_BEGUN), str(summary.get("reason") or "")
    if now == RunStatus.running or (now == QUEUED and status == RunStatus.running):
        status, reason = RunStatus.running, ""
    elif now == QUEUED:
        status, reason = QUEUED, ""
    elif status == RunStatus.running and not run.is_locked():
        status, reason = RunStatus.killed, "the process ended without a summary"
    if status not in (RunStatus.running, RunStatus.finished, RunStatus.failed, QUEUED):
        # It ended before it could write into its own directory, which may not exist.
        code, error = _failure(failure, attempts)
        if code is not None:
            status = RunStatus.killed if code < 0 else RunStatus.failed
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            reason += f": {error}" if error else ""
    step, seconds = summary.get("step"), summary.get("wall_time_s")
    if status in (RunStatus.running, RunStatus.killed):
        # Its summary is from the start of the attempt; the newest checkpoint is what a resume loads.
        newest = catalog_of(run.checkpoints_folder).newest_valid()
        step = newest.step if newest is not None else step
    best, last = summary.get("best_metrics"), summary.get("last_metrics")
    return JobStatus(
        key,
        swept,
        run.path,
        status,
        reason,
        step if isinstance(step, int) else None,
        float(seconds) if isinstance(seconds, int | float) else None,
        attempts,
        best if isinstance(best, dict) else {},
        last if isinstance(last, dict) else {},
    )


def write_failure(file: Path, code: int, run: RunDir, error: str = "") -> None:
    """Record the failure of a job; it counts until its directory has a later attempt."""
    write_json(file, {"exit_code": code, "attempts": len(run.attempts), "error": error})


@contextlib.contextmanager
def recording_error(frozen: Path) -> Iterator[None]:
    """Write the error that ends a job, as one line, next to its frozen config."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Of a list of mistakes take the first, not their number.
        text = next((line.removeprefix("- ") for line in lines if not line.endswith(":")), type(error).__name__)
        with contextlib.suppress(OSError):
            frozen.with_suffix(f".{ERROR}").write_text(text, "utf-8")
        raise


def recorded_error(frozen: Path) -> str:
    """The error that `recording_error` wrote, shortened; empty if there is none."""
    try:
        text = frozen.with_suffix(f".{ERROR}").read_text("utf-8")
    except (OSError, ValueError):
        return ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _failure(file: Path, attempts: int) -> tuple[int | None, str]:
    try:
        found = json.loads(file.read_bytes())
        return (int(found["exit_code"]), str(found["error"])) if found["attempts"] == attempts else (None, "")
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""


def write_csv(file: Path, rows: Sequence[JobStatus]) -> None:
    """Replace the file: a row for each job, in the order of the sweep."""
    keys = _keys(rows)
    metrics = _metrics(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    best_and_last = [f"{which} {name}" for name in metrics for which in ("best", "last")]
    writer.writerow(["KEY", *keys, "status", "step", *best_and_last, "seconds", "attempts", "reason", "run_dir"])
    for row in rows:
        swept = [row.swept.get(key, "") for key in keys]
        values = [value for name in metrics for value in (_best(row, name), row.last.get(name))]
        cells = [row.key, *swept, row.status, row.step, *values, row.seconds, row.attempts, row.reason, row.run_dir]
        writer.writerow(["" if cell is None else cell for cell in cells])
    replace(file, [text.getvalue().encode()])


def as_table(rows: Sequence[JobStatus]) -> str:
    """The rows for a screen: swept values, status, step, the best of each metric, seconds; why some failed."""
    keys, metrics = _keys(rows), _metrics(rows)
    known = [name for name in metrics if any(name in row.best for row in rows)]
    rule = best_rule(shared_keep_best(keep_best_of(run_config(row.run_dir)) for row in rows), known)
    ranked = rule.metric if rule is not None else next(iter(known), None)
    winners = [] if ranked is None else _winners(rows, ranked)
    best = [f"best {name}" for name in metrics]
    cells = []
    for row in rows:
        numbers = ["" if (value := _best(row, name)) is None else f"{value:.4g}" for name in metrics]
        step = "" if row.step is None else str(row.step)
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        swept = [row.swept.get(key, "") for key in keys]
        cells.append(["*" if row in winners else "", *swept, row.status, step, *numbers, seconds])
    header = ["", *keys, "status", "step", *best, "seconds"]
    shown = [table(header, cells, right=["step", *best, "seconds"])]
    if winners:
        shown.append(f"* best {ranked}{f', equal in {len(winners)} jobs' if len(winners) > 1 else ''}")
    shown += [f"{row.status}: {row.key}: {row.reason}" for row in rows if not row.finished and row.reason]
    return "\n".join(shown)


def _keys(rows: Sequence[JobStatus]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row.swept))


def _metrics(rows: Sequence[JobStatus]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in (*row.best, *row.last)))


def _best(row: JobStatus, name: str) -> float | None:
    value = row.best.get(name, {}).get("value")
    return value if isinstance(value, int | float) else None


def _winners(rows: Sequence[JobStatus], name: str) -> list[JobStatus]:
    """The jobs with the best value of a metric."""
    values = [(value, row) for row in rows if (value := _best(row, name)) is not None and math.isfinite(value)]
    if not values:
        return []
    smaller = values[0][1].best[name].get("mode") == "min"
    best = (min if smaller else max)(value for value, _ in values)
    return [row for value, row in values if value == best]
