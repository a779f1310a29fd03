"""What `train serve` answers: the table of the runs below a folder, the page of some of them, and curves.

Nothing is read between two requests, except that all runs are read once after the first one. Nothing is written.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_cli.addons.view.forks import beside_parents, forks_among
from trainer_cli.addons.view.report import look_of, short_names
from trainer_cli.addons.view.report_blocks import Block
from trainer_cli.addons.view.report_runs import RunRow, differing, grouping_keys, groupings, runs_table
from trainer_cli.addons.view.report_sections import metric_curve, metric_series, role_of, sections
from trainer_cli.files import GrowingFile
from trainer_cli.runs import MessageFilter, Run, RunRecord, RunsBelow, RunView
from trainer_cli.sweep_file import find_jobs, show_paused

_BUCKETS = 2000
_FEWEST_BUCKETS = 100
_LOG_LINES = 200
_LOG_LINES_READ = 1000
"""More than are shown, because messages of the level debug are hidden; not all, because a log may be long."""


class ServedRuns:
    """The runs below a folder. Several threads may call it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._below = RunsBelow(root)
        self._numbers: dict[Run, int] = {}
        """Of each run its number in requests, which stays the same while the server runs."""
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reading: threading.Thread | None = None

    def overview(self, numbers: Collection[int] = ()) -> Block:
        """The table of all runs, with the keys in which those with the numbers differ; without any, in which all do."""
        now = time.time()
        with self._lock:
            number_of = self._find()
            views = [(run, view) for run in number_of if (view := run.look(now)) is not None]
            views.sort(key=lambda item: item[1].position)
            # A fork stands beside the run it began from.
            views = [views[index] for index in beside_parents([run.summary for run, _ in views])]
            names = [_name(run.path, self.root) for run, _ in views]
            compared = [run for run, _ in views if number_of[run] in numbers] or [run for run, _ in views]
            jobs = find_jobs(run.path for run, _ in views)
            views = [(run, show_paused(view, jobs)) for run, view in views]
            keys = differing([run.config for run in compared], [*jobs.values()])
            rows = [_row(number_of[run], run, view, name) for (run, view), name in zip(views, names, strict=True)]
            metrics = list(dict.fromkeys(name for row in rows for name in row.best))
            block = runs_table(rows, metrics, keys, [*jobs.values()])
            # A sweep decides about a run after it has ended.
            versions = {str(number_of[run]): f"{run.version} {view.state} {view.reason}" for run, view in views}
            self._read_ahead()
        return {
            "title": str(self.root),
            "runs": {str(number_of[run]): name for (run, _), name in zip(views, names, strict=True)},
            "versions": versions,
            "table": block,
        }

    def page(self, numbers: Sequence[int]) -> Block:
        """The sections of a report of these runs. Curves have names, but no points: `curves` has them."""
        now = time.time()
        with self._lock:
            chosen = self._choose(numbers)
            ids, records = list(chosen), [run.record(now) for run in chosen.values()]
            jobs = find_jobs(record.path for record in records)
            records = [dataclasses.replace(record, view=show_paused(record.view, jobs)) for record in records]
            names = short_names(records, jobs)
            looks = {str(number): look_of(record) for number, record in zip(ids, records, strict=True)}
            # Of all runs: a choice of runs with the same value keeps them together.
            keys = grouping_keys([run.config for run in self._numbers])
            content = sections(records, names, {}, [*jobs.values()], draw=_unfilled)
            if len(chosen) == 1 and (log := end_of_log(chosen[ids[0]])):
                content.append({"title": "Log", "blocks": [log]})
        if len(chosen) > 1:
            content = _curves_first(content)
        for block in (block for section in content for block in section["blocks"]):
            _renumber(block, ids)
        runs = {str(number): name for number, name in zip(ids, names, strict=True)}
        values = groupings([record.config for record in records], keys)
        groups = {key: dict(zip(runs, texts, strict=True)) for key, texts in values.items()}
        forks = forks_among([record.summary for record in records])
        return {
            "runs": runs,
            "looks": looks,
            "groups": groups,
            "forks": {ids[at]: {**fork._asdict(), "parent": ids[fork.parent]} for at, fork in forks.items()},
            "sections": content,
            "many": len(chosen) > 1,
        }

    def curves(self, numbers: Sequence[int], metrics: Sequence[str], axis: str) -> str:
        """The curves of metrics of some runs as a JSON list, over steps and the axis: `step`, `epoch` or `time`."""
        now = time.time()
        with self._lock:
            records = {number: run.record(now) for number, run in self._choose(numbers).items()}
            buckets = max(_FEWEST_BUCKETS, _BUCKETS // max(1, len(records)))
            texts = [
                _curve(number, record, name, axis, buckets) for name in metrics for number, record in records.items()
            ]
        return f"[{','.join(text for text in texts if text is not None)}]"

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._closed.set()
        if self._reading is not None:
            self._reading.join(5)

    def _find(self) -> Mapping[Run, int]:
        """The runs that exist now, with their numbers."""
        runs = self._below.find()
        self._numbers = {run: self._numbers[run] if run in self._numbers else next(self._count) for run in runs}
        return self._numbers

    def _choose(self, numbers: Sequence[int]) -> dict[int, Run]:
        """Number -> run, in the order of the request; numbers of runs that are gone are left out."""
        # By number: no part of a request becomes a path.
        by_number = {number: run for run, number in self._numbers.items()}
        return {number: by_number[number] for number in numbers if number in by_number}

    def _read_ahead(self) -> None:
        """Once, after the first request: read all runs, so that a choice of many is answered at once."""
        if self._reading is None:
            self._reading = threading.Thread(target=self._read_all, name="read-runs", daemon=True)
            self._reading.start()

    def _read_all(self) -> None:
        """Read every run, in the thread that reads ahead."""
        with self._lock:
            runs = list(self._numbers)
        for run in runs:
            if self._closed.is_set():
                return
            with self._lock:
                run.record(time.time())
            # Other threads wait for the lock, which is not fair.
            time.sleep(0.001)


def _name(path: Path, root: Path) -> str:
    """The path below the root of the server; the name of the root's folder if that is the run."""
    return path.resolve().name if path == root else os.path.relpath(path, root)


def _row(number: int, run: Run, view: RunView, name: str) -> RunRow:
    """The row of a run in the table; best metrics as read last, or those of its summary if nothing was read yet."""
    record = run.last_record
    if record is not None:
        best, modes = record.best, record.modes
    else:
        written = run.summary.get("best_metrics") or {}
        entries = {str(metric): entry for metric, entry in written.items() if _is_best(entry)}
        best = {metric: (float(entry["value"]), entry["step"]) for metric, entry in entries.items()}
        modes = {metric: str(entry.get("mode")) for metric, entry in entries.items()}
    problems = [view.problem] if record is None else record.problems
    return RunRow(number, name, view, run.config, run.summary, best, modes, problems, run.notes)


def _curve(number: int, record: RunRecord, name: str, axis: str, buckets: int) -> str | None:
    """A curve as JSON, over the steps and one more axis; None if the run has no such metric."""
    key = (name, axis, buckets)
    if key not in record.curves:
        block = metric_curve(number, record, name, buckets=buckets)
        if block is None:
            return None
        for fields in (block, block.get("mean", {})):
            for other in {"epoch", "time"} - {axis}:
                fields.pop(other, None)
        record.curves[key] = to_json(block)
    return record.curves[key]


def end_of_log(run: Run) -> Block | None:
    """The last lines of a run's log, of the messages that `train tail` shows; None without any."""
    try:
        lines = GrowingFile(run.directory.log_file, _LOG_LINES_READ).read().lines
    except OSError:
        return None
    messages = MessageFilter(shows_debug=run.config.get("logging.level") == "debug")
    text = "\n".join([line.text for line in messages.shown(lines)][-_LOG_LINES:])
    return {"kind": "text", "title": "The end of train.log", "text": text, "end": True} if text else None


def to_json(value: Any) -> str:
    """Compact JSON; None stands for numbers that are not finite."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _is_best(entry: object) -> bool:
    """Whether an entry of a summary has a value and its step."""
    return (
        isinstance(entry, dict) and isinstance(entry.get("value"), int | float) and isinstance(entry.get("step"), int)
    )


def _unfilled(run: int, record: RunRecord, name: str) -> Block | None:
    """A curve without its points, which the page asks for once the chart is in view."""
    if metric_series(record, name) is None:
        return None
    return {"run": run, "name": name, "group": name, "role": role_of(name)}


def _curves_first(content: Sequence[Block]) -> list[Block]:
    """The sections without the table of the chosen runs, which stands above them, and what compares the runs after the
    curves."""
    summary = [block for block in content[0]["blocks"] if not block.get("choose")] if content else []
    compared = [{"title": "Parameters", "blocks": summary}] if summary else []
    return [*content[1:2], *compared, *content[2:]]


def _renumber(block: Block, numbers: Sequence[int]) -> None:
    """Replace indices of runs by the numbers under which the server knows them."""
    for item in (*block.get("curves", ()), *block.get("restarts", ())):
        item["run"] = numbers[item["run"]]
    if "runs" in block:
        block["runs"] = [numbers[run] for run in block["runs"]]
    # The table of all runs has the choice.
    block.pop("choose", None)
