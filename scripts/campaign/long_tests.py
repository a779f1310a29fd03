"""Tests that an environment variable makes long: nightly, one trial each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from campaign import ROOT
from campaign.fault_class import FaultClass, Size, Trials
from campaign.verdict import PASSED, Outcome, Verdict


@dataclass(frozen=True)
class LongTest:
    """Arguments of pytest, or of `train` where there are none, and the variables that make the tests long."""

    key: str
    title: str
    what: str
    promises: str
    tests: tuple[str, ...]
    env: Mapping[str, str]


TESTS = (
    LongTest(
        "histories", "20,000 random histories of a run",
        "Saves, crashes, disk errors, removals by hand and policies in random order, compared with a model after each "
        "step.",
        "L1 L2 L3", ("tests/checkpoint/test_histories.py",), {"TRAIN_HISTORIES": "20000"},
    ),
    LongTest(
        "resume_matrix", "a stop under every kind of training",
        "Stops at seven points under each combination of workers, accumulation, precision, averages and optimizers.",
        "L4", ("tests/integration/test_resume_matrix.py",), {"TRAIN_MATRIX": "full"},
    ),
    LongTest(
        "snapshots", "500 steps with a writer at work, 20 kills",
        "The training changes tensors while the writer thread writes their copies, and is killed.",
        "L1 L2 L4", ("tests/integration/test_snapshot_integrity.py",),
        {"TRAIN_WRITERS_STEPS": "500", "TRAIN_WRITERS_KILLS": "20"},
    ),
    LongTest(
        "replays", "50 steps of each training computed again",
        "Steps of finished runs are replayed from the checkpoint before them and compared bit for bit.",
        "L4", ("tests/integration/test_replay.py",), {"TRAIN_REPLAY": "full"},
    ),
    LongTest(
        "object_store", "1,000 schedules of failing requests to an object store",
        "Errors, resets, lost replies, truncated answers and stale lists at random requests, and kills between them.",
        "L1 L2", ("tests/faults/test_object_store_faults.py",), {"TRAIN_STORE_FAULTS": "1000"},
    ),
    LongTest(
        "configs", "50,000 random configs", "Wrong keys, types and values, each answered with a message.",
        "L5", ("tests/config/test_fuzz.py",), {"TRAIN_FUZZ": "50000"},
    ),
    LongTest(
        "compositions", "5,000 random compositions", "Configs composed as Hydra composes them.",
        "L5", ("tests/config/test_as_hydra.py",), {"TRAIN_COMPOSITIONS": "5000"},
    ),
    LongTest(
        "foreign_files", "50,000 mutations of foreign checkpoints",
        "Files of other programs with random changes are read or refused, and run no code.",
        "L2 L5", ("tests/addons/formats/test_foreign_fuzz.py",), {"TRAIN_FUZZ": "50000"},
    ),
    LongTest(
        "long_tests", "all tests that are left out for their length", "The tests with the marker `campaign`.",
        "L1 L2 L3 L4 L5 L6", ("-m", "campaign", "tests"), {"TRAIN_CAMPAIGN": "all"},
    ),
)  # fmt: skip


@contextmanager
def prepare(_folder: Path, count: int, _size: Size, *, test: LongTest) -> Iterator[Trials]:
    """One trial: the tests."""
    yield Trials(count, lambda _number: run_tests(test), together=1)


def run_tests(test: LongTest) -> Outcome:
    """Run pytest; a failing test is a HARD_FAIL with its last lines."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=7200", "-p", "no:cacheprovider", *test.tests]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **test.env}, capture_output=True, text=True)
    if done.returncode == 0:
        return PASSED
    return Outcome(Verdict.hard_fail, done.stdout[-2000:])


CLASSES = tuple(
    FaultClass(
        test.key, test.title, test.what, test.promises, {Size.nightly: 1}, partial(prepare, test=test),
        share=3.0,
    )
    for test in TESTS
)  # fmt: skip
