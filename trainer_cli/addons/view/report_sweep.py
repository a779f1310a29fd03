"""A sweep as plain values: parallel coordinates, a metric against a parameter, importance of parameters; what a search
has decided.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from trainer_cli.addons.view.curves import Array
from trainer_cli.addons.view.report_blocks import Block, number, table
from trainer_cli.files import read_rows
from trainer_cli.metric_names import Mode
from trainer_cli.runs import BestSettings, RunRecord, RunView
from trainer_cli.steps import Duration

_LOG_RATIO = 30
"""Ratio of the largest to the smallest positive value from which a parameter has a logarithmic axis."""
_FEWEST_RUNS = 3
_FEWEST_EXPLAINED = 8
"""Runs from which on a share that a parameter explains is more than chance."""
_MOST_METRICS = 4
_MOST_TICKS = 8
_DIGITS = 6
_WHY = "went on because"
NOT_SET = "(not set)"
_DIGIT_RUNS = re.compile(r"(\d+)")


def search_tables(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[Block]:
    """For each sweep that pauses runs: the metric of each run at the rungs, and why it went on or is paused."""
    modes = {metric: mode for record in records for metric, mode in record.modes.items()}
    for folder in dict.fromkeys(record.path.parent for record in records):
        rows: list[dict[str, Any]] = []
        with suppress(OSError):
            rows = read_rows(folder / "search.jsonl")
        if not rows or rows[0]["sweep.prune"] == "none":
            continue
        rungs, metric, trials = [*rows[0]["sweep.rungs"], "end"], "", defaultdict[str, dict[str, str]](dict)
        for row in rows[1:]:
            trial = trials[row["trial"]]
            trial[_WHY] = "; ".join(filter(None, [trial.get(_WHY), row.get("why")]))
            if row.get("loss") is not None:
                metric = row["metric"]
                sign = -1 if modes.get(metric) == Mode.max else 1
                trial[rungs[row["rung"]]] = number(sign * row["loss"])
        columns = [*rungs, _WHY]
        cells = []
        for name, record in zip(names, records, strict=True):
            if record.path.parent == folder:
                trial, view = trials[record.path.name], record.view
                values = [trial.get(column, "") for column in columns]
                cells.append([name, *values, view.state, view.reason if view.state == RunView.PAUSED else ""])
        # Those that came furthest first.
        cells.sort(key=lambda row: row[1:-3].count(""))
        title = f"What the search has decided by {metric}"
        yield table(["run", *columns, "state", "paused because"], cells, right=rungs, title=title)


def sweep_charts(records: Sequence[RunRecord], swept: Sequence[str]) -> Iterator[Block]:
    """The charts of runs that differ in the `swept` keys; none for fewer than three runs with a best value.

    Runs without a finite best value of the first metric, the one that ranks the runs, are left out.
    """
    metrics = rank_metrics(records)
    if not metrics or not swept or len(records) < _FEWEST_RUNS:
        return
    metrics = metrics[:_MOST_METRICS]
    ranking_metric = metrics[0]
    ranked = [
        run for run, record in enumerate(records) if math.isfinite(record.best.get(ranking_metric, (math.nan, 0))[0])
    ]
    if not ranked:
        return
    labels = short_keys(swept)
    parameters = {labels[key]: [records[run].config.get(key, NOT_SET) for run in ranked] for key in swept}
    values = {name: [records[run].best.get(name, (math.nan, 0))[0] for run in ranked] for name in metrics}
    complete = [name for name in metrics if all(map(math.isfinite, values[name]))]
    axes = [parameter_axis(name, texts) for name, texts in parameters.items()]
    axes += [{"label": f"best {name}", "values": _rounded(values[name]), "metric": True} for name in complete]
    # Each with a list of its own: a server renumbers the runs of a block in place.
    yield {"kind": "parallel", "title": "Parameters and best metrics", "axes": axes, "runs": list(ranked)}
    yield {"kind": "scatter", "title": "Metric against parameter", "axes": axes, "runs": list(ranked)}
    if len(ranked) < max(_FEWEST_EXPLAINED, len(parameters) + 1):
        return
    if scores := importance(parameters, values[ranking_metric]):
        bars = [[name, share, f"{share:.0%}"] for name, share in scores.items()]
        yield {
            "kind": "bars",
            "title": f"Share of the differences in {ranking_metric} that a parameter explains",
            "bars": bars,
        }


def parameter_axis(label: str, texts: Sequence[str]) -> Block:
    """An axis of numbers or durations at their values; of other texts at their positions, sorted as people count.

    `ticks` maps values to texts where they are few; `log` says that the values are decimal logarithms.
    """
    numbers = _numbers(texts)
    if numbers is None:
        distinct = sorted(set(texts), key=_natural)
        positions = {text: position for position, text in enumerate(distinct)}
        ticks = {str(position): text for text, position in positions.items()}
        return {"label": label, "values": [positions[text] for text in texts], "ticks": ticks}
    is_log = min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_RATIO
    # Learning rates from 1e-5 to 1e-1 would be one point on a linear axis.
    values = _rounded([math.log10(number) for number in numbers] if is_log else numbers)
    few = {_key(value): text for value, text in zip(values, texts, strict=True)}
    # Durations have texts at all their values: a plain number would hide their unit.
    has_ticks = len(few) <= _MOST_TICKS or _floats(texts) is None
    return {"label": label, "values": values, "log": is_log, **({"ticks": few} if has_ticks else {})}


def _key(value: float) -> str:
    """A number as JavaScript writes it."""
    return str(int(value)) if value == int(value) else repr(value)


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """The texts as finite numbers, or as durations of one unit; None if they are neither."""
    plain = _floats(texts)
    if plain is not None:
        return plain
    try:
        durations = [Duration.parse(int(text) if text.isdecimal() else text) for text in texts]
    except ValueError:
        return None
    return [float(duration.value) for duration in durations] if len({d.unit for d in durations}) == 1 else None


def _floats(texts: Sequence[str]) -> list[float] | None:
    """The texts as finite numbers; None if one is not."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def _natural(text: str) -> tuple[Any, ...]:
    """Sorts numbers by value, then durations by unit and value, then texts by the numbers within; `null` is last."""
    if text in ("null", NOT_SET):
        return (3, text)
    number = _floats([text])
    if number is not None:
        return (0, number[0])
    try:
        duration = Duration.parse(text)
    except ValueError:
        pieces = _DIGIT_RUNS.split(text)
        return (2, [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces])
    return (1, duration.unit, duration.value)


