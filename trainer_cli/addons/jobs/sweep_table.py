"""The status of a sweep's jobs, read from their run directories, as a table and as sweep.csv."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_cli.catalog import Catalog
from trainer_cli.errors import describe_exit
from trainer_cli.files import replace
from trainer_cli.runs import BestSettings, Run, RunDir, write_json
from trainer_cli.steps import RunStatus
from trainer_cli.terminal import format_count, format_first, left_out_of_table, line_width, table, wrapped

NOT_BEGUN, QUEUED = "not begun", "queued"
STATE_COLOURS: Mapping[str, str] = {
    RunStatus.running: "cyan",
    RunStatus.failed: "red",
    RunStatus.killed: "red",
    RunStatus.stopped: "yellow",
}
"""State of a job -> its colour on a terminal."""
ERROR, FAILURE = "error", "failure"
"""Suffixes of the files next to a job's frozen config: with its error, and with what `write_failure` writes."""
_MAX_LETTERS = 160
_MOST_WARNINGS = 8
"""Kinds of warnings that are shown: code of the user may warn of anything."""
_WARNING = re.compile(r"^\S+ \S+ WARNING (.+)", re.M)
"""The first line of a warning in a log."""


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
    """Validation metric -> its best `value`, the `step` of it, and its `mode` (`min` or `max`)."""
    last: Mapping[str, Any] = field(default_factory=dict)
    devices: str = ""
    """The devices of a running job, if it was given its own."""

    @property
    def finished(self) -> bool:
        """Whether the job needs no further work."""
        return self.status == RunStatus.finished


def job_status(
    key: str, swept: Mapping[str, str], run: RunDir, failure: Path, *, live_state: str | None = None, devices: str = ""
) -> JobStatus:
    """Read the status of a job from the disk.

    Args:
        failure: the file that `write_failure` writes.
        live_state: `running` for a running child process; `queued` for a job that waits or runs in a cluster's queue.
    """
    recorded = Run(run.path)
    state, reason = recorded.read_status()
    status, summary, attempts = state or NOT_BEGUN, recorded.summary, len(recorded.attempts)
    if live_state == RunStatus.running or (live_state == QUEUED and summary.get("status") == RunStatus.running):
        status, reason = RunStatus.running, ""
    elif live_state == QUEUED:
        status, reason = QUEUED, ""
    if status not in (RunStatus.running, RunStatus.finished, QUEUED):
        # The job may have ended before it could write into its run directory, or make it: a summary that says `failed`
        # may be that of an earlier attempt.
        code, error = _failure(failure, attempts)
        is_in_summary = status == RunStatus.failed and (code or 0) >= 0 and error.removesuffix("...") in reason
        if code is not None and not is_in_summary:
            status = RunStatus.killed if code < 0 else RunStatus.failed
            reason = describe_exit(code)
            reason += f": {error}" if error else ""
    step, seconds = summary.get("step"), summary.get("wall_time_s")
    if status in (RunStatus.running, RunStatus.killed):
        # The summary is from the start of the attempt. A resume loads the newest checkpoint.
        newest = Catalog.of(run.checkpoints_folder).newest_valid()
        step = newest.step if newest is not None else step
    best, last = summary.get("best_metrics"), summary.get("last_metrics")
    return JobStatus(
        key=key,
        swept=swept,
        run_dir=run.path,
        status=status,
        reason=reason,
        step=step if isinstance(step, int) else None,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        attempts=attempts,
        best=best if isinstance(best, dict) else {},
        last=last if isinstance(last, dict) else {},
        devices=devices,
    )


def write_failure(file: Path, code: int, run: RunDir, error: str = "") -> None:
    """Record the failure of a job. The record counts until the run has a later attempt."""
    write_json(file, {"exit_code": code, "attempts": len(run.attempts), "error": error})


