"""The report of a resume check: a row for each stop, and the finding; as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer_cli.run.table import table
from trainer_cli.testing.causes import Cause


@dataclass(frozen=True, slots=True)
class Row:
    """One stop: where it was, which steps after it were compared, and the result."""

    stop: str
    at: str
    compared: str
    result: str
    exact: bool | None
    """None: it was not reached, so nothing was compared."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first thing that differs, and why."""

    after: str
    """The stop after which it differs."""
    step: int
    moment: str
    shows: str
    """The values that differ at that moment."""
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a check."""

    name: str
    steps: int
    steps_per_epoch: int | None
    device: str
    rows: Sequence[Row]
    finding: Finding | None
    remarks: Sequence[str]
    processes: int = 0
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every stop that was reached was resumed exactly."""
        return self.finding is None and all(row.exact is not False for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"exact": self.exact, **asdict(self)}

    def __str__(self) -> str:
        epoch = f", {self.steps_per_epoch} an epoch" if self.steps_per_epoch else ""
        lines = [f"{self.name}: {self.steps} steps{epoch}, on {self.device}", ""]
        rows = [(row.stop, row.at, row.compared, row.result) for row in self.rows]
        lines.append(table(("stop", "at", "compared", "result"), rows))
        lines.append("")
        if self.finding is not None:
            lines += self._described(self.finding)
        else:
            count = sum(row.exact is True for row in self.rows)
            lines.append(
                f"exact: {count} stops resumed, and every bit is that of going straight through "
                f"({self.processes} processes, {self.seconds:g}s)"
            )
        lines += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(lines)

    @staticmethod
    def _described(finding: Finding) -> list[str]:
        rows = {
            "first": f"{finding.moment} ({finding.after})",
            "shows": finding.shows,
            "state": finding.cause.state,
            "cause": finding.cause.cause,
            "cure": finding.cause.cure,
        }
        return ["not exact", *(f"  {key:<6} {text}" for key, text in rows.items() if text)]
