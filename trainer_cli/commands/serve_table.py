"""The table of all runs of `train serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_cli.commands.report_blocks import (
    OF_ONE_RUN,
    Block,
    clock_time,
    duration,
    number,
    reason_of,
    table,
    tags_and_notes,
)
from trainer_cli.commands.serve_run import ServedRun
from trainer_cli.runs.environment import unix
from trainer_cli.runs.record import RunView, short_keys
from trainer_cli.runs.run_dir import attempts_of
from trainer_cli.terminal import format_clock

_MOST_KEYS = 8
_MOST_METRICS = 6


def differing_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose values differ between the runs, those with the fewest values first."""
    keys = dict.fromkeys(key for config in configs for key in config if key not in OF_ONE_RUN)
    counts = {key: len({config.get(key) for config in configs}) for key in keys}
    return sorted((key for key in keys if counts[key] > 1), key=counts.__getitem__)


def runs_table(views: Sequence[tuple[ServedRun, RunView]], names: Sequence[str], keys: Sequence[str]) -> Block:
    """A row for each run: state, progress, best metrics, tags, notes, and the values of some of the keys."""
    best = [_best(run) for run, _ in views]
    metrics = list(dict.fromkeys(name for values in best for name in values))[:_MOST_METRICS]
    keys = keys[:_MOST_KEYS]
    labels = short_keys(keys)
    columns = [
        "run", "tags", "state", "reason", "step", "loss", *(f"best {name}" for name in metrics), *labels.values(),
        "left", "time", "began (UTC)", "notes",
    ]  # fmt: skip
    rows = [
        [
            name,
            tags_and_notes(run.config)[0],
            view.state,
            # Beside the state: at the end a narrow window would not show it.
            reason_of(view, [view.problem] if run.last_record is None else run.last_record.problems),
            _progress(view),
            number(view.loss),
            *(number(values[metric]) if metric in values else "" for metric in metrics),
            *(run.config.get(key, "") for key in keys),
            "" if view.eta_s is None else format_clock(view.eta_s),
            duration(run.summary.get("wall_time_s")),
            clock_time(_began(run.summary)),
            tags_and_notes(run.config)[1],
        ]
        for (run, view), name, values in zip(views, names, best, strict=True)
    ]
    right = ["step", "loss", *(f"best {name}" for name in metrics), "left", "time"]
    numbers = [run.number for run, _ in views]
    return table(columns, rows, right=right, runs=numbers, choose=True, filter=True)


def _progress(view: RunView) -> str:
    if view.step is None:
        return ""
    return f"{view.step:,}" if view.total_steps is None else f"{view.step:,} of {view.total_steps:,}"


def _best(run: ServedRun) -> dict[str, float]:
    """The best value of each metric, as read last; before the records are read, those of the summary."""
    record = run.last_record
    if record is not None:
        return {name: value for name, (value, _) in record.best.items()}
    best = run.summary.get("best_metrics")
    values = (
        {name: entry.get("value") for name, entry in best.items() if isinstance(entry, dict)}
        if isinstance(best, dict)
        else {}
    )
    return {str(name): float(value) for name, value in values.items() if isinstance(value, int | float)}


def _began(summary: Mapping[str, Any]) -> float | None:
    attempts = attempts_of(summary)
    return unix(attempts[0].get("started")) if attempts else None