def importance(parameters: Mapping[str, Sequence[str]], values: Sequence[float]) -> dict[str, float]:
    """The share of the variance of the metric's ranks that each parameter explains, largest first.

    For a parameter with repeated values it is epsilon squared, the correlation ratio corrected for the number of
    values; for one whose values all differ the squared rank correlation (Spearman). Parameters are looked at one by
    one: interactions are not seen. Empty if the metric is the same in all runs.
    """
    ranks = _ranks(values)
    total = float(((ranks - ranks.mean()) ** 2).sum())
    if total == 0:
        return {}
    scores: dict[str, float] = {}
    for name, texts in parameters.items():
        # The ranks of the runs with each value of the parameter.
        groups = {value: ranks[[text == value for text in texts]] for value in dict.fromkeys(texts)}
        if len(groups) < 2:
            continue
        numbers = _numbers(texts)
        if len(groups) == len(texts):
            # All differ: squared Spearman correlation, which needs an order.
            if numbers is not None:
                scores[name] = float(np.corrcoef(_ranks(numbers), ranks)[0, 1] ** 2)
            continue
        within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups.values())
        # What chance alone explains with so many values is taken off.
        noise = within / (len(texts) - len(groups))
        scores[name] = max(0.0, (total - within - (len(groups) - 1) * noise) / total)
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def _ranks(values: Sequence[float]) -> Array:
    """Ranks from 0; equal values share their mean rank."""
    _, places, counts = np.unique(np.array(values, float), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: Array = (ends - counts + ends - 1) / 2
    return means[places]


def _rounded(values: Sequence[float]) -> list[float]:
    """The numbers with as many digits as a chart needs."""
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def rank_metrics(records: Sequence[RunRecord]) -> list[str]:
    """The metrics of which a run has a best value; the one that decides which run is best comes first."""
    metrics = list(dict.fromkeys(name for record in records for name in record.best))
    settings = BestSettings.common(record.settings for record in records)
    rule = settings.rule(metrics)
    # Those of test sets last, where no loss decides.
    return sorted(metrics, key=lambda name: (rule is None or name != rule.metric, not settings.may_decide(name)))


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """The last part of each dotted key, or the whole key where two have the same last part.

    A class is called as its component: `optimizer._target_` becomes `optimizer`.
    """
    ends = {key: key.removesuffix("._target_").rpartition(".")[2] for key in keys}
    counts = Counter(ends.values())
    return {key: end if counts[end] == 1 else key for key, end in ends.items()}
