"""The sections of a report: which facts, tables and charts of the runs it shows, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trainer_cli.addons.view.curves import by_last_part, pace, pauses
from trainer_cli.addons.view.report_blocks import (
    Block,
    clock_time,
    curve,
    duration,
    number,
    points,
    restarts,
    table,
    timeline,
    what_became,
    when_saved,
)
from trainer_cli.addons.view.report_comparison import ComparedRuns
from trainer_cli.addons.view.report_machine import MACHINE, machine_charts, machine_series
from trainer_cli.addons.view.report_media import media
from trainer_cli.addons.view.report_range_test import range_test
from trainer_cli.addons.view.report_runs import best_modes, differing, summary
from trainer_cli.addons.view.report_sweep import NOT_SET
from trainer_cli.environment import unix
from trainer_cli.runs import BestSettings, RunRecord, Series, ValidationRow
from trainer_cli.sweep_file import SweepJob

Records = Sequence[RunRecord]
Draw = Callable[[int, RunRecord, str], Block | None]
"""Makes the curve of the run at an index; None if it has none."""
_BUCKETS = 2000
"""Intervals of the x axis, each with up to two points of a curve; fewer with many runs, to keep the file small."""
_FEWEST_BUCKETS = 150
_PAUSES = 10
_OPEN_ROWS = 12
"""Rows from which a table is shown only after a click."""
_MOST_CONFIGS = 8
"""Largest number of runs whose whole configs are shown, not only what differs."""
_MOST_CHECKPOINT_METRICS = 4
_RATES = ("samples_per_s", "tokens_per_s", "steps_per_s")


def sections(
    records: Records,
    names: Sequence[str],
    validated_elsewhere: Mapping[str, Sequence[ValidationRow]],
    sweep: Sequence[SweepJob] = (),
    draw: Draw | None = None,
    comparison: ComparedRuns | None = None,
) -> list[Block]:
    """The sections of a report; empty ones are left out.

    Args:
        names: a short name for each run.
        validated_elsewhere: results of `train validate` for other runs, by the names of the runs.
        sweep: the jobs of sweeps, also those that have no run.
        draw: makes the curves of metrics; by default `metric_curve` with as many points as fit into a page.
        comparison: that of which these are the runs.
    """
    if draw is None:
        draw = partial(metric_curve, buckets=_buckets(records))
    swept = [] if comparison else differing([record.config for record in records], sweep)
    candidates = [
        ("Verdict", _verdict(records, draw, comparison)),
        ("Summary", summary(records, names, swept, sweep)),
        ("Metrics", _metrics(records, draw, lambda name: not _is_rate(name) and not _is_setting(name))),
        ("Media", media(records, names)),
        ("Checkpoints", _checkpoints(records, names)),
        ("Validation of checkpoints", _validation(records, validated_elsewhere)),
        ("Learning rates and norms", _metrics(records, draw, _is_setting)),
        ("Range test of the learning rate", range_test(records)),
        ("Throughput and pauses", _throughput(records, names, draw)),
        ("Machine", _machine(records, draw)),
        ("Config", _config(records, names)),
        ("Attempts", _attempts(records, names)),
        ("Environment", _environment(records, names)),
    ]
    # In the order of interest: the environment is rarely needed.
    return [{"title": title, "blocks": blocks} for title, content in candidates if (blocks := list(content))]


def _verdict(records: Records, draw: Draw, comparison: ComparedRuns | None) -> Iterator[Block]:
    """The answer of a comparison, with the curves of the metric that decides, and its details."""
    if comparison is None:
        return
    yield from comparison.answer
    if comparison.runs and comparison.metric is not None:
        yield _chart(records, draw, f"{comparison.metric}: mean and range over the seeds", [comparison.metric])
    yield from comparison.details


def _is_rate(name: str) -> bool:
    """Whether a metric of the training is a throughput."""
    return name.startswith("train/") and name.rpartition("/")[2] in _RATES


def _is_setting(name: str) -> bool:
    """Whether a metric of the training is a learning rate or a norm."""
    last = name.partition("/")[2].lower()
    return name.startswith("train/") and (_is_learning_rate(name) or "norm" in last)


def _is_learning_rate(name: str) -> bool:
    last = name.partition("/")[2].lower()
    return last.startswith("lr") or last.endswith("/lr")


def _buckets(records: Records) -> int:
    # A page of a hundred runs must still open in a browser.
    return max(_FEWEST_BUCKETS, _BUCKETS // max(1, len(records)))


STEP_TIME = "seconds per step"


def metric_curve(run: int, record: RunRecord, name: str, *, buckets: int) -> Block | None:
    """The curve of a metric of a run, or of its `STEP_TIME`; None if the run has no values of it."""
    series = metric_series(record, name)
    if series is None:
        return None
    by_clock = is_of_machine(record, name)
    return curve(run, record, name, series, buckets=buckets, role=role_of(name), by_clock=by_clock)


def is_of_machine(record: RunRecord, name: str) -> bool:
    """Whether the curve is one of the machine: a validation loader may have that name, too."""
    return name.startswith(MACHINE) and name not in record.columns.metrics


def role_of(name: str) -> str:
    """Whether the curve of a metric may be smoothed, as `curve` takes it."""
    is_smoothed = name == STEP_TIME or (name.startswith("train/") and not _is_learning_rate(name))
    return "train" if is_smoothed else ""


def metric_series(record: RunRecord, name: str) -> Series | None:
    """The values of a metric of a run, or of its `STEP_TIME`; None if it has none."""
    if is_of_machine(record, name):
        return machine_series(record, name)
    if name != STEP_TIME:
        return record.columns.metrics.get(name)
    per_step = _pace(record)
    return per_step if len(per_step.rows) else None


def _pace(record: RunRecord) -> Series:
    """Seconds per step between records; the time between two attempts does not count."""
    starts = [started for attempt in record.attempts if (started := unix(attempt.get("started"))) is not None]
    return pace(record.columns, starts)


def _metrics(records: Records, draw: Draw, is_included: Callable[[str], bool]) -> Iterator[Block]:
    """A chart of each metric of which `is_included` is true; metrics with the same last part share one."""
    names = list(dict.fromkeys(name for record in records for name in record.columns.metrics if is_included(name)))
    for title, members in by_last_part(names):
        yield _chart(records, draw, title, members)


def _chart(records: Records, draw: Draw, title: str, members: Sequence[str]) -> Block:
    """One chart with the curves of the metrics `members` of all runs."""
    drawn = [draw(run, record, name) for name in members for run, record in enumerate(records)]
    curves = [line for line in drawn if line is not None]
    return {"kind": "chart", "title": title, "curves": curves, "restarts": _restarts(records, curves)}


def _machine(records: Records, draw: Draw) -> Iterator[Block]:
    """The charts of the machine, over time: its steps may begin again."""
    for title, names in machine_charts(records).items():
        yield {**_chart(records, draw, title, names), "axis": "time"}


def _restarts(records: Records, curves: Sequence[Block]) -> list[Block]:
    """Where later attempts of the runs began that have a curve in the chart."""
    runs = sorted({line["run"] for line in curves})
    return [mark for run in runs for mark in restarts(run, records[run])]


def _validation(records: Records, validated_elsewhere: Mapping[str, Sequence[ValidationRow]]) -> Iterator[Block]:
    """Charts of metrics over the steps of checkpoints, and a table of what `train validate` measured."""
    rows_of_runs = [*(record.validation for record in records), *validated_elsewhere.values()]
    all_rows = [row for rows in rows_of_runs for row in rows]
    if len(validated_elsewhere) > 1:
        lines = [[name, str(len({row.checkpoint for row in rows}))] for name, rows in validated_elsewhere.items()]
        numbers = list(range(len(records), len(rows_of_runs)))
        yield table(["run", "checkpoints"], lines, right=["checkpoints"], title="Runs", runs=numbers, choose=True)
    for metric, curves in _validation_curves(records, rows_of_runs).items():
        # A single point of each run repeats the charts of its training.
        if any(metric in row.metrics for row in all_rows) or any(len(line["step"]) > 1 for line in curves):
            yield {"kind": "chart", "title": metric, "curves": curves, "restarts": []}
    if all_rows:
        yield _validation_table(records, all_rows)


def _validation_curves(records: Records, rows_of_runs: Sequence[Sequence[ValidationRow]]) -> dict[str, list[Block]]:
    """Metric -> its curves: one for each run and loader of `train validate`, then those measured in training."""
    charts: dict[str, list[Block]] = {}
    for run, rows in enumerate(rows_of_runs):
        for metric in dict.fromkeys(key for row in rows for key in row.metrics):
            measured = [row for row in rows if metric in row.metrics]
            for loader in dict.fromkeys(row.loader for row in measured):
                of_loader = [row for row in measured if row.loader == loader]
                steps, values = [row.step for row in of_loader], [row.metrics[metric] for row in of_loader]
                name = f"{loader}/{metric}"
                charts.setdefault(metric, []).append(points(run, name, steps, values, name))
    for run, record in enumerate(records):
        at_saves = when_saved(record)
        for name in dict.fromkeys(name for metrics in at_saves.values() for name in metrics):
            steps = [step for step, metrics in at_saves.items() if name in metrics]
            values = [at_saves[step][name] for step in steps]
            label = f"{name} in training"
            charts.setdefault(name.partition("/")[2], []).append(points(run, label, steps, values, label))
    return charts


def _validation_table(records: Records, rows: Sequence[ValidationRow]) -> Block:
    """What `train validate` measured, one row for each checkpoint and loader; the best row is marked."""
    metrics = list(dict.fromkeys(key for row in rows for key in row.metrics))
    best, rule = BestSettings.common(record.settings for record in records).best_row(rows)
    cells = [
        [row.checkpoint, f"{row.step:,}", row.loader, row.weights, *(number(row.metrics.get(name)) for name in metrics)]
        for row in rows
    ]
    return table(
        ["checkpoint", "step", "loader", "weights", *metrics],
        cells,
        right=["step", *metrics],
        best=best_modes(metrics, records),
        title="Results of train validate" + (f"; marked: the {rule.note}" if rule is not None else ""),
        marked=[] if best is None else [best],
        **_fold(cells),
    )


def _checkpoints(records: Records, names: Sequence[str]) -> Iterator[Block]:
    """The timeline of the checkpoints, and a table: when each was saved and removed, why, and its metrics."""
    if (lanes := timeline(records, names)) is not None:
        yield lanes
    at_saves = [when_saved(record) for record in records]
    metrics = list(dict.fromkeys(name for steps in at_saves for values in steps.values() for name in values))
    metrics = metrics[:_MOST_CHECKPOINT_METRICS]
    rows = [
        [
            names[run],
            checkpoint.life.name,
            "" if checkpoint.life.step is None else f"{checkpoint.life.step:,}",
            checkpoint.life.kind,
            checkpoint.life.reason,
            clock_time(checkpoint.life.saved_at),
            what_became(checkpoint),
            clock_time(checkpoint.life.removed_at),
            *(number(at_saves[run].get(checkpoint.life.step or 0, {}).get(name)) for name in metrics),
        ]
        for run, record in enumerate(records)
        for checkpoint in record.checkpoints
    ]
    columns = ["run", "checkpoint", "step", "kind", "saved because", "saved (UTC)", "then", "removed (UTC)", *metrics]
    if rows:
        best = best_modes(metrics, records)
        yield _of_runs(records, columns, rows, right=["step", *metrics], best=best, title="Saves and removals")


def _throughput(records: Records, names: Sequence[str], draw: Draw) -> Iterator[Block]:
    """Charts of rates and of the time of a step, and a table of the longest pauses."""
    yield from _metrics(records, draw, _is_rate)
    rows = []
    for run, record in enumerate(records):
        for pause in pauses(record.columns, _pace(record), most=_PAUSES):
            step = record.columns.step
            rows.append([
                names[run],
                f"{step[pause.row - 1]:,} to {step[pause.row]:,}",
                f"{pause.seconds:.1f}",
                f"{pause.usual_s:.1f}",
                _meanwhile(record, pause.row),
            ])  # fmt: skip
    chart = _chart(records, draw, f"{STEP_TIME}, with evaluations and saves", [STEP_TIME])
    if chart["curves"]:
        yield chart
    if rows:
        columns = ["run", "steps", "seconds", "usual", "meanwhile"]
        title = "The longest pauses between two records"
        yield _of_runs(records, columns, rows, right=["seconds", "usual"], title=title)


def _meanwhile(record: RunRecord, row: int) -> str:
    """The saves and evaluations between a record and the one before it."""
    columns = record.columns
    since, until = columns.time[row - 1], columns.time[row]
    lives = [checkpoint.life for checkpoint in record.checkpoints]
    events = [f"saved {life.name}" for life in lives if since < (life.saved_at or 0) <= until]
    validated = [series.rows for name, series in columns.metrics.items() if not name.startswith("train/")]
    # The record of an evaluation comes with the record of its step, or after it.
    if any(np.isin((row - 1, row), rows).any() for rows in validated):
        events.insert(0, "evaluation")
    return ", ".join(events) or "nothing that is recorded"


def _config(records: Records, names: Sequence[str]) -> Iterator[Block]:
    """The config of a single run. To compare runs: the keys that differ, and the whole configs of a few runs."""
    if len(records) == 1:
        rows = [[key, value, records[0].places.get(key, "default")] for key, value in records[0].config.items()]
        if rows:
            yield table(["key", "value", "set by"], rows, filter=True)
        return
    configs = [record.config for record in records]
    keys = differing(configs, ())
    rows = [[key, *(config.get(key, NOT_SET) for config in configs)] for key in keys]
    if rows:
        yield table(["key", *names], rows, title="What differs between the runs", filter=True)
    every_key = dict.fromkeys(key for config in configs for key in config)
    if len(records) <= _MOST_CONFIGS and every_key:
        rows = [[key, *(config.get(key, NOT_SET) for config in configs)] for key in every_key]
        marked = [row for row, key in enumerate(every_key) if key in keys]
        title = "The whole configs side by side; marked: what differs"
        yield table(["key", *names], rows, title=title, fold=True, filter=True, marked=marked)


def _attempts(records: Records, names: Sequence[str]) -> Iterator[Block]:
    """A table of the attempts of each run: why and where each began and ended."""
    keys = ("attempt", "status", "reason", "start_step", "step")
    rows = [
        [
            names[run],
            *("" if attempt.get(key) is None else str(attempt[key]) for key in keys),
            clock_time(unix(attempt.get("started"))),
            clock_time(unix(attempt.get("ended"))),
            duration(attempt.get("wall_time_s")),
            ", ".join(sorted(map(str, attempt.get("changed_environment") or ()))),
        ]
        for run, record in enumerate(records)
        for attempt in record.attempts
    ]
    columns = [
        "run", "attempt", "status", "reason", "from step", "to step", "began (UTC)", "ended (UTC)", "time", "changed",
    ]  # fmt: skip
    if rows:
        yield _of_runs(records, columns, rows, right=["attempt", "from step", "to step", "time"])


def _environment(records: Records, names: Sequence[str]) -> Iterator[Block]:
    """Versions and machines: a table of what is the same in all runs, and one of what differs."""
    keys = dict.fromkeys(key for record in records for key in record.environment)
    values = {key: [record.environment.get(key, "") for record in records] for key in keys}
    shared = [[key, texts[0]] for key, texts in values.items() if len(set(texts)) == 1]
    if shared:
        yield table(["name", "value"], shared, title="" if len(records) == 1 else "The same in all runs")
    different = [[key, *texts] for key, texts in values.items() if len(set(texts)) > 1]
    if different:
        yield table(["name", *names], different, title="What differs", **_fold(different))


def _of_runs(records: Records, columns: Sequence[str], rows: Sequence[Sequence[str]], **more: Any) -> Block:
    """A table whose first column names the run; a report of a single run leaves it out."""
    if len(records) == 1:
        columns, rows = columns[1:], [row[1:] for row in rows]
    return table(columns, rows, **more, **_fold(rows))


def _fold(rows: Sequence[Any]) -> dict[str, Any]:
    """The argument of `table` that shows a table of these rows only after a click, if they are many."""
    return {"fold": True} if len(rows) > _OPEN_ROWS else {}
