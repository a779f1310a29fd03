"""Records as rows of a table for a terminal: columns keep their width, and the best value so far is coloured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from trainer_cli.core.metric_modes import Mode, mode_of
from trainer_cli.core.schema import TRAIN_PREFIX
from trainer_cli.loggers.base import RATE_KEY, Record, RunFacts
from trainer_cli.loggers.marks import is_validation_metric
from trainer_cli.terminal import cell_width, cut_begin, format_clock, format_count, painted

LOSS = f"{TRAIN_PREFIX}loss"
_NUMBER_WIDTH = 9
"""Letters of most numbers with four digits, such as 1.234e-05."""
_LONGEST_NAME = 40
"""Columns of a name; a longer one is cut at its begin."""
_TIME_WIDTH = 7
_MOST_LINES = 3
"""Lines of a row; the metrics for which they have no room are left out."""
_ROWS_PER_HEADER = 25
_INDENT = 2
"""Columns by which the further lines of a row are indented."""


class BestValues:
    """Best value so far of each validation metric whose mode is known.

    On a resume the records of earlier attempts count, too.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._best: dict[str, float] = {}
        self._has_earlier = facts.start_step > 0 and facts.ranges is not None

    def update(self, metrics: Mapping[str, float]) -> set[str]:
        """Count a record, and return the names of the metrics that are as good as the best so far."""
        values = {name: value for name, value in metrics.items() if is_validation_metric(name) and math.isfinite(value)}
        if values and self._has_earlier:
            # Only now: the logger that knows them may be started after this one.
            self._has_earlier = False
            self._add_earlier()
        best = {name for name, value in values.items() if self._is_best(name, value)}
        self._best.update({name: values[name] for name in best})
        return best

    def _add_earlier(self) -> None:
        assert self._facts.ranges is not None
        for name, values in self._facts.ranges().items():
            value = values.most if self._mode(name) is Mode.max else values.least
            if value is not None:
                self._best[name] = value

    def _is_best(self, name: str, value: float) -> bool:
        mode = self._mode(name)
        if mode is None:
            return False
        best = self._best.get(name)
        return best is None or (value >= best if mode is Mode.max else value <= best)

    def _mode(self, name: str) -> Mode | None:
        keep_best = self._facts.keep_best
        return mode_of(name, keep_best.metric, keep_best.mode) if keep_best is not None else mode_of(name, None, None)


