"""Ranks of which one is killed, stopped or raises."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from compare import final_state, metrics
from striking import KILLED, OTHERS, RAISED, STOPPED, fit, strike

from campaign.fault_class import FaultClass, Size, Trials
from campaign.verdict import PASSED, Outcome, Verdict

FIRST = (
    (1, "step", KILLED),
    (0, "save", STOPPED),
    (1, "save", KILLED),
    (0, "evaluation", RAISED),
    (1, "start", KILLED),
)
TRIALS = (*FIRST, *(trial for trial in product((0, 1), OTHERS, (KILLED, STOPPED, RAISED)) if trial not in FIRST))
"""(rank, where, what)"""


@contextmanager
def prepare_ranks(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train on two ranks without a fault."""
    reference = folder / "reference"
    fit(reference, "+callbacks.ask.rank=9", "+callbacks.ask.at=never")

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        strike(trial, *TRIALS[number])
        for compare in (final_state, metrics):
            if compare(trial / "run") != compare(reference / "run"):
                return Outcome(Verdict.diverged, f"{TRIALS[number]}: another {compare.__name__}")
        shutil.rmtree(trial)
        return PASSED

    yield Trials(min(count, len(TRIALS)), run_trial, together=1)


CLASSES = (
    FaultClass(
        key="ranks",
        title="One of two ranks is killed, hangs or raises",
        what="In a load, the start, a step, a save or an evaluation one rank is killed, stopped or raises. The other "
        "names it within the timeout of 20 s, both are started again, and the run ends as an undisturbed one.",
        promises="L1 L3 L4 L6",
        counts={Size.full: 5, Size.nightly: len(TRIALS)},
        prepare=prepare_ranks,
        share=4.5,
    ),
)
