"""kill -9 at every change that a run makes to the disk: of saves, retention, logs and records, and of a resume."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import warm
from command import ROOT, Result, environment, train, warm_server

from campaign.fault_class import FaultClass, Size, Trials
from campaign.oracle import HANG_S, Reference, announced_steps, make_reference, verdict_of
from campaign.verdict import Outcome, Verdict

MORTAL = ROOT / "tests/support/mortal.py"
TRAINING = (
    "model=mlp", "model.hidden=[4]", "loggers=jsonl", "loop.max_duration=6", "loop.log_interval=1",
    "loop.eval_interval=null", "loop.eval_steps=1", "checkpoint.pre_train_checkpoint=false",
    "checkpoint.save_interval=null", "checkpoint.ephemeral_save_interval=2", "run_dir=run",
)  # fmt: skip
"""Saves steps 2 and 4 for safety, and step 6 at the end; removes those before."""
LINKED = (
    "model.hidden=[512,512]", "freeze=[layers.1.*,layers.4.*]", "checkpoint.save_interval=2",
    "checkpoint.ephemeral_save_interval=1", "checkpoint.max_checkpoints=2",
)  # fmt: skip
"""A frozen matrix of 1 MiB: each step is saved, with a link to its file; steps 4 and 6 stay."""
SYNCHRONOUS, BACKGROUND = "checkpoint.save_async=false", "checkpoint.save_async=true"
ALL = 1_000_000
"""As many trials as there are changes."""


def run_mortal(at: int, *arguments: str, cwd: Path, fault: str = "kill") -> Result:
    """Run the command, killed at its change number `at`; 0: never, and the result has the changes."""
    # With `resume=RUN` the config is that of a run in the current folder, and a sweep has several.
    is_shared = arguments[0] == "fit" and not any(word == "-m" or word.startswith("resume=") for word in arguments)
    with tempfile.TemporaryDirectory() as folder:
        operations = Path(folder, "operations")
        process = warm.WarmProcess(
            warm_server(), [str(at), fault, str(operations), *arguments], cwd=cwd, env=environment(), program=MORTAL,
            composed=arguments[1:] if is_shared else None,
        )  # fmt: skip
        with process:
            try:
                out, err = process.communicate(timeout=HANG_S)
            finally:
                process.kill()
        changes = operations.read_text().splitlines() if operations.exists() else []
    return Result(process.returncode or 0, out, err, changes)


def count_changes(lines: Sequence[str]) -> int:
    """Of a list with announcements among the changes."""
    return sum(not line.startswith("committed") for line in lines)


def spread(points: Sequence[int], count: int) -> list[int]:
    """So many of the points, evenly spread; all where there are no more."""
    if count >= len(points):
        return list(points)
    return [points[index * len(points) // count] for index in range(count)]


@contextmanager
def prepare(folder: Path, count: int, _size: Size, *, stage: str) -> Iterator[Trials]:
    """Train without a fault, and list the changes."""
    how = BACKGROUND if stage == "background" else SYNCHRONOUS
    training = ("fit", *TRAINING, how, *(LINKED if stage == "links" else ()))
    reference = make_reference(folder, *training[1:], disk={})
    template = folder / "template"
    template.mkdir()
    changes = run_mortal(0, *training, cwd=template).operations
    assert {line.split()[0] for line in changes} >= {"mkdir", "open", "pwrite", "fsync", "rename", "remove", "rmdir"}
    points: Sequence[int] = range(1, count_changes(changes) + 1)
    fault = "kill"
    shutil.rmtree(template / "run")
    if stage == "tear":
        only_changes = [line for line in changes if not line.startswith("committed")]
        points, fault = [n for n in points if only_changes[n - 1].split()[0] in ("write", "pwrite")], "tear"
    if stage == "links":
        # From the first link on, after which several checkpoints have one file.
        assert sum(line.startswith("link") for line in changes) >= 5
        linked = next(n for n, line in enumerate(changes, 1) if line.startswith("link"))
        points = range(count_changes(changes[:linked]), count_changes(changes) + 1)
    if stage == "resume":
        # Killed within the save of step 6: there is a checkpoint to resume, and a partial one.
        renamed = next(n for n, line in enumerate(changes, 1) if line.startswith("rename") and "step6" in line)
        run_mortal(count_changes(changes[:renamed]), *training, cwd=template)
        points = range(1, count_changes(_changes_of_resume(training, template, folder / "resumed")) + 1)
    points = spread(points, count)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        shutil.copytree(template, trial)
        outcome = kill_at(points[number], training, trial, reference, fault)
        if outcome.verdict is Verdict.passed:
            shutil.rmtree(trial)
        return outcome

    yield Trials(len(points), run_trial)


def _changes_of_resume(training: Sequence[str], template: Path, folder: Path) -> list[str]:
    shutil.copytree(template, folder)
    return run_mortal(0, *training, cwd=folder).operations


def kill_at(point: int, training: Sequence[str], folder: Path, reference: Reference, fault: str) -> Outcome:
    """Kill a start at this change, and let the run go on to its end."""
    killed = run_mortal(point, *training, cwd=folder, fault=fault)
    announced = announced_steps(killed)
    # A run with saves in the background may make fewer changes than the one that was counted.
    if not killed.killed and killed.code != 0:
        return Outcome(Verdict.hard_fail, f"ended with {killed.code}: {killed.err}", len(announced))
    return verdict_of(
        folder / "run", reference, announced, lambda: train(*training, cwd=folder, disk={}, limit_s=HANG_S)
    )


CLASSES = tuple(
    FaultClass(key, title, what, "L1 L2 L3 L4 L6", {Size.quick: 24, Size.full: ALL, Size.nightly: ALL},
               partial(prepare, stage=stage), share=3.5)
    for key, stage, title, what in (
        ("kill_points", "save", "`kill -9` at every change to the disk",
         "The process is killed before each opening, write, fsync, renaming and removal of a whole run, by saves, "
         "retention, logs and records."),
        ("kill_points_resume", "resume", "`kill -9` at every change of a resume",
         "A run that was killed in its last save is started, and killed again before each change that this start "
         "makes."),
        ("torn_writes", "tear", "`kill -9` in the midst of every write",
         "Half of a write is done, then the process is killed."),
        ("kill_points_background", "background", "`kill -9` at every change, saves in the background",
         "As above, with saves by the writer thread while training continues."),
        ("links", "links", "`kill -9` at every change of saves that link to a file of the one before",
         "A run with a frozen layer, whose checkpoints share its file, is killed before each change after the first "
         "link, and started again. Every checkpoint on the disk is verified, and equals that of an undisturbed run."),
    )
)  # fmt: skip