class MetricTable:
    """Formats records as rows: step, epoch, training loss, metrics of evaluations, other metrics, rate, time.

    The header is repeated when a column is new or wider, and after every 25 rows. A table that is wider than the
    terminal is folded between two columns into at most three lines.
    """

    def __init__(self, facts: RunFacts, stream: TextIO) -> None:
        self._facts, self._stream = facts, stream
        total = facts.total_steps
        self._widths = {"step": 7 if total is None else max(4, len(f"{total:,}")), "epoch": 5}
        self._metrics: list[str] = []
        self._rate_name = ""
        self._header_of: tuple[object, ...] = ()
        self._rows = 0
        self._gap = 2

    def lines(
        self, record: Record, rate: str, width: int, *, best: Iterable[str] = (), loss: float | None = None
    ) -> list[str]:
        """The lines of a record, with those of the header if it is due.

        Args:
            rate: a number and its unit, such as `1,234 samples/s`; empty if it is unknown.
            width: columns of the terminal that may be used.
            best: names of metrics whose value is the best so far.
            loss: the training loss since the last log, shown dim if the record has none.
        """
        number, _, unit = rate.partition(" ")
        self._rate_name = self._rate_name or unit
        self._add_metrics(record.metrics)
        cells = {"step": f"{record.step:,}", "epoch": f"{record.epoch:.2f}"}
        values = record.metrics if loss is None else {LOSS: loss, **record.metrics}
        cells |= {name: f"{values[name]:.4g}" for name in self._metrics if name in values}
        cells |= {self._rate_name: number, "time": format_clock(record.time - self._facts.start_time)}
        last = [*filter(None, [self._rate_name]), "time"]
        columns = ["step", "epoch", *self._metrics, *last]
        for name in columns:
            least = self._widths.get(name, _TIME_WIDTH if name == "time" else _NUMBER_WIDTH)
            # A long name is cut, so that it takes no room from the others.
            longest = min(cell_width(name), _LONGEST_NAME, width - _INDENT)
            self._widths[name] = max(least, longest, len(cells.get(name, "")))
        wide, narrow = (fold(columns, self._widths, width, gap, keep_last=len(last)) for gap in (2, 1))
        # Columns are closer only where that saves a line or shows more of them.
        self._gap = 1 if (narrow[1], len(narrow[0])) < (wide[1], len(wide[0])) else 2
        rows, hidden = narrow if self._gap == 1 else wide
        shown = []
        if self._header_of != (header_of := (rows, dict(self._widths))) or self._rows == _ROWS_PER_HEADER:
            self._header_of, self._rows = header_of, 0
            shown = self._header(rows, hidden)
        self._rows += 1
        colours = dict.fromkeys(best, "green") | ({} if LOSS in record.metrics else {LOSS: "dim"})
        colours |= {name: "red" for name, value in record.metrics.items() if not math.isfinite(value)}
        for index, row in enumerate(rows):
            # A line without a value, such as that of metrics of an evaluation, is left out.
            if index == 0 or any(cells.get(name) for name in row):
                shown.append(self._line(row, cells, colours, indent=index > 0))
        return shown

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        new = [name for name in (LOSS, *metrics) if name not in self._metrics and name != RATE_KEY]
        if new:
            names = list(dict.fromkeys([*self._metrics, *new]))
            # The sort is stable: metrics of a kind stay in the order in which they appeared.
            self._metrics = sorted(names, key=lambda name: (name != LOSS, name.startswith(TRAIN_PREFIX)))

    def _header(self, rows: Sequence[Sequence[str]], hidden: int) -> list[str]:
        # Names of metrics differ at their ends.
        names = {name: cut_begin(name, self._widths[name]) for row in rows for name in row}
        lines = [self._line(row, names, {}, indent=index > 0) for index, row in enumerate(rows)]
        if hidden:
            lines.append(f"({format_count(hidden, 'more metric')} {'is' if hidden == 1 else 'are'} in metrics.jsonl)")
        return [painted(line, "dim", self._stream) for line in lines]

    def _line(self, row: Sequence[str], cells: Mapping[str, str], colours: Mapping[str, str], *, indent: bool) -> str:
        parts = [" " * _INDENT] if indent else []
        gap = ""
        for name in row:
            text = cells.get(name, "")
            padding = " " * (self._widths[name] - cell_width(text))
            parts.append(f"{gap}{padding}{painted(text, colours[name], self._stream) if name in colours else text}")
            gap = " " * self._gap
        return "".join(parts).rstrip()


def fold(
    columns: Sequence[str], widths: Mapping[str, int], width: int, gap: int, *, keep_last: int = 0
) -> tuple[list[list[str]], int]:
    """Divide columns among `_MOST_LINES` lines of at most `width` letters.

    Args:
        keep_last: the columns at the end that are kept; those before them are left out if there is no room.

    Returns:
        The columns of each line, and the number of columns that are left out.
    """
    rows = _fold(columns, widths, width, gap)
    end, last = len(columns) - keep_last, columns[len(columns) - keep_last :]
    # At least those beyond the last line, but for room that the last columns may leave.
    hidden = max(len(columns) - sum(map(len, rows[:_MOST_LINES])) - keep_last, 0)
    while len(rows) > _MOST_LINES and hidden < end:
        hidden += 1
        rows = _fold([*columns[: end - hidden], *last], widths, width, gap)
    return rows[:_MOST_LINES], hidden


def _fold(columns: Sequence[str], widths: Mapping[str, int], width: int, gap: int) -> list[list[str]]:
    """Divide all columns among lines of at most `width` letters."""
    rows: list[list[str]] = [[]]
    used = 0
    for name in columns:
        needed = widths[name] + (gap if rows[-1] else 0)
        if rows[-1] and used + needed > width:
            rows.append([])
            used, needed = _INDENT, widths[name]
        rows[-1].append(name)
        used += needed
    return rows
