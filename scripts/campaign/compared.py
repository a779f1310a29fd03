"""kill -9 of `train compare` at random moments: its records and its verdict are those of an undisturbed one."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command import running, train

import trainer_cli.addons.compare  # noqa: F401  (without the add-on there is no such class)
from campaign.fault_class import FaultClass, Size, Trials
from campaign.verdict import PASSED, Outcome, Verdict

COMPARED = (
    "compare", "optimizer.lr=0.02", "optimizer.lr=1e-6", "--budget", "30steps", "--", "digits_mlp",
    "model.hidden=[16]", "loop.eval_interval=15", "loggers=jsonl", "checkpoint.ephemeral_save_interval=4",
)  # fmt: skip
"""Three pairs of short runs decide."""
KILLS = 3


def read_records(folder: Path) -> bytes:
    """The records of the only comparison in a folder."""
    [file] = folder.glob("runs/compare/*/pairs.jsonl")
    return file.read_bytes()


@contextmanager
def prepare_comparisons(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Compare without a fault."""
    began = time.monotonic()
    (folder / "undisturbed").mkdir()
    undisturbed = train(*COMPARED, cwd=folder / "undisturbed")
    assert undisturbed.code == 1, undisturbed.err
    records, took_s = read_records(folder / "undisturbed"), time.monotonic() - began

    def run_trial(number: int) -> Outcome:
        trial, chance = folder / f"trial{number}", random.Random(number)
        trial.mkdir()
        for _ in range(KILLS):
            with running(*COMPARED, cwd=trial) as command:
                # The command alone is killed: its runs end by themselves, and may still save.
                time.sleep(took_s * chance.random())
                command.signal(signal.SIGKILL)
                command.end()
        result = train(*COMPARED, cwd=trial)
        if result.code not in range(4):
            return Outcome(Verdict.hard_fail, result.err)
        if (result.code, result.out, read_records(trial)) != (undisturbed.code, undisturbed.out, records):
            return Outcome(Verdict.diverged, f"{undisturbed.out} / {result.out} / {read_records(trial)!r}")
        shutil.rmtree(trial)
        return PASSED

    yield Trials(count, run_trial)


CLASSES = (
    FaultClass(
        key="compare",
        title="kill -9 of a comparison",
        what="`train compare` is killed three times at random moments, and started again. Its verdict and the records "
        "of all pairs are those of an undisturbed one.",
        promises="L4 L6",
        counts={Size.quick: 1, Size.full: 10, Size.nightly: 50},
        prepare=prepare_comparisons,
        share=6.0,
    ),
)
