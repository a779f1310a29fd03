"""What got slower since an earlier result, beyond the noise that either of the two shows; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from table import Column, Row, Table

TOLERANCE = 0.05
"""A median that grew by no more than this part did not get slower, however steady it is."""
FEWEST = 3
"""The noise of fewer samples is unknown."""


@dataclass(frozen=True, slots=True)
class Change:
    """A figure that is another than it was, in words."""

    where: str
    before: float
    after: float
    kind: str

    def __str__(self) -> str:
        factor = f", {self.after / self.before:.2f} times" if self.before > 0 else ""
        return f"{self.where}: {self.before:.4g} -> {self.after:.4g} {self.kind}{factor}"


@dataclass(slots=True)
class Comparison:
    slower: list[Change] = field(default_factory=list)
    faster: list[Change] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What could not be compared, and why."""
    compared: int = 0


def compare(before: Iterable[Table], after: Iterable[Table], tolerance: float = TOLERANCE) -> Comparison:
    """Hold each figure against the same one of an earlier result.

    A figure with a base is compared as its ratio to the base, so that a slower machine is no slower program.
    It got slower where its least is above what was its most, and its median grew by more than `tolerance`.
    """
    found = Comparison()
    earlier = {table.name: table for table in before}
    for table in after:
        old = earlier.get(table.name)
        if old is None:
            found.left_out.append(f"{table.name}: it is not in the earlier result")
        elif old.settings != table.settings:
            found.left_out.append(f"{table.name}: it was measured with other settings")
        else:
            _compare_table(old, table, tolerance, found)
    return found


def _compare_table(old: Table, new: Table, tolerance: float, found: Comparison) -> None:
    rows = {row.name: row for row in old.rows}
    for name in rows.keys() - {row.name for row in new.rows}:
        found.left_out.append(f"{new.name}, {name}: it is not in this result")
    for row, column in _figures(new):
        where = f"{new.name}, {row.name}, {column.name}"
        if row.name not in rows:
            found.left_out.append(f"{where}: it is not in the earlier result")
            continue
        before, _, _ = _measure(old, rows[row.name], column)
        after, kind, resolution = _measure(new, row, column)
        if min(len(before), len(after)) < FEWEST:
            found.left_out.append(f"{where}: fewer than {FEWEST} samples")
            continue
        found.compared += 1
        change = Change(where, median(before), median(after), kind)
        least = max(tolerance * abs(change.before), resolution)
        if min(after) > max(before) and change.after - change.before > least:
            found.slower.append(change)
        elif max(after) < min(before) and change.before - change.after > least:
            found.faster.append(change)


def _figures(table: Table) -> Iterator[tuple[Row, Column]]:
    """All but the bases themselves: whatever they take is the machine's."""
    bases = {row.base or table.base for row in table.rows}
    for row in table.rows:
        if row.name not in bases:
            yield from ((row, column) for column in table.columns if row.samples.get(column.name))


def _measure(table: Table, row: Row, column: Column) -> tuple[list[float], str, float]:
    """The samples to compare, what they are, and the difference that is none."""
    ratios = table.ratios(row, column.name) if column.ratio else []
    base = table.base_of(row)
    if not ratios or base is None:
        return row.samples.get(column.name, []), column.unit, column.resolution
    return ratios, "times the base", column.resolution / median(base.samples[column.name])
