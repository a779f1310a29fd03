"""Run the campaign of faults: `scripts/faults [quick|full|nightly]`.

`full` and `nightly` write RELIABILITY.md, and `--peers` its second table. A call that was broken off goes on. Exits
with 1 where a trial of `train` did not pass.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
from pathlib import Path

import machine
import peers_environment
from campaign import ROOT, report
from campaign.classes import MODULES, PEER_MODULES, load_classes
from campaign.fault_class import FaultClass, Size
from campaign.peers_trials import versions
from campaign.runner import LIMIT_S, Campaign, folder_of_trials, run_one
from campaign.verdict import Verdict
from publish import source_commit

STATES = ROOT / "faults-results"
"""Of calls that were broken off."""


def main() -> int:
    """Run what the arguments name."""
    args = _arguments()
    if args.render:
        return _render(ROOT)
    # Warnings of what runs in this process would break the line of progress.
    logging.getLogger().addHandler(logging.NullHandler())
    # As at Ctrl-C, so that what was run is kept and what was started ends.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if args.peers:
        # Before the time begins: to install the other savers takes minutes.
        peers_environment.install()
    name, modules = ("contenders", PEER_MODULES) if args.peers else ("train", MODULES)
    size = args.size or (Size.full if args.peers else Size.quick)
    classes = load_classes(modules)
    if args.only:
        if unknown := set(args.only) - {fault.key for fault in classes}:
            print(f"no such class: {', '.join(unknown)}. There are {', '.join(fault.key for fault in classes)}.")
            return 2
        classes = [fault for fault in classes if fault.key in args.only]
    if args.trial is not None:
        return _repeat(classes, size, args.trial)
    state = STATES / ("-".join((name, *(args.only or ()))) + ".json")
    campaign = Campaign(classes, size, source_commit(), state, LIMIT_S[size])
    facts = machine.facts(folder_of_trials())
    results = report.make_report(classes, campaign.run(), {**facts, "versions": versions()} if args.peers else facts)
    if not args.only and (size is not Size.quick or args.peers):
        report.write({**report.read(ROOT), name: results}, ROOT)
        print(f"written: {report.PAGE}, {report.RESULTS}")
    # All are done: the next call begins anew.
    state.unlink()
    # Other savers may fail: their verdicts are what the table is for.
    ours = {**results, "rows": [row for row in results["rows"] if row["contender"] == "train"]}
    failed = report.failed_trials(ours)
    print("\n".join(failed) or f"{sum(row['trials'] for row in ours['rows'])} trials of `train`: all passed")
    return 1 if failed else 0


def _render(root: Path) -> int:
    """Write the page and the row of the README again from the saved results."""
    if not (root / report.RESULTS).exists():
        print(f"{report.RESULTS} is not there; `scripts/faults full` makes it.")
        return 2
    report.write(report.read(root), root)
    print(f"written: {report.PAGE}, {report.README}")
    return 0


def _repeat(classes: list[FaultClass], size: Size, number: int) -> int:
    """Run one trial of each class, and print what came."""
    failed = False
    for fault in classes:
        with (
            tempfile.TemporaryDirectory(prefix="faults-", dir=folder_of_trials()) as folder,
            fault.prepare(Path(folder), fault.counts.get(size, 0), size) as trials,
        ):
            outcome = run_one(trials, number)
        print(f"{fault.key} --trial {number}: {outcome.verdict} {outcome.detail}")
        failed |= outcome.verdict is not Verdict.passed
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("size", nargs="?", type=Size, choices=list(Size), help="3, 10 or 60 minutes; quick")
    parser.add_argument("--peers", action="store_true", help="the same faults for other savers")
    parser.add_argument("--render", action="store_true", help="write the page again from the saved results")
    parser.add_argument("--only", type=lambda text: text.split(","), help="keys of classes")
    parser.add_argument("--trial", type=int, help="repeat this trial alone")
    return parser.parse_args()