@contextlib.contextmanager
def recording_error(frozen: Path) -> Iterator[None]:
    """Write the error that ends a job, as one line, next to its frozen config."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # A list of mistakes begins with their number and a colon: take the first mistake.
        text = next((line.removeprefix("- ") for line in lines if not line.endswith(":")), type(error).__name__)
        with contextlib.suppress(OSError):
            frozen.with_suffix(f".{ERROR}").write_text(text, "utf-8")
        raise


def recorded_error(frozen: Path) -> str:
    """The error that `recording_error` wrote; empty without one."""
    try:
        return frozen.with_suffix(f".{ERROR}").read_text("utf-8")
    except (OSError, ValueError):
        return ""


def shorten_error(text: str) -> str:
    """As much of an error as a table shows."""
    return text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]}..."


def _failure(file: Path, attempts: int) -> tuple[int | None, str]:
    """The exit code and the error that `write_failure` recorded; None and empty if the run has a later attempt."""
    try:
        failure = json.loads(file.read_bytes())
        return (int(failure["exit_code"]), str(failure["error"])) if failure["attempts"] == attempts else (None, "")
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""


def write_csv(file: Path, rows: Sequence[JobStatus]) -> None:
    """Replace the file: a row for each job, in the order of the sweep."""
    keys = _keys(rows)
    metrics = _metrics(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    best_and_last = [f"{kind} {name}" for name in metrics for kind in ("best", "last")]
    writer.writerow(["KEY", *keys, "status", "step", *best_and_last, "seconds", "attempts", "reason", "run_dir"])
    for row in rows:
        swept = [row.swept.get(key, "") for key in keys]
        values = [value for name in metrics for value in (_best(row, name), row.last.get(name))]
        cells = [row.key, *swept, row.status, row.step, *values, row.seconds, row.attempts, row.reason, row.run_dir]
        writer.writerow(["" if cell is None else cell for cell in cells])
    # As a whole: a reader never sees half a table.
    replace(file, [text.getvalue().encode()])


def as_table(rows: Sequence[JobStatus], settings: BestSettings) -> str:
    """Format the rows: swept values, status, step, the best of each metric, seconds; then why jobs are unfinished.

    A narrow terminal gets the swept values, by the last parts of their keys, the step and the metric that decides.

    Args:
        settings: what the configs of all jobs say about which is best.
    """
    keys, metrics = _keys(rows), _metrics(rows)
    ranked, winners = best_jobs(rows, settings)
    best = [f"best {name}" for name in metrics]
    cells = []
    for row in rows:
        numbers = ["" if (value := _best(row, name)) is None else f"{value:.4g}" for name in metrics]
        step = "" if row.step is None else f"{row.step:,}"
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        swept = [row.swept.get(key, "") for key in keys]
        cells.append(["*" if row in winners else "", *swept, row.status, step, *numbers, seconds])
    numbers = ["step", *best, "seconds"]
    header = ["", *keys, "status", *numbers]
    least = [*(f"best {name}" for name in reversed(metrics) if name != ranked), "seconds"]
    if all(row.finished for row in rows):
        least.append("status")
    if left_out_of_table(header, cells, least):
        header[1 : 1 + len(keys)] = short_names(keys, reserved=header[1 + len(keys) :]).values()
    shown = [table(header, cells, right=numbers, least_important=least, colours={**STATE_COLOURS, "*": "green"})]
    if left_out := left_out_of_table(header, cells, least):
        shown.append(wrapped(f"left out, as they do not fit: {', '.join(left_out)}", line_width(sys.stdout)))
    if winners:
        more = f" and {len(winners) - 1} more" if len(winners) > 1 else ""
        shown.append(f"* best {ranked} of all jobs: {_best(winners[0], str(ranked)):.4g}, of {winners[0].key}{more}")
        compared = [RunDir(row.run_dir) for row in rows if ranked in row.best]
        if files := _differing_files(compared):
            shown.append(f"  compared although the source differs: {format_first(files, 4)}")
        durations = dict.fromkeys(_max_duration(run.values) for run in compared)
        if len(durations) > 1:
            shown.append(f"  compared although loop.max_duration differs: {format_first(list(durations), 4)}")
    return "\n".join([*shown, *_list_warnings(rows), *_reasons(rows)])


def best_jobs(rows: Sequence[JobStatus], settings: BestSettings) -> tuple[str | None, list[JobStatus]]:
    """The metric that decides which job is best, and the best jobs; None and none if nothing was measured."""
    measured = [name for name in _metrics(rows) if any(name in row.best for row in rows)]
    rule = settings.rule(measured)
    ranked = rule.metric if rule is not None else next(filter(settings.may_decide, measured), None)
    return ranked, [] if ranked is None else _winners(rows, ranked)


def short_names(keys: Sequence[str], reserved: Sequence[str] = ()) -> dict[str, str]:
    """Key -> its last parts, as few as tell it from the other keys and are no `reserved` name."""

    def last_parts(key: str, count: int) -> str:
        return ".".join(key.split(".")[-count:])

    names = {}
    for key in keys:
        names[key] = key
        for count in range(1, key.count(".") + 1):
            name = last_parts(key, count)
            if name not in reserved and [last_parts(other, count) for other in keys].count(name) == 1:
                names[key] = name
                break
    return names


def _list_warnings(rows: Sequence[JobStatus]) -> Iterator[str]:
    """The warnings in the logs of the jobs: those that differ in numbers, or in the job's own folder, once."""
    kinds: dict[str, dict[str, str]] = {}
    for row in rows:
        with contextlib.suppress(OSError):
            for text in _WARNING.findall(RunDir(row.run_dir).log_file.read_text("utf-8", "replace")):
                kind = re.sub(r"\d[\d.,]*", "", text.replace(str(row.run_dir), ""))
                kinds.setdefault(kind, {}).setdefault(row.key, text)
    for texts in list(kinds.values())[:_MOST_WARNINGS]:
        yield f"warning of {len(texts)} of {format_count(len(rows), 'job')}: {next(iter(texts.values()))}"


