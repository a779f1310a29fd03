"""kill -9 at every change that a run makes to the disk while it keeps its source, and a sweep what it submits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from command import CODE, make_project, train

from campaign.fault_class import FaultClass, Size, Trials
from campaign.kill_points import ALL, SYNCHRONOUS, TRAINING, run_mortal, spread
from campaign.oracle import HANG_S, announced_steps, digest_of, make_reference, verdict_of
from campaign.verdict import PASSED, Outcome, Verdict
from trainer_cli.origin import DamagedSourceError, KeptSource
from trainer_cli.runs import RunDir


@contextmanager
def prepare(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault, and list the changes in the folder of the source."""
    training = ("fit", *TRAINING, SYNCHRONOUS)
    reference = make_reference(folder, *training[1:], disk={})
    template = folder / "template"
    template.mkdir()
    changes = run_mortal(0, *training, cwd=template).operations
    shutil.rmtree(template / "run")
    only_changes = [line for line in changes if not line.startswith("committed")]
    points = [number for number, line in enumerate(only_changes, 1) if "run/source" in line]
    assert {only_changes[number - 1].split()[0] for number in points} >= {"mkdir", "open", "fsync", "rename"}
    points = spread(points, count)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        shutil.copytree(template, trial)
        killed = run_mortal(points[number], *training, cwd=trial)
        again = partial(train, *training, cwd=trial, disk={}, limit_s=HANG_S)
        outcome = verdict_of(trial / "run", reference, announced_steps(killed), again)
        if outcome.verdict is Verdict.passed:
            outcome = _check_source(trial / "run", outcome)
        if outcome.verdict is Verdict.passed:
            shutil.rmtree(trial)
        return outcome

    yield Trials(len(points), run_trial)


def _check_source(run: Path, outcome: Outcome) -> Outcome:
    """Check that the attempts that were recorded have their source, whole, and that no other file is left."""
    attempts = json.loads((run / "summary.json").read_text())["attempts"]
    try:
        sources = [KeptSource.of_attempt(RunDir(run), attempt["attempt"]) for attempt in attempts]
    except DamagedSourceError as error:
        return Outcome(Verdict.lost, str(error))
    if None in sources:
        return Outcome(Verdict.lost, f"the source of an attempt is not kept: {attempts}")
    kept = {source.folder for source in sources if source is not None}
    left = [path for path in (run / "source").rglob("*") if path.is_file() and kept.isdisjoint(path.parents)]
    return Outcome(Verdict.lost, f"files are left: {left}") if left else outcome


SWEEP = ("fit", "mine", "loop.max_duration=3", "-m", "seed=range(1,2)")


@contextmanager
def prepare_submission(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train a sweep without a fault, and list its changes up to the start of its job."""
    reference = make_project(folder / "reference")
    changes = run_mortal(0, *SWEEP, cwd=reference).operations
    (last,) = (number for number, line in enumerate(changes, 1) if line == "open runs/mine/sweep/.jobs/seed=1.log")
    # Those of the project's files and folders, of the list of what was submitted, and of the config of the job.
    # The last ones first: the tests run one trial, which is to come after the submission.
    points = spread([n for n in range(last, 0, -1) if "/.jobs/" in changes[n - 1]], count)

    def run_trial(number: int) -> Outcome:
        project = make_project(folder / f"trial{number}")
        killed = run_mortal(points[number], *SWEEP, cwd=project)
        if not killed.killed:
            return Outcome(Verdict.hard_fail, f"the command was not killed: {killed}")
        if (project / "runs/mine/sweep/.jobs/submitted.json").exists():
            (project / "mine/parts.py").write_text(CODE.replace("- y) ** 2", "- y).abs()"))
        done = train(*SWEEP, "source=run", cwd=project, limit_s=HANG_S)
        if done.code != 0:
            return Outcome(Verdict.hard_fail, f"the same command with source=run ends with {done.code}: {done.err}")
        ends = [digest_of(root / "runs/mine/sweep/seed=1/checkpoints/step3") for root in (reference, project)]
        if ends[0] != ends[1]:
            return Outcome(Verdict.diverged, "the job has not trained what was submitted")
        shutil.rmtree(project)
        return PASSED

    yield Trials(len(points), run_trial)


CLASSES = (
    FaultClass(
        "submission", "`kill -9` between the submission of a sweep and its first job, then an edit",
        "The command is killed before each change of `.jobs`, and the project is edited if it had submitted it. With "
        "`source=run` the job trains what was submitted, bit for bit.",
        "L1 L6", {Size.quick: 2, Size.full: 12, Size.nightly: ALL}, prepare_submission,
    ),
    FaultClass(
        "source", "`kill -9` while a run keeps its source",
        "The process is killed before each opening, write, fsync and renaming in the folder of the source, before the "
        "first step. The next start keeps it whole.",
        "L1 L2 L6", {Size.quick: 8, Size.full: ALL, Size.nightly: ALL}, prepare,
    ),
)  # fmt: skip
