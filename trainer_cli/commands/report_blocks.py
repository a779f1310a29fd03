"""The parts of a report as plain values: facts, tables and charts, which `report_page.js` shows.

A block is a mapping whose `kind` is `facts`, `table`, `text`, `media`, `chart` or `timeline`, or one of `report_sweep`.
Its texts are never HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from trainer_cli.commands.report_sweep import NOT_SET, sweep_charts
from trainer_cli.core.goodput import Seconds, read_seconds
from trainer_cli.runs.curves import Array, Columns, Series, reduce
from trainer_cli.runs.environment import unix
from trainer_cli.runs.record import RunRecord, RunView, SavedCheckpoint, SweepJob, rank_metrics
from trainer_cli.terminal import format_clock, format_rate

Block = dict[str, Any]
_DIGITS = 6


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[str] = (), **more: Any) -> Block:
    """A table without the columns that are empty. Columns named in `right` are flush right.

    Args:
        more: `title`; `fold`, if it is shown only after a click; `marked`, indices of rows to stress; `runs`, for each
            row the index of its run; `filter`, whether rows can be searched.
    """
    shown = [index for index, _ in enumerate(columns) if any(row[index] for row in rows)]
    return {
        "kind": "table",
        "columns": [{"name": columns[index], "right": columns[index] in right} for index in shown],
        "rows": [[row[index] for index in shown] for row in rows],
        **more,
    }


def curve(
    run: int, record: RunRecord, name: str, series: Series, *, buckets: int, role: str = "", by_clock: bool = False
) -> Block:
    """One line of a chart, over steps, epochs and seconds since the run began.

    Args:
        run: index of the run.
        role: `train`, which may be smoothed; else empty.
        by_clock: whether the series is one of the machine, whose steps may begin again.
    """
    columns, rows = record.machine if by_clock else record.columns, series.rows
    # With the extremes of each bucket: a spike must not vanish from the curve.
    reduced = reduce((columns.time if by_clock else columns.step)[rows], series.values, buckets)
    drawn = rows[reduced.indices]
    # Counted beside the curve, since JSON and the chart have no NaN.
    bad = np.flatnonzero(~np.isfinite(series.values))
    block = {
        "run": run,
        "name": name,
        "group": name,
        "role": role,
        **_axes(columns, drawn, record.began),
        "y": rounded(series.values[reduced.indices]),
    }
    if reduced.means is not None:
        block["mean"] = {
            **_axes(columns, rows[reduced.means.indices], record.began),
            "y": rounded(reduced.means.values),
        }
    if len(bad):
        block["bad"] = [len(bad), int(columns.step[rows[bad[0]]])]
    return block


def _axes(columns: Columns, rows: Array, began: float) -> Block:
    seconds = columns.time[rows] - began
    return {"step": columns.step[rows].tolist(), "epoch": rounded(columns.epoch[rows]), "time": rounded(seconds, 7)}


def points(run: int, name: str, steps: Sequence[int], values: Sequence[float], group: str) -> Block:
    """A line through checkpoints, which have no epoch and no time."""
    facts = {"run": run, "name": name, "group": group, "role": "validate"}
    return {**facts, "step": list(steps), "epoch": None, "time": None, "y": rounded(np.array(values, float))}


def rounded(values: Array, digits: int = _DIGITS) -> list[float | None]:
    """Numbers as JSON can hold them; None for what is not finite."""
    # Few digits: they decide the size of the page, and a screen shows no more.
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


def restarts(run: int, record: RunRecord) -> Iterator[Block]:
    """Marks where the attempts after the first began."""
    for attempt in record.attempts[1:]:
        step, at = attempt.get("start_step"), unix(attempt.get("started"))
        if isinstance(step, int) and at is not None:
            row = min(int(np.searchsorted(record.columns.step, step)), len(record.columns.step) - 1)
            epoch = float(record.columns.epoch[row]) if row >= 0 else 0.0
            text = f"attempt {attempt.get('attempt')}"
            yield {"run": run, "step": step, "epoch": epoch, "time": at - record.began, "text": text}


def timeline(records: Sequence[RunRecord], names: Sequence[str]) -> Block | None:
    """Every checkpoint at its step: its kind, why it was saved, kept or removed. None without checkpoints."""
    lanes: dict[str, None] = {}
    marks: list[Block] = []
    for run, record in enumerate(records):
        for checkpoint in record.checkpoints:
            life, fate = checkpoint.life, "kept" if checkpoint.on_disk else "removed"
            if life.step is None:
                continue
            lane = names[run] if len(records) > 1 else f"{life.kind or 'unknown'}, {fate}"
            lanes.setdefault(lane)
            name = life.name if len(records) == 1 else f"{names[run]}: {life.name}"
            text = [name, f"saved: {life.reason}" if life.reason else "", what_became(checkpoint)]
            marks.append({"lane": lane, "step": life.step, "kept": checkpoint.on_disk, "type": life.kind, "text": text})
    if not marks:
        return None
    order = list(lanes) if len(records) > 1 else sorted(lanes, key=_lane_order)
    return {"kind": "timeline", "title": "Checkpoints by step", "lanes": order, "marks": marks}


def _lane_order(lane: str) -> tuple[bool, str]:
    return lane.endswith("removed"), lane


def when_saved(record: RunRecord) -> dict[int, dict[str, float]]:
    """The validation metrics that the training measured at exactly the steps of its checkpoints."""
    saved = {checkpoint.life.step for checkpoint in record.checkpoints}
    by_step: dict[int, dict[str, float]] = {}
    for name, series in record.columns.metrics.items():
        if "/" in name and not name.startswith("train/"):
            for step, value in zip(record.columns.step[series.rows].tolist(), series.values.tolist(), strict=True):
                if step in saved:
                    by_step.setdefault(step, {})[name] = value
    return dict(sorted(by_step.items()))


def what_became(checkpoint: SavedCheckpoint) -> str:
    """Whether a checkpoint was kept or removed, and why."""
    if checkpoint.on_disk:
        return f"kept: {checkpoint.why_kept}" if checkpoint.why_kept else "on the disk"
    reason = checkpoint.life.removed_reason
    return f"removed: {reason}" if reason else "removed; the reason was not recorded"


def number(value: float | None) -> str:
    """A metric with four digits; nothing for None."""
    return "" if value is None else f"{value:.4g}"


def clock_time(at: float | None) -> str:
    """Unix seconds as a date in UTC; nothing for None."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: object) -> str:
    """Seconds as people read them; nothing for what is not a number."""
    if not isinstance(seconds, int | float):
        return ""
    if round(seconds) < 60:
        return f"{seconds:.1f} s"
    return f"{format_clock(seconds)} {'h' if round(seconds) >= 3600 else 'min'}"