def _reasons(rows: Sequence[JobStatus]) -> Iterator[str]:
    """Why jobs are unfinished. A reason that several jobs have, apart from their own folders, is shown once."""
    groups: dict[tuple[str, str], list[JobStatus]] = {}
    for row in rows:
        if not row.finished and row.reason:
            groups.setdefault((row.status, row.reason.replace(str(row.run_dir), "")), []).append(row)
    for first, *same in groups.values():
        yield f"{first.status}: {first.key}: {first.reason}"
        if same:
            yield f"  the same: {format_first([row.key for row in same], 3)}"


def as_sentence(row: JobStatus, settings: BestSettings) -> str:
    """How a job ended, on one line: `finished at step 90: its best val/loss 0.1302, 2.1 s`."""
    rule = settings.rule(row.best)
    best = "" if rule is None else f": its best {rule.metric} {_best(row, rule.metric):.4g}"
    step = "" if row.step is None else f" at step {row.step:,}"
    return f"{row.status}{step}{best}{'' if row.seconds is None else f', {row.seconds:.1f} s'}"


def _keys(rows: Sequence[JobStatus]) -> list[str]:
    """The swept config keys of all jobs, each once."""
    return list(dict.fromkeys(key for row in rows for key in row.swept))


def _metrics(rows: Sequence[JobStatus]) -> list[str]:
    """The metrics of which a job has a best or a last value, each once."""
    return list(dict.fromkeys(name for row in rows for name in (*row.best, *row.last)))


def _best(row: JobStatus, name: str) -> float | None:
    """The best value of a metric in a job; None if there is no such number in its summary."""
    value = row.best.get(name, {}).get("value")
    return value if isinstance(value, int | float) else None


def _differing_files(runs: Sequence[RunDir]) -> list[str]:
    """The files of the project that were not the same in all runs that imported them."""
    digests: dict[str, set[str]] = {}
    for run in runs:
        for file, digest in run.read_source().items():
            digests.setdefault(file, set()).add(digest)
    return sorted(file for file, of_file in digests.items() if len(of_file) > 1)


def _max_duration(config: Mapping[str, Any]) -> str:
    """The `loop.max_duration` of a run's config, as written."""
    loop = config.get("loop")
    return str(loop.get("max_duration")) if isinstance(loop, Mapping) else ""


def _winners(rows: Sequence[JobStatus], name: str) -> list[JobStatus]:
    """The jobs with the best value of a metric."""
    # A diverged job must not be the best of a metric that is minimized.
    values = [(value, row) for row in rows if (value := _best(row, name)) is not None and math.isfinite(value)]
    if not values:
        return []
    is_minimized = values[0][1].best[name].get("mode") == "min"
    best = (min if is_minimized else max)(value for value, _ in values)
    # Those at their end first: of equal ones the first is trained on.
    return sorted((row for value, row in values if value == best), key=lambda row: not row.finished)
