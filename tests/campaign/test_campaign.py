"""Each class of faults, with a trial or a few: what `scripts/faults` runs hundreds of times."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaign.classes import load_classes
from campaign.fault_class import FaultClass, Size
from campaign.runner import run_one
from campaign.verdict import Verdict

TRIALS = {"folders": (0, 1), "replacements": (0, 1), "uploads": (0, 1, 2, 3), "experiments": (8, 57)}
"""The numbers of the trials, by key; 0 for the others. These two experiments differ in nearly all that is drawn."""
IN_CAMPAIGNS = ("kills_sync", "kill_points", "devices", "search", "compare", "submission")
"""Those that differ from another one by a setting, or take long. `scripts/faults` runs all of them many times."""
QUICK = [fault for fault in load_classes() if Size.quick in fault.counts]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.key, marks=pytest.mark.campaign if fault.key in IN_CAMPAIGNS else ())
        for fault in QUICK
    ],
)
def test_a_run_survives_the_fault(fault: FaultClass, tmp_path: Path) -> None:
    if (reason := fault.skipped()) is not None:
        pytest.skip(reason)
    numbers = TRIALS.get(fault.key, (0,))
    with fault.prepare(tmp_path, len(numbers), Size.quick) as trials:
        outcomes = [run_one(trials, number) for number in numbers[: trials.count]]
    assert [outcome for outcome in outcomes if outcome.verdict is not Verdict.passed] == []