_SWEPT = 6
"""Parameters in the table of runs and in parallel coordinates."""
OF_ONE_RUN = ("name", "run_dir", "notes", "tags", "resume", "logging.console", "logging.level")
"""Keys that do not count as differences between runs."""


def summary(
    records: Sequence[RunRecord], names: Sequence[str], swept: Sequence[str], sweep: Sequence[SweepJob]
) -> Iterator[Block]:
    """Facts of a single run; else a table of the runs, the best first, and parallel coordinates of the `swept` keys."""
    if len(records) == 1:
        yield {"kind": "facts", "items": list(_facts(records[0]))}
    elif records:
        yield _runs(records, names, swept)
    if len(records) != 1 and (never := [job for job in sweep if not job.run_dir.is_dir()]):
        keys = list(dict.fromkeys(key for job in never for key in job.swept))
        rows = [[*(job.swept.get(key, "") for key in keys), job.status, job.reason] for job in never]
        yield table([*keys, "status", "reason"], rows, title="Jobs of the sweep without a run")
    yield from sweep_charts(records, names, swept[:_SWEPT])


def _facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    view, summary, environment = record.view, record.summary, record.environment
    yield "status", f"{view.state}: {view.reason}" if view.reason else view.state
    if record.problems:
        yield "damage", "; ".join(record.problems)
    total = f" of {view.total_steps:,}" if view.total_steps is not None else ""
    if view.step is not None:
        yield "step", f"{view.step:,}{total}"
    for name, (value, step) in record.best.items():
        yield f"best {name}", f"{number(value)} at step {step:,}"
    if took := duration(summary.get("wall_time_s")):
        yield "training time", took
    if shares := _shares(read_seconds(summary.get("time_s")) or {}):
        yield "where the time went", shares
    rate = summary.get("throughput")
    if isinstance(rate, dict) and isinstance(rate.get("samples_per_s"), int | float):
        yield "throughput", f"{format_rate(rate['samples_per_s'])} samples/s in the last attempt"
    yield "attempts", str(len(record.attempts))
    yield "device", environment.get("device_name") or environment.get("device", "unknown")
    yield "began", f"{clock_time(record.began)} UTC"
    tags, notes = tags_and_notes(record.config)
    yield from ((name, text) for name, text in (("tags", tags), ("notes", notes)) if text)
    yield "directory", str(record.path)


