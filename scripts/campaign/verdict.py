"""The four verdicts on a trial, in the public words of the field."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What came of a run that met a fault."""

    passed = "PASS"
    """The newest valid checkpoint is no older than the last announced one, its tensors are those of the undisturbed
    run, and the run ends as the undisturbed one."""
    hard_fail = "HARD_FAIL"
    """The run cannot go on, fails without a clear error, or hangs."""
    diverged = "SILENT_DIVERGENCE"
    """The run goes on, but its weights or records differ from those of the undisturbed run."""
    lost = "LOST_WORK"
    """An announced checkpoint or a foreign file is gone, or a step is lost or recorded twice."""


@dataclass(frozen=True)
class Outcome:
    """The verdict on one trial."""

    verdict: Verdict
    detail: str = ""
    """What was seen; empty where it passed."""
    announced: int = 0
    """How many checkpoints were announced before the fault, where that is counted."""
    measured_s: float = 0.0
    """What a class that `measures` has measured."""


PASSED = Outcome(Verdict.passed)
