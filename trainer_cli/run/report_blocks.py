"""The parts of a report as plain values: facts, tables and charts, which `report_page.js` draws.

A block is a mapping whose `kind` is `facts`, `table`, `chart`, `timeline` or `parallel`. Its texts are never HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from trainer_cli.run.curves import Array, Columns, Series, reduce
from trainer_cli.run.run_record import RunRecord, SavedCheckpoint, unix

Block = dict[str, Any]
_DIGITS = 6
_LOG_RATIO = 30
"""From this ratio of the largest to the smallest on, positive values of a parameter have a logarithmic axis."""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[str] = (), **more: Any) -> Block:
    """A table; columns without any text are left out. Columns named in `right` are flush right.

    Args:
        more: `title`; `fold`, if it is shown only after a click; `marked`, indices of rows to stress; `runs`, for each
            row the index of its run; `filter`, whether rows can be searched.
    """
    shown = [at for at, _ in enumerate(columns) if any(row[at] for row in rows)]
    return {
        "kind": "table",
        "columns": [{"name": columns[at], "right": columns[at] in right} for at in shown],
        "rows": [[row[at] for at in shown] for row in rows],
        **more,
    }


def curve(
    run: int, record: RunRecord, name: str, series: Series, *, buckets: int, group: str | None = None, role: str = ""
) -> Block:
    """One line of a chart, over steps, epochs and seconds since the run began.

    Args:
        run: index of the run.
        group: curves of one group have one colour and dash; by default those of the same name.
        role: `train`, which may be smoothed; `validate`, drawn with points; else neither.
    """
    columns, rows = record.columns, series.rows
    reduced = reduce(columns.step[rows], series.values, buckets)
    drawn = rows[reduced.indices]
    bad = np.flatnonzero(~np.isfinite(series.values))
    found = {
        "run": run,
        "name": name,
        "group": group or name,
        "role": role,
        **_axes(columns, drawn, record.began),
        "y": rounded(series.values[reduced.indices]),
    }
    if reduced.means is not None:
        found["mean"] = {
            **_axes(columns, rows[reduced.means.indices], record.began),
            "y": rounded(reduced.means.values),
        }
    if len(bad):
        found["bad"] = [len(bad), int(columns.step[rows[bad[0]]])]
    return found


def _axes(columns: Columns, rows: Array, began: float) -> Block:
    seconds = columns.time[rows] - began
    return {"step": columns.step[rows].tolist(), "epoch": rounded(columns.epoch[rows]), "time": rounded(seconds, 7)}


def points(run: int, name: str, steps: Sequence[int], values: Sequence[float], group: str) -> Block:
    """A line through checkpoints, which have no epoch and no time."""
    facts = {"run": run, "name": name, "group": group, "role": "validate"}
    return {**facts, "step": list(steps), "epoch": None, "time": None, "y": rounded(np.array(values, float))}


def rounded(values: Array, digits: int = _DIGITS) -> list[float | None]:
    """Numbers as JSON can hold them; None for what is not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


def restarts(run: int, record: RunRecord) -> Iterator[Block]:
    """Where the attempts after the first one began."""
    for attempt in record.attempts[1:]:
        step, at = attempt.get("start_step"), unix(attempt.get("started"))
        if isinstance(step, int) and at is not None:
            row = min(int(np.searchsorted(record.columns.step, step)), len(record.columns.step) - 1)
            epoch = float(record.columns.epoch[row]) if row >= 0 else 0.0
            text = f"attempt {attempt.get('attempt')}"
            yield {"run": run, "step": step, "epoch": epoch, "time": at - record.began, "text": text}


def timeline(records: Sequence[RunRecord], names: Sequence[str]) -> Block | None:
    """Every checkpoint at its step: its kind, its reason, and what became of it. None if there are none."""
    lanes: dict[str, None] = {}
    marks: list[Block] = []
    for run, record in enumerate(records):
        for one in record.checkpoints:
            life, fate = one.life, "kept" if one.on_disk else "removed"
            if life.step is None:
                continue
            lane = names[run] if len(records) > 1 else f"{life.kind or 'unknown'}, {fate}"
            lanes.setdefault(lane)
            text = [life.name, f"saved: {life.reason}" if life.reason else "", what_became(one)]
            marks.append({"lane": lane, "step": life.step, "kept": one.on_disk, "type": life.kind, "text": text})
    if not marks:
        return None
    order = list(lanes) if len(records) > 1 else sorted(lanes, key=_lane_order)
    return {"kind": "timeline", "title": "Checkpoints by step", "lanes": order, "marks": marks}


def _lane_order(lane: str) -> tuple[bool, str]:
    return lane.endswith("removed"), lane


def when_saved(record: RunRecord) -> dict[int, dict[str, float]]:
    """The validation metrics that the training measured at exactly the steps of its checkpoints."""
    saved = {one.life.step for one in record.checkpoints}
    found: dict[int, dict[str, float]] = {}
    for name, series in record.columns.metrics.items():
        if "/" in name and not name.startswith("train/"):
            for step, value in zip(record.columns.step[series.rows].tolist(), series.values.tolist(), strict=True):
                if step in saved:
                    found.setdefault(step, {})[name] = value
    return dict(sorted(found.items()))


def what_became(one: SavedCheckpoint) -> str:
    """Whether a checkpoint was kept or removed, and why."""
    if one.on_disk:
        return f"kept: {one.why_kept}" if one.why_kept else "on the disk"
    return f"removed: {one.life.removed_reason}" if one.life.removed_reason else "gone; it is not recorded why"


def parallel(
    names: Mapping[str, Sequence[str]], metrics: Mapping[str, Sequence[float]], modes: Mapping[str, str]
) -> Block:
    """Parallel coordinates of a sweep: an axis for each parameter and each metric, a line for each run.

    Args:
        names: parameter -> its value in each run, as text.
        metrics: metric -> its best value in each run, NaN if it has none. The first one colours the lines.
    """
    first, values = next(iter(metrics.items()))
    whole = [at for at, value in enumerate(values) if math.isfinite(value)]
    axes = [_axis(name, [texts[at] for at in whole]) for name, texts in names.items()]
    for name, numbers in metrics.items():
        axes.append({"label": f"best {name}", "values": rounded(np.array([numbers[at] for at in whole]))})
    colour = rounded(np.array([values[at] for at in whole]))
    title = f"Parameters and best metrics; coloured by {first}"
    return {"kind": "parallel", "title": title, "axes": axes, "colour": colour, "smaller": modes.get(first) == "min"}


def _axis(name: str, texts: Sequence[str]) -> Block:
    """An axis of numbers, with marks at its values if they are few; of positions, if they are texts."""
    try:
        numbers = [float(text) for text in texts]
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        known = list(dict.fromkeys(texts))
        return {"label": name, "values": [known.index(text) for text in texts], "ticks": dict(enumerate(known))}
    if min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_RATIO:
        numbers = [math.log10(number) for number in numbers]
    few = dict(zip(numbers, texts, strict=True))
    return {"label": name, "values": numbers, **({"ticks": few} if len(few) <= 8 else {})}


def number(value: float | None) -> str:
    """A metric with four digits; nothing for None."""
    return "" if value is None else f"{value:.4g}"


def clock_time(at: float | None) -> str:
    """Unix seconds as a date in UTC; nothing for None."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: object) -> str:
    """Seconds as people read them; nothing for what is no number."""
    if not isinstance(seconds, int | float):
        return ""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if not minutes:
        return f"{seconds:.1f} s"
    return f"{hours}:{minute:02}:{second:02} h" if hours else f"{minute}:{second:02} min"
