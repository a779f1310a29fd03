"""Logs that a crash has torn: metrics.jsonl, metrics.csv and an event file, cut at each byte of their last records."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaign.fault_class import FaultClass, Size, Trials
from campaign.oracle import announced_steps, verdict_of
from campaign.struck_project import StruckProject, make_struck_project, remove_plan, write_plan
from campaign.verdict import Outcome, Verdict

CSV = ("+loggers.csv._target_=trainer_cli.CsvLogger",)
KILL = {"at": "hook", "what": "SIGKILL", "hook": "on_train_batch_end", "step": 23}
"""Between the checkpoints of steps 16 and 24, after the record of step 20."""


@contextmanager
def prepare_torn_logs(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault, and to a kill, after a stop at step 16."""
    project = make_struck_project(folder, *CSV)
    killed = folder / "killed"
    killed.mkdir()
    announced = announced_steps(project.run(killed, "loop.hard_stop=16"))
    # Written after the checkpoint of that step: only that may a crash tear.
    sizes = {_name(file): file.stat().st_size for file in _logs(killed / "run")}
    write_plan(killed, KILL)
    assert project.run(killed).killed
    remove_plan(killed)
    cuts = [
        (file, size) for file in _logs(killed / "run") for size in range(sizes.get(_name(file), 0), file.stat().st_size)
    ]
    random.Random(0).shuffle(cuts)

    def run_trial(number: int) -> Outcome:
        file, size = cuts[number]
        trial = folder / f"trial{number}"
        trial.mkdir()
        shutil.copytree(killed / "run", trial / "run")
        return go_on_after_cut(project, trial, trial / file.relative_to(killed), size, announced)

    yield Trials(min(count, len(cuts)), run_trial)


def go_on_after_cut(project: StruckProject, folder: Path, file: Path, size: int, announced: list[int]) -> Outcome:
    """Cut a log of a killed run, and let the run go on to its end."""
    os.truncate(file, size)
    outcome = verdict_of(folder / "run", project.reference, announced, lambda: project.run(folder))
    if outcome.verdict is Verdict.passed and (changed := _changed_csv(folder / "run", project.reference.run)):
        return Outcome(Verdict.lost, f"{file.name} cut at {size}: {changed}", len(announced))
    if outcome.verdict is Verdict.passed:
        shutil.rmtree(folder)
    return outcome


def _logs(run: Path) -> list[Path]:
    return sorted([*run.glob("metrics.*"), *run.glob("tensorboard/events*")])


def _name(log: Path) -> str:
    """The name without the time in it: an event file is renamed if the next one is made in the same second."""
    return re.sub(r"tfevents\.\d+\.", "tfevents.", log.name)


def _changed_csv(run: Path, reference: Path) -> str:
    """How the steps in metrics.csv differ from those of the undisturbed run; empty if they do not."""
    steps, wanted = (
        [line.split(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()]
        for folder in (run, reference)
    )
    return "" if steps == wanted else f"rows of steps {steps}, not {wanted}"


CLASSES = (
    FaultClass(
        key="torn_logs",
        title="a log is torn",
        what="After a kill between two checkpoints metrics.jsonl, metrics.csv or an event file is cut at any byte that "
        "was written since the last checkpoint.",
        promises="L4 L6",
        counts={Size.quick: 6, Size.full: 100, Size.nightly: 1000},
        prepare=prepare_torn_logs,
        share=2.5,
    ),
)
