"""Checkpoints and configs that want to run code, take memory or write elsewhere."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hostile_records import make_runs, try_damage
from hostile_run import CASES, read_cases, why_wrong
from hostile_targets import HOLES, REACHES, TRUST, check_bounded, check_refused

from campaign.fault_class import FaultClass, Size, Trials
from campaign.verdict import PASSED, Outcome, Verdict


@contextmanager
def prepare_files(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Have all files read by a process of its own, which must run nothing."""
    results = list(read_cases(folder).values())

    def run_trial(number: int) -> Outcome:
        problem = why_wrong(results[number])
        return PASSED if problem is None else Outcome(Verdict.hard_fail, problem)

    yield Trials(min(count, len(results)), run_trial)


@contextmanager
def prepare_targets(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Make a project that holds what a hostile config could hope for."""
    (folder / "mine_hole.py").write_text(HOLES)
    sys.path.insert(0, str(folder))
    cases = [*TRUST, *REACHES]

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        with warnings.catch_warnings():
            # Of modules that a target names.
            warnings.simplefilter("ignore")
            if number < len(TRUST):
                check_refused(cases[number], folder, trial)
            else:
                check_bounded(cases[number], folder, trial)
        return PASSED

    try:
        # One at a time: warnings are those of the process.
        yield Trials(min(count, len(cases)), run_trial, together=1)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("mine_hole", None)


@contextmanager
def prepare_records(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Make the runs whose files are changed at random."""
    whole = folder / "whole"
    make_runs(whole)

    def run_trial(number: int) -> Outcome:
        problems = try_damage(whole, folder / "try", number)
        return Outcome(Verdict.hard_fail, problems[0]) if problems else PASSED

    # One at a time: the readers print, and the current folder is that of the process.
    yield Trials(count, run_trial, together=1)


CLASSES = (
    FaultClass(
        key="hostile_files",
        title="Hostile checkpoints",
        what="Files with pickled code, links, wrong sizes, paths out of the folder and deep or huge content are "
        "read by a process with a limit of memory. Each is refused in one line, no code runs, and nothing is written.",
        promises="L2 L5",
        counts={Size.full: len(CASES), Size.nightly: len(CASES)},
        prepare=prepare_files,
        share=1.5,
    ),
    FaultClass(
        key="hostile_targets",
        title="Hostile targets in a recovered config",
        what="A config that was found beside a checkpoint names a function that loads, runs, launches or downloads "
        "something, writes a file outside of the run, or sets a flag beyond torch.backends. Each is refused, even if "
        "its package is trusted, and no code of it runs.",
        promises="L5",
        counts={Size.full: len(TRUST) + len(REACHES), Size.nightly: len(TRUST) + len(REACHES)},
        prepare=prepare_targets,
        share=1.5,
    ),
    FaultClass(
        key="hostile_records",
        title="Hostile files of a run",
        what="Values of other types and sizes, deep nesting and damaged bytes are put into the files of a run "
        "directory. Every command that reads runs lists this run and the others, without a crash.",
        promises="L5",
        counts={Size.full: 3000, Size.nightly: 300},
        prepare=prepare_records,
        share=1.5,
    ),
)
"""Not in quick: the tests of each commit have all of them."""
