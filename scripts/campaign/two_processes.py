"""Two processes for one run: at the same moment, one after the other, and after a kill."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command import Result, running

from campaign.fault_class import FaultClass, Size, Trials
from campaign.oracle import announced_steps, verdict_of
from campaign.struck_project import StruckProject, make_struck_project
from campaign.verdict import Outcome, Verdict

IN_USE = 4
START_S, TRAINING_S = 0.5, 0.7
"""About how long a start and the training take."""
KILL_AFTER_S = 0.1


@contextmanager
def prepare_races(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train in one process."""
    project = make_struck_project(folder)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        chance = random.Random(number).random()
        # At the same moment; while the first starts; while it trains.
        delay_s = (0.0, START_S * chance, START_S + TRAINING_S * chance)[number % 3]
        outcome = race(project, trial, delay_s, resumes=number % 2 == 1, kills=number % 5 == 4)
        if outcome.verdict is Verdict.passed:
            shutil.rmtree(trial)
        return outcome

    yield Trials(count, run_trial, together=1)


def race(project: StruckProject, folder: Path, delay_s: float, *, resumes: bool, kills: bool) -> Outcome:
    """Start two processes, and check that one trains undisturbed and the other ends with 4.

    Args:
        delay_s: between the two starts.
        resumes: whether the run has been trained to step 16 before.
        kills: whether the first is killed soon after the start of the second.
    """
    announced = announced_steps(project.run(folder, "loop.hard_stop=16")) if resumes else []
    with running("fit", *project.training, cwd=folder) as first:
        time.sleep(delay_s)
        with running("fit", *project.training, cwd=folder) as second:
            if kills:
                time.sleep(KILL_AFTER_S)
                first.signal(signal.SIGKILL)
            results = [first.end(), second.end()]
    announced += [step for result in results for step in announced_steps(result)]
    codes = {result.code for result in results if not is_refused(result)}
    if not codes <= ({0, -signal.SIGKILL} if kills else {0}) or not codes:
        return Outcome(Verdict.hard_fail, f"one ended in another way: {results}", len(announced))
    finished = [result for result in results if re.search("^finished at step", result.out, re.MULTILINE)]
    if len(finished) > 1:
        return Outcome(Verdict.diverged, f"both have trained: {results}", len(announced))
    return verdict_of(folder / "run", project.reference, announced, lambda: project.run(folder))


def is_refused(result: Result) -> bool:
    """Whether a process ended with 4, and said that another has the run, or has just made it."""
    return result.code == IN_USE and ("process " in result.err or "already holds a run" in result.err)


CLASSES = (
    FaultClass(
        key="two_processes",
        title="Two processes for one run",
        what="One run is started twice: at the same moment, or again while the first starts or trains. One trains, the "
        "other ends with 4. In every fifth trial the first is killed, and its lock must be free.",
        promises="L1 L4 L6",
        counts={Size.quick: 5, Size.full: 50, Size.nightly: 200},
        prepare=prepare_races,
        share=3.5,
    ),
)
