"""The summary of a report: the facts of a single run, the table of runs, and the config keys in which runs differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer_cli.addons.view.forks import forks_among, recorded_fork
from trainer_cli.addons.view.report_blocks import Block, clock_time, duration, number, table
from trainer_cli.addons.view.report_sweep import NOT_SET, rank_metrics, search_tables, short_keys, sweep_charts
from trainer_cli.bounds import is_count
from trainer_cli.environment import unix
from trainer_cli.errors import first_sentence
from trainer_cli.goodput import Activity, Seconds, read_seconds
from trainer_cli.metric_names import Mode
from trainer_cli.runs import RunRecord, RunView
from trainer_cli.steps import RunStatus
from trainer_cli.sweep_file import SweepJob
from trainer_cli.terminal import format_clock, format_rate

_MOST_SWEPT = 6
"""Largest number of parameters in parallel coordinates."""
_SHOWN_KEYS, _MOST_KEYS = 8, 40
"""Config keys that the table of runs shows, and that it holds to be chosen."""
_MOST_METRICS = 6
_COLUMNS = (
    "run", "state", "reason", "step", "steps/s", "left", "loss",
    "time", "began (UTC)", "attempts", "fork of", "tags", "notes",
)  # fmt: skip
OF_ONE_RUN = ("name", "run_dir", "notes", "tags", "resume", "logging.console", "logging.level", "loop.hard_stop")
"""Keys that do not count as differences between runs."""
_RATE = re.compile(r"(^|[._])(lr|learning_rate)$")
_ENDED_BADLY = (RunStatus.failed, RunStatus.killed, RunStatus.interrupted, RunView.UNREADABLE)


def summary(
    records: Sequence[RunRecord], names: Sequence[str], swept: Sequence[str], sweep: Sequence[SweepJob]
) -> Iterator[Block]:
    """Facts of a single run; else a table of the runs, the best first, and parallel coordinates of the `swept` keys."""
    if len(records) == 1:
        yield from _of_one(records[0])
    elif records:
        yield _ranked(records, names, swept, sweep)
    if len(records) != 1 and (without_run := [job for job in sweep if not job.run_dir.is_dir()]):
        keys = list(dict.fromkeys(key for job in without_run for key in job.swept))
        rows = [[*(job.swept.get(key, "") for key in keys), job.status, job.reason] for job in without_run]
        yield table([*keys, "state", "reason"], rows, title="Jobs of the sweep without a run")
    yield from search_tables(records, names)
    yield from sweep_charts(records, swept[:_MOST_SWEPT])


def _of_one(record: RunRecord) -> Iterator[Block]:
    """A banner if it ended badly, its facts, and its notes."""
    view = record.view
    if view.state in _ENDED_BADLY:
        sentence = first_sentence(view.reason)
        text = f"{view.state}: {sentence}"
        yield {"kind": "banner", "state": view.state, "text": text, "more": view.reason[len(sentence) :].strip()}
    yield {"kind": "facts", "items": list(_facts(record))}
    if record.notes:
        yield {"kind": "text", "title": "Notes", "text": record.notes}


def _facts(record: RunRecord) -> Iterator[tuple[str, str] | tuple[str, str, float]]:
    """Name and text of each fact that is known of a run; the step of a running one with the share that is done."""
    view, summary, environment = record.view, record.summary, record.environment
    # The banner has the reason of a bad end.
    reason = "" if view.state in _ENDED_BADLY else view.reason
    yield "state", f"{view.state}: {reason}" if reason else view.state
    if record.problems:
        yield "damage", "; ".join(record.problems)
    if (share := share_done(view)) is not None:
        yield "step", _progress(view), share
    elif view.step is not None:
        yield "step", _progress(view)
    if (left_s := _left_s(view)) is not None:
        yield "left", duration(left_s)
    if view.steps_per_s is not None:
        yield "speed", f"{format_rate(view.steps_per_s)} steps/s"
    if average := summary.get("average"):
        yield "evaluated", f"the average of {average}, not the trained weights"
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
    fork = recorded_fork(summary)
    if is_count(fork.get("step")):
        yield "began with", f"{record.config.get('ckpt')}, step {fork['step']:,}"
    tags, notes = tags_and_notes(record.config)
    yield from ((name, text) for name, text in (("tags", tags), ("notes", notes)) if text)
    yield "directory", str(record.path)


def _shares(seconds: Seconds) -> str:
    """Each activity with its share of the time, largest first; that of the kept training is the goodput."""
    total_s = sum(seconds.values())
    shares = {activity: amount / total_s for activity, amount in seconds.items() if amount > 0}
    largest_first = sorted(shares, key=lambda activity: -shares[activity])
    notes = {str(Activity.training): " (goodput)"}
    return ", ".join(f"{activity} {shares[activity]:.1%}{notes.get(activity, '')}" for activity in largest_first)


class RunRow(NamedTuple):
    """A run in the table of runs."""

    run: int
    """Its index, or the number under which a server knows it."""
    name: str
    view: RunView
    config: Mapping[str, str]
    summary: Mapping[str, Any]
    best: Mapping[str, tuple[float, int]]
    """Metric -> (best value, its step)."""
    modes: Mapping[str, str]
    """Metric -> `min` or `max`."""
    problems: Sequence[str]
    """What of it cannot be read."""
    notes: str
    """Its notes.md."""


def runs_table(
    rows: Sequence[RunRow], metrics: Sequence[str], keys: Sequence[str], sweep: Sequence[SweepJob], **more: Any
) -> Block:
    """A row for each run: state, what differs, progress and best metrics.

    Args:
        keys: those of the config in which runs differ, as `differing` returns them.
        sweep: jobs whose swept keys come before the metrics, as rates do; the others come after.
        more: `title` and `marked`, as in `table`.
    """
    metrics, keys = metrics[:_MOST_METRICS], keys[:_MOST_KEYS]
    labels = {key: key if label in _COLUMNS else label for key, label in short_keys(keys).items()}
    keys_before = [key for key in keys if _is_of_interest(key, sweep)]
    keys_after = [key for key in keys if key not in keys_before]
    best = [f"best {name}" for name in metrics]
    # The reason beside the state: at the end a narrow window would not show it.
    columns = [
        *_COLUMNS[:3], *(labels[key] for key in keys_before), *_COLUMNS[3:7], *best,
        *(labels[key] for key in keys_after), *_COLUMNS[7:],
    ]  # fmt: skip
    forks = forks_among([row.summary for row in rows])
    parents = {index: f"{rows[fork.parent].name} at step {fork.step:,}" for index, fork in forks.items()}
    cells = [
        [
            row.name,
            row.view.state,
            reason_of(row.view, row.problems),
            *(row.config.get(key, "") for key in keys_before),
            _progress(row.view),
            "" if row.view.steps_per_s is None else format_rate(row.view.steps_per_s),
            "" if (left_s := _left_s(row.view)) is None else format_clock(left_s),
            number(row.view.loss),
            *(_best(row, metric) for metric in metrics),
            *(row.config.get(key, "") for key in keys_after),
            duration(row.summary.get("wall_time_s")),
            clock_time(_began(row.summary)),
            str(len(row.summary.get("attempts") or ())),
            parents.get(index, ""),
            tags_and_notes(row.config)[0],
            row.notes.partition("\n")[0].lstrip("# ") or tags_and_notes(row.config)[1],
        ]
        for index, row in enumerate(rows)
    ]  # fmt: skip
    modes = {f"best {name}": mode for row in reversed(rows) for name, mode in row.modes.items() if name in metrics}
    return table(
        columns,
        cells,
        right=["step", "steps/s", "left", "loss", "time", "attempts", *best],
        extra=[*(labels[key] for key in keys[_SHOWN_KEYS:]), "attempts"],
        best={"loss": Mode.min.value, **modes},
        runs=[row.run for row in rows],
        progress=[share_done(row.view) for row in rows],
        choose=True,
        filter=True,
        **more,
    )


def _ranked(
    records: Sequence[RunRecord], names: Sequence[str], keys: Sequence[str], sweep: Sequence[SweepJob]
) -> Block:
    """The table of the runs of a report; the best comes first."""
    metrics = rank_metrics(records)
    ranked = list(enumerate(records))
    if metrics:
        sign = -1 if any(record.modes.get(metrics[0]) == Mode.max for record in records) else 1
        # A run without a value comes last: sign * sign * infinity.
        ranked.sort(key=lambda item: sign * item[1].best.get(metrics[0], (sign * math.inf, 0))[0])
    rows = [
        RunRow(
            run, names[run], record.view, record.config, record.summary, record.best, record.modes, record.problems,
            record.notes,
        )
        for run, record in ranked
    ]  # fmt: skip
    title = f"Runs, the best {metrics[0]} first" if metrics else "Runs"
    return runs_table(rows, metrics, keys, sweep, title=title, marked=[0] if metrics else [])


def _best(row: RunRow, metric: str) -> str:
    """The best value, and the step at which it was measured."""
    if metric not in row.best:
        return ""
    value, step = row.best[metric]
    return f"{number(value)} (step {step:,})"


def best_modes(metrics: Iterable[str], records: Sequence[RunRecord]) -> dict[str, str]:
    """Whether the smallest (`min`) or the largest (`max`) value of each metric is best, by the first config that
    decides it; without those of which it is unknown."""
    modes = {name: next(filter(None, (record.settings.mode_of(name) for record in records)), None) for name in metrics}
    return {name: mode.value for name, mode in modes.items() if mode is not None}


def share_done(view: RunView) -> float | None:
    """The share of its steps that a running run has made; None if it does not run, or its end is unknown."""
    if not view.is_running or view.step is None or not view.total_steps:
        return None
    return min(1.0, view.step / view.total_steps)


def _left_s(view: RunView) -> float | None:
    """Seconds until the end of a run that runs; None for one that has stopped to write."""
    return None if view.state == RunView.STALE else view.eta_s


def _progress(view: RunView) -> str:
    """The step, the last one and the share done, as far as they are known: `1,200 of 5,000 (24%)`."""
    if view.step is None:
        return ""
    share = share_done(view)
    total = "" if view.total_steps is None else f" of {view.total_steps:,}"
    return f"{view.step:,}{total}{'' if share is None else f' ({share:.0%})'}"


def _began(summary: Mapping[str, Any]) -> float | None:
    """When the first attempt of a run began, in Unix seconds; None if it has none."""
    attempts_of_run = summary.get("attempts")
    return unix(attempts_of_run[0].get("started")) if attempts_of_run else None


def reason_of(view: RunView, problems: Iterable[str]) -> str:
    """Why a run ended, unless it finished, and what of it cannot be read; of each the first sentence."""
    reasons = ["" if view.state == RunStatus.finished else view.reason, *problems]
    return "; ".join(filter(None, dict.fromkeys(map(first_sentence, reasons))))


def tags_and_notes(config: Mapping[str, str]) -> tuple[str, str]:
    """What describes a run: its tags, separated by commas, and its notes; empty if it has none."""
    notes = config.get("notes", "null")
    return config.get("tags", "").strip("[]"), "" if notes == "null" else notes


def _swept(sweep: Sequence[SweepJob]) -> list[str]:
    """The config keys that the jobs set, each once."""
    return list(dict.fromkeys(key for job in sweep for key in job.swept))


def _is_of_interest(key: str, sweep: Sequence[SweepJob]) -> bool:
    """Whether a config key is swept or a learning rate."""
    return key in _swept(sweep) or _RATE.search(key) is not None


def differing(configs: Sequence[Mapping[str, str]], sweep: Sequence[SweepJob]) -> list[str]:
    """The keys of the config that differ between runs: those that a sweep names, then learning rates, then the rest."""
    swept = _swept(sweep)
    keys = dict.fromkeys(key for config in configs for key in config if key not in OF_ONE_RUN)
    different = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    # Keys that no sweep names come after it; of these, False sorts learning rates first.
    return sorted(different, key=lambda key: (swept.index(key) if key in swept else len(swept), not _RATE.search(key)))


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
