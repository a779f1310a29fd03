"""Each class of faults, with a trial or a few: what `scripts/faults` runs hundreds of times."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaign.classes import load_classes
from campaign.fault_class import FaultClass, Size
from campaign.runner import run_one
from campaign.verdict import Verdict

TRIALS = {"folders": 2, "replacements": 2, "uploads": 4, "experiments": 20}
"""By key; one for the others."""


QUICK = [fault for fault in load_classes() if Size.quick in fault.counts]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.key)
def test_a_run_survives_the_fault(fault: FaultClass, tmp_path: Path) -> None:
    if (reason := fault.skipped()) is not None:
        pytest.skip(reason)
    count = TRIALS.get(fault.key, 1)
    with fault.prepare(tmp_path, count, Size.quick) as trials:
        outcomes = [run_one(trials, number) for number in range(min(count, trials.count))]
    assert [outcome for outcome in outcomes if outcome.verdict is not Verdict.passed] == []
