"""Power cuts: real ones of an ext4 in the midst of a training, and every state that a disk may be in after one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from acts import CUT, Act, assert_survives_power_cut, operations, prepared
from command import Result, train
from ext4 import shut_down
from forgetful import ForgetfulDisk

from campaign.disks import copy_image, fsync_new_file, make_image, mounted, why_no_ext4
from campaign.fault_class import FaultClass, Size, Trials
from campaign.kills import COMPOSED
from campaign.oracle import HANG_S, Reference, check_kept, make_reference, verdict_of
from campaign.trial_runs import ON_DISK, TRAINING, watched
from campaign.verdict import PASSED, Outcome, Verdict

CUTS = 3
"""In one trial, one after the other."""


@contextmanager
def prepare_cuts(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault, and make an empty disk to copy."""
    reference, image = make_reference(folder, *TRAINING, disk=COMPOSED), make_image(folder / "image")

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        copy_image(image, trial / "image")
        try:
            return cut_and_go_on(trial, reference, number)
        finally:
            (trial / "image").unlink()

    yield Trials(count, run_trial)


def cut_and_go_on(trial: Path, reference: Reference, number: int) -> Outcome:
    """Cut the power under a run several times, mount what is left of its disk each time, and let the run go on.

    By the number: at a random moment or right after an announcement; with or without an fsync of another program
    before.
    """
    disk, chance = trial / "disk", Random(f"power {number}")
    run = disk / "run"
    source = ("-o", "loop", str(trial / "image"))
    foreign = disk / "foreign"
    announced: list[int] = []
    for cut in range(number, number + CUTS):
        with mounted(disk, *source):
            if (kept := check_kept(run, reference, announced)).verdict is not Verdict.passed:
                return kept
            fsync_new_file(foreign)
            with watched(*ON_DISK, cwd=trial, run=run) as started:
                started.wait_for_moment(chance, announced=cut % 2 == 1)
                if cut % 4 >= 2:
                    fsync_new_file(disk / "other")
                # Read before the cut: what is said later may not have happened.
                announced += started.announced()
                shut_down(disk)
                started.kill()

    def go_on() -> Result:
        return train("fit", *ON_DISK, cwd=trial, disk=COMPOSED, limit_s=HANG_S)

    with mounted(disk, *source):
        return verdict_of(run, reference, announced, go_on, foreign={foreign: b"of another program"})


@contextmanager
def prepare_states(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Count the operations of each act."""
    cases: list[tuple[Act, int]] = []
    for act in CUT:
        planned = operations(act, folder / act.__name__)
        cases += [(act, at) for at in range(1, len(planned) + 2)]

    def run_trial(number: int) -> Outcome:
        act, at = cases[number % len(cases)]
        root = prepared(folder / f"trial{number}")
        what = f"{act.__name__}: the power cut before operation {at}, seed {number}"
        try:
            assert_survives_power_cut(act, root, ForgetfulDisk(at, seed=number), what)
        except AssertionError as error:
            return Outcome(Verdict.lost, str(error))
        shutil.rmtree(root)
        return PASSED

    yield Trials(count, run_trial)


CLASSES = (
    FaultClass(
        key="power_cuts",
        title=f"{CUTS} power cuts of a real ext4",
        what="The file system is shut down under a run, without writing its journal out: at a random moment or right "
        "after an announcement, with or without an fsync of another program before. Then it is mounted again, and "
        f"the run continues to the next cut, {CUTS} times.",
        promises="L1 L2 L3 L4 L6",
        counts={Size.quick: 4, Size.full: 100, Size.nightly: 700},
        prepare=prepare_cuts,
        skipped=why_no_ext4,
        share=6.0,
    ),
    FaultClass(
        key="power_states",
        title="Power cut in a model of a disk",
        what="Before each operation of a save, a replacement and a removal the power is cut: what was not fsynced is "
        "lost, kept, garbled or torn, and renames that were not fsynced are taken back, by seed.",
        promises="L1 L2",
        counts={Size.quick: 200, Size.full: 2000, Size.nightly: 20_000},
        prepare=prepare_states,
        share=4.0,
    ),
)
