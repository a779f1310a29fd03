"""What a check has found, and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Sureness = Literal["certain", "likely", "hint"]
"""How sure it is that something is a fault: `likely` rarely is meant, a `hint` may well be."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A fault, or what may be one."""

    where: str
    sureness: Sureness
    what: str
    cure: str


@dataclass(frozen=True, slots=True)
class PrecheckReport:
    """What was looked at, and what was found there."""

    looked_at: list[str] = field(default_factory=list)
    findings: list[Suspicion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be looked at, and what is as it should be but may surprise."""

    def add(self, sureness: Sureness, where: str, what: str, cure: str) -> None:
        """Add a finding."""
        self.findings.append(Suspicion(where, sureness, what, cure))

    def __str__(self) -> str:
        findings = [f"{each.sureness}: {each.where}: {each.what}. {each.cure}." for each in self.findings]
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*self.looked_at, *findings, *notes, f"{len(findings) or 'nothing'} found"])
