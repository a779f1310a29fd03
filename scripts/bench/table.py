"""A table of figures: one row a contender, its samples by column; ratios to a named base, round by round; Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """What is measured; less is better."""

    name: str
    unit: str
    digits: int = 2
    """Decimals to print."""
    resolution: float = 0.0
    """Differences up to this, in the unit, are none: the clock, or the procedure, sees no better."""
    ratio: bool = True
    """Whether it is also given as a ratio to the base."""


@dataclass(slots=True)
class Row:
    """One contender: a list of samples for each column, in the order of the rounds."""

    name: str
    samples: dict[str, list[float]]
    base: str | None = None
    """The row that it is compared with, where that is not the table's; its own name: it is a base itself."""
    series: str | None = None
    """The line of the plot that it is a point of."""
    x: float | None = None
    """Its place on the plot."""


@dataclass(slots=True)
class Table:
    """Rows that were measured in turn, in one run."""

    name: str
    title: str
    base: str
    columns: list[Column]
    rows: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    """Sizes and counts: two tables are comparable only where these are the same."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Contenders that were not measured, and why."""
    notes: list[str] = field(default_factory=list)
    x_label: str = ""

    def base_of(self, row: Row) -> Row | None:
        """The row that this one is compared with; None for a base itself."""
        name = row.base or self.base
        return next((one for one in self.rows if one.name == name and one is not row), None)

    def ratios(self, row: Row, column: str) -> list[float]:
        """To the base: of each round where both have the same rounds, else of the medians; empty without one."""
        base = self.base_of(row)
        own, others = row.samples.get(column, []), [] if base is None else base.samples.get(column, [])
        if not own or not others or median(others) <= 0:
            return []
        if len(own) != len(others) or min(others) <= 0:
            return [one / median(others) for one in own]
        return [one / other for one, other in zip(own, others, strict=True)]

    def points(self) -> dict[str, list[tuple[float, float]]]:
        """The medians of the first column by series, for a plot; empty where no row has a place on one."""
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            own = row.samples.get(self.columns[0].name)
            if row.series is not None and row.x is not None and own:
                lines.setdefault(row.series, []).append((row.x, median(own)))
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the figures a reader wants beside the samples they come from."""
        plain = asdict(self)
        for row, data in zip(self.rows, plain["rows"], strict=True):
            data["figures"] = {
                column.name: {
                    **spread(row.samples[column.name]),
                    **({"ratio": spread(found)} if column.ratio and (found := self.ratios(row, column.name)) else {}),
                }
                for column in self.columns
                if row.samples.get(column.name)
            }
        return plain

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> Table:
        rows = [Row(**{key: value for key, value in row.items() if key != "figures"}) for row in plain["rows"]]
        return Table(**{**plain, "columns": [Column(**one) for one in plain["columns"]], "rows": rows})

    def to_markdown(self) -> str:
        heads, marks = [self.title], ["---"]
        for column in self.columns:
            heads.append(f"{column.name}, {column.unit}")
            marks.append("---")
            if column.ratio:
                heads.append(f"{column.name}, × base")
                marks.append("---")
        lines = [_line(heads), _line(marks)]
        for row in self.rows:
            cells = [row.name]
            for column in self.columns:
                own = row.samples.get(column.name, [])
                cells.append(_cell(own, column.digits))
                if column.ratio:
                    cells.append(_cell(self.ratios(row, column.name), 2))
            lines.append(_line(cells))
        empty = [""] * (len(heads) - 2)
        lines += [_line([name, f"not measured: {reason}", *empty]) for name, reason in self.skipped.items()]
        bases = sorted({base.name for row in self.rows if (base := self.base_of(row)) is not None})
        named = " · ".join(bases[:3]) + (" and so on" if len(bases) > 3 else "")
        said = f"Medians [min to max] of {self._counts()}."
        return "\n\n".join(["\n".join(lines), f"Base: {named}. {said}" if bases else said, *self.notes])

    def _counts(self) -> str:
        """How many samples the rows have, by the first column."""
        counts = sorted({len(row.samples.get(self.columns[0].name, ())) for row in self.rows})
        each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{each} sample{'' if counts == [1] else 's'} a row"


def spread(samples: list[float]) -> dict[str, float]:
    """Median, least, most and count."""
    return {"median": median(samples), "min": min(samples), "max": max(samples), "count": len(samples)}


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(samples: list[float], digits: int) -> str:
    if not samples:
        return ""
    found = spread(samples)
    if len(samples) == 1:
        return f"{found['median']:,.{digits}f}"
    return f"{found['median']:,.{digits}f} [{found['min']:,.{digits}f} to {found['max']:,.{digits}f}]"
