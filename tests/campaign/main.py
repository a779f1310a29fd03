"""Run the campaign of faults: `scripts/faults [quick|full|nightly] [--only KEY,KEY] [--trial N] [--render]`.

`full` and `nightly` write RELIABILITY.md. Exits with 1 where a trial did not pass.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from campaign import ROOT
from campaign.classes import load_classes
from campaign.fault_class import FaultClass, Size
from campaign.runner import LIMIT_S, Campaign, run_one
from campaign.verdict import Verdict
from publish import source_commit

STATE = ROOT / "faults-results/campaign.json"


def main() -> int:
    """Run what the arguments name."""
    args = _arguments()
    classes = [fault for fault in load_classes() if not args.only or fault.key in args.only]
    if args.trial is not None:
        return _repeat(classes, args.size, args.trial)
    commit = source_commit()
    campaign = Campaign(classes, args.size, commit, STATE, LIMIT_S[args.size])
    state = campaign.run()
    failed = [
        (fault.key, number, verdict, detail)
        for fault in classes
        for number, (verdict, detail, _) in state["classes"][fault.key]["trials"].items()
        if verdict != Verdict.passed
    ]
    for key, number, verdict, detail in failed:
        print(f"{verdict}: scripts/faults {args.size} --only {key} --trial {number}\n    {detail}")
    return 1 if failed else 0


def _repeat(classes: list[FaultClass], size: Size, number: int) -> int:
    """Run one trial of each class, and print what came."""
    failed = False
    for fault in classes:
        with (
            tempfile.TemporaryDirectory(prefix="faults-") as folder,
            fault.prepare(Path(folder), fault.counts.get(size, 0), size) as trials,
        ):
            outcome = run_one(trials, number)
        print(f"{fault.key} --trial {number}: {outcome.verdict} {outcome.detail}")
        failed |= outcome.verdict is not Verdict.passed
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("size", nargs="?", type=Size, choices=list(Size), default=Size.quick)
    parser.add_argument("--only", type=lambda text: text.split(","), help="keys of classes")
    parser.add_argument("--trial", type=int, help="repeat this trial alone")
    return parser.parse_args()
