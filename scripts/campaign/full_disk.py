"""A disk that fills up under a run: it stops to be resumed, or goes on, and no record is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from command import Result, train
from compare import metrics

from campaign.disks import mounted, why_no_tmpfs
from campaign.fault_class import FaultClass, Size, Trials
from campaign.kills import COMPOSED
from campaign.oracle import HANG_S, Reference, announced_steps, make_reference, verdict_of
from campaign.trial_runs import ON_DISK, STEPS, TRAINING, ending_of, watched
from campaign.verdict import Outcome, Verdict

POLICIES = ("checkpoint.on_save_error=raise", "checkpoint.on_save_error=warn")
DISK_BYTES = 8 << 20
DISK_FILES = 400


@contextmanager
def prepare(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault."""
    reference = make_reference(folder, *TRAINING, disk=COMPOSED)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        return fill_and_go_on(trial, reference, number)

    yield Trials(count, run_trial)


def fill_and_go_on(trial: Path, reference: Reference, number: int) -> Outcome:
    """Fill the disk of a run at a random moment, see how it ends, make space, and let it go on.

    By the number: which policy; bytes or inodes; all of them or nearly; whether space is made while the run lives.
    """
    chance = Random(f"full {number}")
    disk, policy = trial / "disk", POLICIES[number % 2]
    run, fit = disk / "run", (*ON_DISK, policy)
    size = ("-t", "tmpfs", "-o", f"size={DISK_BYTES},nr_inodes={DISK_FILES}", "none")
    with mounted(disk, *size):
        with watched(*fit, cwd=trial, run=run) as started:
            began = started.wait_for_moment(chance)
            ballast = fill(disk, files=number % 5 == 4, spared=chance.choice((0, 0, 1, 7, 40)))
            had_saved = bool(started.announced())
            if number % 4 == 3:
                time.sleep(0.05 + 0.2 * chance.random())
                make_space(ballast)
            result = started.end()
        what = f"full at a {'moment of the run' if began else 'moment after its end'}, {policy}"
        outcome = check_stop(result, run, policy, had_saved=had_saved)
        if outcome is None:
            make_space(ballast)

            def go_on() -> Result:
                return train("fit", *fit, cwd=trial, disk=COMPOSED, limit_s=HANG_S)

            outcome = verdict_of(run, reference, announced_steps(result), go_on, same_checkpoints=policy == POLICIES[0])
    if outcome.verdict is Verdict.passed:
        return outcome
    return Outcome(outcome.verdict, f"{what}: {outcome.detail}; {ending_of(result)}", outcome.announced)


def fill(disk: Path, *, files: bool, spared: int) -> list[Path]:
    """Fill a disk but for so many blocks, or so many files; returns what fills it."""
    ballast = disk / "ballast"
    ballast.mkdir()
    made: list[Path] = []
    with contextlib.suppress(OSError):
        if files:
            while True:
                made.append(ballast / str(len(made)))
                made[-1].touch()
        made.append(ballast / "bytes")
        with open(made[-1], "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    if files:
        for _ in range(min(spared, len(made) - 1)):
            made.pop().unlink(missing_ok=True)
    elif made:
        os.truncate(made[-1], max(0, made[-1].stat().st_size - spared * 4096))
    return made


def make_space(ballast: list[Path]) -> None:
    """Remove what fills a disk."""
    for path in ballast:
        path.unlink(missing_ok=True)


def check_stop(result: Result, run: Path, policy: str, *, had_saved: bool) -> Outcome | None:
    """Check how a run ended on a full disk; None where it was as it should be."""
    # Where nothing was saved before, the run has failed, or was refused.
    codes = {0, 75} if had_saved else {0, 1, 2, 75}
    if result.code not in codes or "Traceback" in result.err:
        return Outcome(Verdict.hard_fail, f"ends with {result.code}")
    texts = ("error:", os.strerror(errno.ENOSPC), "no room", "are free", "free inodes", "no inode is free")
    if result.code and not any(text in result.err for text in texts[1:]):
        return Outcome(Verdict.hard_fail, f"ends with {result.code}, and does not say why")
    if not (run / "metrics.jsonl").exists():
        return Outcome(Verdict.lost, "metrics.jsonl is gone") if announced_steps(result) else None
    steps = [record["step"] for record in metrics(run)]
    if steps != list(range(1, len(steps) + 1)) or len(steps) < max(announced_steps(result), default=0):
        return Outcome(Verdict.lost, f"the log has the steps {steps}")
    if result.code == 0 and policy == POLICIES[1] and len(steps) != STEPS:
        return Outcome(Verdict.lost, f"it ends well, and the log has the steps {steps}")
    return None


CLASSES = (
    FaultClass(
        key="full_disk",
        title="The disk fills up",
        what="At a random moment of a run its disk is full (bytes or inodes, wholly or nearly); in every fourth run "
        "there is space again soon. It stops with 75, or continues by `on_save_error: warn`; its log is intact; with "
        "space it resumes.",
        promises="L1 L4 L5 L6",
        counts={Size.quick: 6, Size.full: 40, Size.nightly: 500},
        prepare=prepare,
        share=2.0,
        skipped=why_no_tmpfs,
    ),
)
