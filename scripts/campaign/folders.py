"""Folders that change under a run: deleted, moved, or read-only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

from command import Result, train

from campaign.disks import copy_image, make_image, mounted, why_no_ext4
from campaign.fault_class import FaultClass, Size, Trials
from campaign.kills import COMPOSED
from campaign.oracle import HANG_S, Reference, announced_steps, make_reference, verdict_of
from campaign.trial_runs import ON_DISK, TRAINING, ending_of, watched
from campaign.verdict import Outcome, Verdict

POLICIES = ("checkpoint.on_save_error=raise", "checkpoint.on_save_error=warn")


@contextmanager
def prepare_changes(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault."""
    reference = make_reference(folder, *TRAINING, disk=COMPOSED)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        act = (delete_checkpoints, move_run)[number % 2]
        return act(trial, reference, number)

    yield Trials(count, run_trial)


def delete_checkpoints(trial: Path, reference: Reference, number: int) -> Outcome:
    """Delete the folder of the checkpoints under a run: what is saved later is whole."""
    run, fit = trial / "run", (*TRAINING, POLICIES[number // 2 % 2])
    with watched(*fit, cwd=trial, run=run) as started:
        started.wait_for_moment(Random(f"delete {number}"))
        announced_before = started.announced()
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        result = started.end()
    if (outcome := check_message(result)) is not None:
        return outcome
    # What was announced before is gone by the user's hand; what was announced after is there.
    announced = announced_steps(result)[len(announced_before) + 1 :]
    return verdict_of(run, reference, announced, lambda: _go_on(trial, fit), same_checkpoints=False)


def move_run(trial: Path, reference: Reference, number: int) -> Outcome:
    """Move the folder of a run away under it: it ends with an error, and goes on from its new place."""
    run, moved = trial / "run", trial / "moved"
    with watched(*TRAINING, POLICIES[number // 2 % 2], cwd=trial, run=run) as started:
        if not started.wait_for_moment(Random(f"move {number}")) or not (run / "checkpoints").is_dir():
            started.wait_until((run / "checkpoints").is_dir)
        announced = started.announced()
        os.rename(run, moved)
        result = started.end()
    if (outcome := check_message(result)) is not None:
        return outcome
    left = [path for path in (run.rglob("*") if run.exists() else ()) if path.is_file()]
    fit = (*TRAINING, POLICIES[number // 2 % 2], "run_dir=moved")
    outcome = verdict_of(moved, reference, announced, lambda: _go_on(trial, fit))
    if outcome.verdict is Verdict.passed and run.exists():
        # It would stand in the way of a run that is moved back.
        return Outcome(Verdict.hard_fail, f"there is something where the run was: {left}; {ending_of(result)}")
    if outcome.verdict is not Verdict.passed:
        return Outcome(outcome.verdict, f"{outcome.detail}; {ending_of(result)}; left: {left}")
    return outcome


def check_message(result: Result) -> Outcome | None:
    """A run whose folder changed ends well, or with one clear error."""
    if result.code not in (0, 1) or "Traceback" in result.err or (result.code and "error:" not in result.err):
        return Outcome(Verdict.hard_fail, f"{ending_of(result)}")
    return None


@contextmanager
def prepare_read_only(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault, and make an empty disk to copy."""
    reference, image = make_reference(folder, *TRAINING, disk=COMPOSED), make_image(folder / "image")

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        copy_image(image, trial / "image")
        return make_read_only(trial, reference, number)

    yield Trials(count, run_trial)


def make_read_only(trial: Path, reference: Reference, number: int) -> Outcome:
    """Have an ext4 become read-only under a run, as it does after an error of its disk; then mount it anew."""
    disk, fit = trial / "disk", (*ON_DISK, POLICIES[number % 2])
    run, source = disk / "run", ("-o", "loop", str(trial / "image"))
    with mounted(disk, *source), watched(*fit, cwd=trial, run=run) as started:
        began = started.wait_for_moment(Random(f"read-only {number}"))
        subprocess.run(["mount", "-o", "remount,abort", str(disk)], capture_output=True, check=False)
        result = started.end()
    if began and (result.code not in (0, 1, 2) or "Traceback" in result.err):
        return Outcome(Verdict.hard_fail, f"{ending_of(result)}")
    subprocess.run(["fsck.ext4", "-p", str(trial / "image")], capture_output=True, check=False)
    with mounted(disk, *source):
        outcome = verdict_of(
            run, reference, announced_steps(result), partial(_go_on, trial, fit), same_checkpoints=False
        )
    (trial / "image").unlink()
    if outcome.verdict is Verdict.passed:
        return outcome
    return Outcome(outcome.verdict, f"{outcome.detail}; {ending_of(result)}", outcome.announced)


def _go_on(trial: Path, fit: tuple[str, ...]) -> Result:
    return train("fit", *fit, cwd=trial, disk=COMPOSED, limit_s=HANG_S)


CLASSES = (
    FaultClass(
        key="folders",
        title="Folder deleted or moved under a run",
        what="The folder of the checkpoints is deleted, or the run's folder is moved away, while it trains. The run "
        "resumes from what is left.",
        promises="L2 L4 L5 L6",
        counts={Size.quick: 4, Size.full: 24, Size.nightly: 200},
        prepare=prepare_changes,
    ),
    FaultClass(
        key="read_only",
        title="The file system becomes read-only",
        what="An ext4 becomes read-only under a run, as it does after an error of its disk. Then it is mounted again.",
        promises="L1 L4 L5 L6",
        counts={Size.quick: 2, Size.full: 12, Size.nightly: 100},
        prepare=prepare_read_only,
        skipped=why_no_ext4,
    ),
)
