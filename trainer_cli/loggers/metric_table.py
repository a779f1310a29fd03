"""Records as rows of a table for a terminal: columns keep their width, and the best value so far is coloured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TextIO

from trainer_cli.loggers.base import RATE_KEY, Record, RunFacts
from trainer_cli.loggers.marks import is_validation_metric, loader_of
from trainer_cli.metric_names import TRAIN_PREFIX, Mode, find_usual_mode
from trainer_cli.terminal import cell_width, cut_begin, cut_end, format_clock, is_utf8, painted

LOSS = f"{TRAIN_PREFIX}loss"
TRAIN = TRAIN_PREFIX.removesuffix("/")
STEP, EPOCH, TIME = "step", "epoch", "time"
_FIRST, _LAST = "/first", "/last"
"""Groups of the columns that are not metrics; the group of a metric does not begin with a slash."""
_WIDTH = 7
"""Letters of most numbers, see `format_metric`, and of a time."""
_LONGEST_NAME = 40
"""Width of a name, in columns; a longer one is cut at its beginning."""
_GAP = "  "
_ROWS_PER_HEADER = 25
_LEFT_OUT = "(columns that do not fit are left out; metrics.jsonl has all)"


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
            # Not in the constructor: the logger that has read them may be started after this one.
            self._has_earlier = False
            self._add_earlier()
        best = {name for name, value in values.items() if self._is_best(name, value)}
        self._best.update({name: values[name] for name in best})
        return best

    def _add_earlier(self) -> None:
        """Add the best values of earlier attempts."""
        assert self._facts.ranges is not None
        for name, values in self._facts.ranges().items():
            value = values.most if self._mode(name) is Mode.max else values.least
            if value is not None:
                self._best[name] = value

    def _is_best(self, name: str, value: float) -> bool:
        """Whether a finite value is the best so far of a metric whose mode is known."""
        mode = self._mode(name)
        if mode is None:
            return False
        best = self._best.get(name)
        return best is None or (value >= best if mode is Mode.max else value <= best)

    def _mode(self, name: str) -> Mode | None:
        """The mode of a metric: as configured for `keep_best`, else the usual one for its name; None: unknown."""
        keep_best = self._facts.keep_best
        if keep_best is not None and keep_best.metric == name and keep_best.mode != Mode.auto:
            return Mode(keep_best.mode)
        return find_usual_mode(name)


class MetricTable:
    """Formats records as rows of one line: step, epoch, the metrics of the training and of each validation set, rate,
    time. `choose_columns` says which are left out.

    The header has the names of the groups in one line and those of their metrics below. It is repeated when a column is
    new, wider or left out, and after every 25 rows.
    """

    def __init__(self, facts: RunFacts, stream: TextIO) -> None:
        self._facts, self._stream = facts, stream
        total = facts.total_steps
        self._widths = {STEP: _WIDTH if total is None else max(4, len(f"{total:,}")), EPOCH: 5}
        self._groups: dict[str, list[str]] = {TRAIN: [LOSS]}
        """Metrics of the training, of each validation set, and others by what precedes the slash in their names."""
        self._unit = ""
        self._decisive = None if facts.keep_best is None else facts.keep_best.metric
        """The metric that decides which checkpoint is best."""
        self._header_of: tuple[object, ...] = ()
        """Columns, widths and titles of the last header."""
        self._rows = 0
        """Rows since the last header."""
        self._says_left_out = True
        """Whether the next header says that columns are left out, if some are."""
        self._has_earlier = facts.start_step > 0
        """Whether the metrics that earlier attempts logged have no columns yet."""

    def lines(
        self, record: Record, rate: str, width: int, *, best: Iterable[str] = (), averaged: bool = False
    ) -> list[str]:
        """The line of a record, after those of the header if it is due.

        Args:
            rate: a number and its unit, such as `1,234 samples/s`; empty if it is unknown.
            width: columns of the terminal that may be used.
            best: names of metrics whose value is the best so far.
            averaged: whether the validation sets are evaluated with an average of the weights.
        """
        number, _, unit = rate.partition(" ")
        self._unit = self._unit or unit
        earlier: Iterable[str] = ()
        if self._has_earlier:
            # Not in the constructor: the logger that has read them may be started after this one.
            self._has_earlier = False
            earlier = () if self._facts.ranges is None else self._facts.ranges()
        for name in (*earlier, *record.metrics):
            group = loader_of(name, self._facts.loaders) if "/" in name else ""
            if name != RATE_KEY and name not in (members := self._groups.setdefault(group, [])):
                members.append(name)
        cells = {name: format_metric(value) for name, value in record.metrics.items() if name != RATE_KEY}
        cells |= {STEP: f"{record.step:,}", EPOCH: f"{record.epoch:.2f}", RATE_KEY: number}
        cells[TIME] = format_clock(record.time - self._facts.start_time)
        titles = {group: self._title(group, averaged=averaged) for group in self._groups}
        labels = {name: name.removeprefix(f"{group}/") for group, names in self._groups.items() for name in names}
        labels |= {STEP: STEP, EPOCH: EPOCH, TIME: TIME} | ({RATE_KEY: self._unit} if self._unit else {})
        for name, label in labels.items():
            # A long name is cut, so that it takes no room from the others.
            longest = min(cell_width(label), _LONGEST_NAME, width)
            self._widths[name] = max(self._widths.get(name, _WIDTH), longest, len(cells.get(name, "")))
        all_widths = {name: self._widths[name] for name in labels}
        columns = choose_columns(self._groups, all_widths, titles, width, self._decisive)
        widths = _widened(columns, self._widths, titles)
        header = []
        header_of = columns, widths, titles
        if self._header_of != header_of or self._rows == _ROWS_PER_HEADER:
            self._header_of, self._rows = header_of, 0
            header = self._header(columns, widths, titles, labels, width)
        self._rows += 1
        colours = dict.fromkeys(best, "green") | {
            name: "red" for name, value in record.metrics.items() if not math.isfinite(value)
        }
        return [*header, self._line(_flat(columns), cells, widths, colours)]

    def _title(self, group: str, *, averaged: bool) -> str:
        """The title of a group, for validation sets with `(average)` if they are evaluated with an average."""
        title = cut_begin(group, _LONGEST_NAME)
        return f"{title} (average)" if averaged and group in self._facts.loaders else title

    def _header(
        self,
        columns: Mapping[str, Sequence[str]],
        widths: Mapping[str, int],
        titles: Mapping[str, str],
        labels: Mapping[str, str],
        width: int,
    ) -> list[str]:
        """The lines of the header: titles of groups, each with a rule up to the end of its columns, and names below."""
        rule = "─" if is_utf8(self._stream) else "-"
        group_cells = []
        for group, names in columns.items():
            title = titles.get(group, "")
            room = _width_of(names, widths) - cell_width(title)
            group_cells.append(f"{title} {rule * (room - 1)}" if title and room > 1 else f"{title}{' ' * room}")
        # Cut at the beginning, because names of metrics differ at their ends.
        shown = {name: cut_begin(labels[name], widths[name]) for name in _flat(columns)}
        lines = [_GAP.join(group_cells).rstrip(), self._line(shown, shown, widths, {})]
        if self._says_left_out and len(shown) < len(labels):
            self._says_left_out = False
            lines.insert(0, cut_end(_LEFT_OUT, width))
        return [painted(line, "dim", self._stream) for line in lines if line]

    def _line(
        self, columns: Iterable[str], cells: Mapping[str, str], widths: Mapping[str, int], colours: Mapping[str, str]
    ) -> str:
        """A line with the cells of these columns, each right-aligned, some in colours."""
        texts = []
        for name in columns:
            text = cells.get(name, "")
            padding = " " * (widths[name] - cell_width(text))
            # Padded first: the codes of a colour take no room.
            texts.append(f"{padding}{painted(text, colours[name], self._stream) if name in colours else text}")
        return _GAP.join(texts).rstrip()


def format_metric(value: float) -> str:
    """A number for a column: with four digits, so that numbers below each other have as many (2.240 and 2.297), or with
    three if four would be wider than most columns."""
    text = f"{value:#.4g}".removesuffix(".")
    if len(text) <= _WIDTH:
        return text
    return f"{value:.0f}" if 1 <= abs(value) < 10**6 else f"{value:#.3g}"


def choose_columns(
    groups: Mapping[str, Sequence[str]],
    widths: Mapping[str, int],
    titles: Mapping[str, str],
    width: int,
    best: str | None = None,
) -> dict[str, list[str]]:
    """The columns that fit into one line, by group; step and epoch come first, rate and time last.

    Until the others fit, columns are left out in this order: metrics without a group, and metrics of the training but
    the loss, the last ones first; the rate and the time, which the bar shows, too; repeatedly the last column of the
    validation set with the most columns; the epoch; the training loss; the metric that decides which one is best.

    Args:
        widths: of all columns.
        titles: of the groups, which may be wider than their columns.
        best: the metric that decides which checkpoint is best.
    """
    shown = {_FIRST: [STEP, EPOCH], **{group: list(names) for group, names in groups.items()}}
    shown[_LAST] = [name for name in (RATE_KEY, TIME) if name in widths]
    for name in _least_important({group: tuple(names) for group, names in shown.items()}, best):
        if _line_width(shown, widths, titles) <= width:
            break
        group = next(group for group, names in shown.items() if name in names)
        shown[group].remove(name)
        shown = {group: names for group, names in shown.items() if names}
    return shown


def _least_important(groups: Mapping[str, Sequence[str]], best: str | None) -> Iterator[str]:
    """All columns but the step, in the order in which they are left out."""
    for group in ("", TRAIN):
        yield from (name for name in reversed(groups.get(group, ())) if name not in (LOSS, best))
    yield from groups[_LAST]
    sets = [
        # The deciding metric first, because columns are left out from the end.
        sorted(names, key=lambda name: name != best)
        for group, names in groups.items()
        if group not in (_FIRST, _LAST, TRAIN, "")
    ]
    while names := max((names for names in reversed(sets) if names != [best]), key=len, default=[]):
        yield names.pop()
    yield EPOCH
    yield from (name for name in dict.fromkeys((LOSS, best)) if name in _flat(groups))


def _flat(groups: Mapping[str, Iterable[str]]) -> list[str]:
    """The names of all groups, in order."""
    return [name for names in groups.values() for name in names]


def _width_of(names: Sequence[str], widths: Mapping[str, int]) -> int:
    """The width of columns with the gaps between them."""
    return sum(widths[name] for name in names) + len(_GAP) * (len(names) - 1)


def _line_width(groups: Mapping[str, Sequence[str]], widths: Mapping[str, int], titles: Mapping[str, str]) -> int:
    """The width of a line with these columns, in which a group is at least as wide as its title."""
    of_groups = (max(_width_of(names, widths), cell_width(titles.get(group, ""))) for group, names in groups.items())
    return sum(of_groups) + len(_GAP) * (len(groups) - 1)


def _widened(
    groups: Mapping[str, Sequence[str]], widths: Mapping[str, int], titles: Mapping[str, str]
) -> dict[str, int]:
    """The widths of the columns that are shown. The first of a group is widened if the group's title needs it."""
    shown = {name: widths[name] for name in _flat(groups)}
    for group, (first, *_) in groups.items():
        shown[first] += max(cell_width(titles.get(group, "")) - _width_of(groups[group], widths), 0)
    return shown
