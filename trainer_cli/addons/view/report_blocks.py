"""The parts of a report as plain values: facts, tables and charts, which `report_page.js` shows.

A block is a mapping whose `kind` is `banner`, `facts`, `table`, `text`, `media`, `chart` or `timeline`, or one of
`report_sweep`.
Its texts are never HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from trainer_cli.addons.view.curves import Array, reduce
from trainer_cli.environment import unix
from trainer_cli.runs import Columns, RunRecord, SavedCheckpoint, Series
from trainer_cli.terminal import format_clock

Block = dict[str, Any]
_DIGITS = 6


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[str] = (),
    extra: Iterable[str] = (),
    best: Mapping[str, str] | None = None,
    **more: Any,
) -> Block:
    """A table without the columns that are empty.

    Args:
        right: columns that are flush right.
        extra: columns that are shown only once a reader chooses them.
        best: columns of a metric -> `min` or `max`, whose first click sorts the best value first.
        more: `title`; `fold`, if it is shown only after a click; `marked`, indices of rows to stress; `runs`, for each
            row the index of its run; `filter`, whether rows can be searched; `choose`, whether runs and columns can be
            chosen; `progress`, for each row the share of its steps that a running run has made, else None.
    """
    filled = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    heads = []
    for name in (columns[index] for index in filled):
        flags = {"right": name in right, "extra": name in extra, "best": (best or {}).get(name)}
        heads.append({"name": name, **{flag: value for flag, value in flags.items() if value}})
    return {
        "kind": "table",
        "columns": heads,
        "rows": [[row[index] for index in filled] for row in rows],
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
    """The x values of a curve at these rows: steps, epochs, and seconds since the run began."""
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
    """Sorts lanes of kept checkpoints before those of removed ones."""
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