def reason_of(view: RunView, problems: Iterable[str]) -> str:
    """Why a run ended, unless it finished, and what of it cannot be read."""
    reasons = ["" if view.state == "finished" else view.reason, *problems]
    return "; ".join(filter(None, dict.fromkeys(reasons)))


def tags_and_notes(config: Mapping[str, str]) -> tuple[str, str]:
    """What describes a run: its tags, separated by commas, and its notes; empty if it has none."""
    notes = config.get("notes", "null")
    return config.get("tags", "").strip("[]"), "" if notes == "null" else notes


def _shares(seconds: Seconds) -> str:
    """Each activity with its share of the time, largest first."""
    total_s = sum(seconds.values())
    shares = {activity: amount / total_s for activity, amount in seconds.items() if amount > 0}
    largest_first = sorted(shares, key=lambda activity: -shares[activity])
    return ", ".join(f"{activity} {shares[activity]:.1%}" for activity in largest_first)


def _runs(records: Sequence[RunRecord], names: Sequence[str], swept: Sequence[str]) -> Block:
    """A row for each run; the best comes first."""
    metrics = rank_metrics(records)
    order = list(range(len(records)))
    if metrics:
        sign = -1 if any(record.modes.get(metrics[0]) == "max" for record in records) else 1
        order.sort(key=lambda at: sign * records[at].best.get(metrics[0], (sign * math.inf, 0))[0])
    columns = [
        "run",
        *swept[:_SWEPT],
        "status",
        "reason",
        "step",
        *(f"best {name}" for name in metrics),
        "time",
        "attempts",
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
            # Beside the state: at the end a narrow window would not show it.
            reason_of(view, record.problems),
            "" if view.step is None else f"{view.step:,}",
            *best,
            duration(record.summary.get("wall_time_s")),
            str(len(record.attempts)),
        ])  # fmt: skip
    right = ["step", "time", "attempts", *(f"best {name}" for name in metrics)]
    title = f"Runs, the best {metrics[0]} first" if metrics else "Runs"
    return table(
        columns, rows, right=right, title=title, runs=order, marked=[0] if metrics else [], choose=True, filter=True
    )


def differing(records: Sequence[RunRecord], sweep: Sequence[SweepJob]) -> list[str]:
    """The keys of the config that differ between the runs; those that a sweep names come first."""
    named = list(dict.fromkeys(key for job in sweep for key in job.swept))
    keys = dict.fromkeys(key for record in records for key in record.config if key not in OF_ONE_RUN)
    different = [key for key in keys if len({record.config.get(key) for record in records}) > 1]
    return sorted(different, key=lambda key: named.index(key) if key in named else len(named))


ALL_RUNS = "all runs"


def grouping_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose value some of the runs share, and which differ between others."""
    keys = dict.fromkeys(key for config in configs for key in config if key not in OF_ONE_RUN)
    return [key for key in keys if 1 < len({config.get(key) for config in configs}) < len(configs)]


def groupings(configs: Sequence[Mapping[str, str]], keys: Sequence[str]) -> dict[str, list[str]]:
    """What the mean of curves can be taken over: a key, or `ALL_RUNS` -> its value in each run. Empty for one run."""
    if len(configs) < 2:
        return {}
    return {ALL_RUNS: [""] * len(configs), **{key: [config.get(key, NOT_SET) for config in configs] for key in keys}}
