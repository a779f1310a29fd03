"""kill -9 in `train compare` at random moments: its records, runs and verdict are those of an undisturbed one."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command import train
from compare import assert_same_run

import trainer_cli.addons.compare  # noqa: F401  (without the add-on there is no such class)
from campaign.fault_class import FaultClass, Size, Trials
from campaign.group_kills import kill_starts
from campaign.oracle import HANG_S
from campaign.verdict import PASSED, Outcome, Verdict

COMPARED = (
    "compare", "optimizer.lr=0.02", "optimizer.lr=1e-6", "--budget", "30steps", "--", "digits_mlp",
    "model.hidden=[16]", "loop.eval_interval=15", "loggers=jsonl", "checkpoint.ephemeral_save_interval=4",
)  # fmt: skip
"""Four pairs of short runs decide."""
KILLED_RUN = 65
"""The exit code after a run has failed."""


def read_records(folder: Path) -> tuple[bytes, bytes]:
    """The records and the verdict of the only comparison in a folder."""
    [comparison] = folder.glob("runs/compare/*")
    return (comparison / "pairs.jsonl").read_bytes(), (comparison / "verdict.json").read_bytes()


@contextmanager
def prepare_comparisons(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Compare without a fault."""
    began = time.monotonic()
    whole = folder / "undisturbed"
    whole.mkdir()
    undisturbed = train(*COMPARED, cwd=whole)
    assert undisturbed.code == 1, undisturbed.err
    records, took_s = read_records(whole), time.monotonic() - began
    pairs = [json.loads(line) for line in records[0].splitlines()]
    runs = [pair[side] for pair in pairs for side in ("a_run", "b_run")]

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        why = kill_starts(COMPARED, trial, random.Random(number), took_s, codes=(1, KILLED_RUN))
        if why is not None:
            return Outcome(Verdict.hard_fail, why)
        result = train(*COMPARED, cwd=trial, limit_s=HANG_S)
        if result.code not in range(4):
            return Outcome(Verdict.hard_fail, result.err)
        if (result.code, result.out, read_records(trial)) != (undisturbed.code, undisturbed.out, records):
            return Outcome(Verdict.diverged, f"{undisturbed.out} / {result.out} / {read_records(trial)!r}")
        for run in runs:
            assert_same_run(trial / run, whole / run)
        shutil.rmtree(trial)
        return PASSED

    yield Trials(count, run_trial)


CLASSES = (
    FaultClass(
        key="compare",
        title="kill -9 in a comparison",
        what="`train compare` is started three times, and each time the command, one of its processes or all of them "
        "are killed at a random moment. Started again, it gives the verdict, the records of all pairs and the runs of "
        "an undisturbed one.",
        promises="L1 L4 L6",
        counts={Size.quick: 1, Size.full: 10, Size.nightly: 50},
        prepare=prepare_comparisons,
        share=6.0,
    ),
)
