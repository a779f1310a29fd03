"""The first section of a report: how a run stands, or which of several is the best, and by what they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainer_cli.run.best import best_rule, shared_keep_best
from trainer_cli.run.report_blocks import Block, clock_time, duration, number, parallel, table
from trainer_cli.run.run_record import RunRecord, SweepJob, short_keys

_SWEPT = 6
"""Parameters in the table of runs and in parallel coordinates."""
_OF_ONE_RUN = ("name", "run_dir", "resume", "logging.console", "logging.level")
"""Keys that do not count as differences between runs."""


def summary(
    records: Sequence[RunRecord], names: Sequence[str], swept: Sequence[str], sweep: Sequence[SweepJob]
) -> Iterator[Block]:
    """Facts of one run; of several a table with the best first, and parallel coordinates of the `swept` keys."""
    if len(records) == 1:
        yield {"kind": "facts", "items": list(_facts(records[0]))}
    elif records:
        yield _runs(records, names, swept)
    if len(records) != 1 and (never := [job for job in sweep if not job.run_dir.is_dir()]):
        keys = list(dict.fromkeys(key for job in never for key in job.swept))
        rows = [[*(job.swept.get(key, "") for key in keys), job.status, job.reason] for job in never]
        yield table([*keys, "status", "reason"], rows, title="Jobs of the sweep without a run")
    ranked = list(dict.fromkeys(name for record in records for name in record.best))
    if len(records) > 2 and ranked and swept:
        values = {name: [record.best.get(name, (math.nan, 0))[0] for record in records] for name in ranked[:4]}
        modes = {name: mode for record in records for name, mode in record.modes.items()}
        labels = short_keys(swept[:_SWEPT])
        texts = {labels[key]: [record.config.get(key, "(not set)") for record in records] for key in swept[:_SWEPT]}
        yield parallel(texts, values, modes)


def _facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    view, summary, environment = record.view, record.summary, record.environment
    yield "status", f"{view.state}: {view.reason}" if view.reason else view.state
    total = f" of {view.total_steps:,}" if view.total_steps is not None else ""
    if view.step is not None:
        yield "step", f"{view.step:,}{total}"
    for name, (value, step) in record.best.items():
        yield f"best {name}", f"{number(value)} at step {step:,}"
    if took := duration(summary.get("wall_time_s")):
        yield "training time", took
    rate = summary.get("throughput")
    if isinstance(rate, dict) and isinstance(rate.get("samples_per_s"), int | float):
        yield "throughput", f"{rate['samples_per_s']:,.0f} samples/s in the last attempt"
    yield "attempts", str(len(record.attempts))
    yield "device", environment.get("device_name") or environment.get("device", "unknown")
    yield "began", f"{clock_time(record.began)} UTC"
    yield "directory", str(record.path)


def _runs(records: Sequence[RunRecord], names: Sequence[str], swept: Sequence[str]) -> Block:
    """A row for each run; the best comes first."""
    metrics = list(dict.fromkeys(name for record in records for name in record.best))
    rule = best_rule(shared_keep_best(record.keep_best for record in records), metrics)
    if rule is not None:
        metrics.sort(key=lambda name: name != rule.metric)
    order = list(range(len(records)))
    if metrics:
        sign = -1 if any(record.modes.get(metrics[0]) == "max" for record in records) else 1
        order.sort(key=lambda at: sign * records[at].best.get(metrics[0], (sign * math.inf, 0))[0])
    columns = [
        "run",
        *swept[:_SWEPT],
        "status",
        "step",
        *(f"best {name}" for name in metrics),
        "time",
        "attempts",
        "reason",
    ]
    rows = []
    for at in order:
        record = records[at]
        best = [number(record.best[name][0]) if name in record.best else "" for name in metrics]
        view = record.view
        rows.append([
            names[at],
            *(record.config.get(key, "") for key in swept[:_SWEPT]),
            view.state,
            "" if view.step is None else f"{view.step:,}",
            *best,
            duration(record.summary.get("wall_time_s")),
            str(len(record.attempts)),
            "" if view.state == "finished" else view.reason,
        ])  # fmt: skip
    right = ["step", "time", "attempts", *(f"best {name}" for name in metrics)]
    title = f"Runs, the best {metrics[0]} first" if metrics else "Runs"
    return table(columns, rows, right=right, title=title, runs=order, marked=[0] if metrics else [], choose=True)


def differing(records: Sequence[RunRecord], sweep: Sequence[SweepJob]) -> list[str]:
    """The keys of the config that differ between the runs; those that a sweep names come first."""
    named = list(dict.fromkeys(key for job in sweep for key in job.swept))
    keys = dict.fromkeys(key for record in records for key in record.config if key not in _OF_ONE_RUN)
    different = [key for key in keys if len({record.config.get(key) for record in records}) > 1]
    return sorted(different, key=lambda key: named.index(key) if key in named else len(named))
