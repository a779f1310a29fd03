"""Logs that a crash has torn: metrics.jsonl, metrics.csv and an event file, cut at each byte of their last records."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command import train

from campaign.fault_class import FaultClass, Size, Trials
from campaign.kill_points import count_changes, run_mortal
from campaign.kills import COMPOSED
from campaign.oracle import HANG_S, Reference, announced_steps, make_reference, verdict_of
from campaign.verdict import Outcome, Verdict

TRAINING = (
    "experiment=digits_mlp", "model.hidden=[4]", "loop.max_duration=12", "loop.log_interval=1",
    "loop.eval_interval=4", "loop.eval_steps=1", "checkpoint.save_interval=4", "checkpoint.save_async=false",
    "+loggers.csv={_target_: trainer_cli.CsvLogger}", "run_dir=run",
)  # fmt: skip
STOPPED_AT, KILLED_AT = 4, 8
"""Checkpoints. The kill comes before the first change of the second one, after the records of its step."""


@contextmanager
def prepare_torn_logs(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault, and to a kill, after a stop at a checkpoint."""
    reference = make_reference(folder, *TRAINING, disk=COMPOSED)
    killed = folder / "killed"
    killed.mkdir()
    announced = announced_steps(train("fit", *TRAINING, f"loop.hard_stop={STOPPED_AT}", cwd=killed))
    # Written after the checkpoint of that step: only that may a crash tear.
    sizes = {_name(file): file.stat().st_size for file in _logs(killed / "run")}
    shutil.copytree(killed, folder / "resumed")
    changes = run_mortal(0, "fit", *TRAINING, cwd=folder / "resumed").operations
    first = next(index for index, change in enumerate(changes) if f"step{KILLED_AT}" in change)
    assert run_mortal(count_changes(changes[:first]) + 1, "fit", *TRAINING, cwd=killed).killed
    cuts = [
        (file, size) for file in _logs(killed / "run") for size in range(sizes.get(_name(file), 0), file.stat().st_size)
    ]
    random.Random(0).shuffle(cuts)

    def run_trial(number: int) -> Outcome:
        file, size = cuts[number]
        trial = folder / f"trial{number}"
        trial.mkdir()
        shutil.copytree(killed / "run", trial / "run")
        return go_on_after_cut(reference, trial, trial / file.relative_to(killed), size, announced)

    yield Trials(min(count, len(cuts)), run_trial)


def go_on_after_cut(reference: Reference, folder: Path, file: Path, size: int, announced: list[int]) -> Outcome:
    """Cut a log of a killed run, and let the run go on to its end."""
    os.truncate(file, size)
    outcome = verdict_of(
        folder / "run",
        reference,
        announced,
        lambda: train("fit", *TRAINING, cwd=folder, disk=COMPOSED, limit_s=HANG_S),
    )
    if outcome.verdict is Verdict.passed and (changed := _changed_csv(folder / "run", reference.run)):
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
        title="A log is torn",
        what="After a kill between two checkpoints metrics.jsonl, metrics.csv or an event file is cut at any byte that "
        "was written since the last checkpoint.",
        promises="L4 L6",
        counts={Size.quick: 6, Size.full: 100, Size.nightly: 1000},
        prepare=prepare_torn_logs,
        share=2.0,
    ),
)
