"""kill -9 in a search at random moments: its decisions, records and runs are those of an undisturbed one."""

from __future__ import annotations

import csv
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command import train
from compare import assert_same_run

import trainer_cli.addons.jobs
import trainer_cli.addons.search  # noqa: F401  (without the add-ons there is no such class)
from campaign.fault_class import FaultClass, Size, Trials
from campaign.group_kills import kill_starts
from campaign.oracle import HANG_S
from campaign.verdict import PASSED, Outcome, Verdict

SEARCHED = (
    "fit", "-m", "digits_mlp", "loop.max_duration=20", "loop.eval_interval=2", "loop.log_interval=5",
    "scheduler.warmup=3", "loggers=jsonl", "report=false", "checkpoint.ephemeral_save_interval=3",
    "optimizer.lr=tag(log,interval(1e-4,1))", "model.hidden=[8],[16]", "sweep.search=random", "sweep.trials=4",
    "sweep.prune=asha", "sweep.eta=2", "sweep.rungs=[2st,6st]",
)  # fmt: skip
SWEEP = Path("runs/digits_mlp/sweep")


def read_decisions(folder: Path) -> tuple[bytes, list[tuple[str, ...]]]:
    """The record of a search, and what its table says of each run."""
    with open(folder / SWEEP / "sweep.csv", encoding="utf-8") as file:
        rows = [tuple(row[key] for key in ("KEY", "status", "step", "reason")) for row in csv.DictReader(file)]
    return (folder / SWEEP / "search.jsonl").read_bytes(), rows


@contextmanager
def prepare_searches(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Search without a fault."""
    began = time.monotonic()
    whole = folder / "undisturbed"
    whole.mkdir()
    undisturbed = train(*SEARCHED, cwd=whole)
    assert undisturbed.code == 0, undisturbed.err
    decisions, took_s = read_decisions(whole), time.monotonic() - began

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        why = kill_starts(SEARCHED, trial, random.Random(number), took_s, codes=(0,))
        if why is not None:
            return Outcome(Verdict.hard_fail, why)
        result = train(*SEARCHED, cwd=trial, limit_s=HANG_S)
        if result.code != 0:
            return Outcome(Verdict.hard_fail, f"the last start ends with {result.code}: {result.err}")
        if (found := read_decisions(trial)) != decisions:
            return Outcome(Verdict.diverged, f"{decisions} / {found}")
        for key, *_ in decisions[1]:
            assert_same_run(trial / SWEEP / key, whole / SWEEP / key)
        shutil.rmtree(trial)
        return PASSED

    yield Trials(count, run_trial)


CLASSES = (
    FaultClass(
        key="search",
        title="kill -9 in a search",
        what="A sweep that draws four runs and pauses some is started three times, and each time the command, one of "
        "its processes or all of them are killed at a random moment. Started again, it has made the decisions of an "
        "undisturbed one, and its runs end as the runs of that.",
        promises="L1 L4 L6",
        counts={Size.quick: 1, Size.full: 10, Size.nightly: 50},
        prepare=prepare_searches,
        share=6.0,
    ),
)
