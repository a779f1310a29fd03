"""Errors of a disk at every N-th call: of a save, a replacement and a removal, and of all files of a whole run."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import faulty_files
from acts import ACTS, Act, assert_survives_error, faulty, operations, prepared
from command import Result, environment, train, warm_server
from printed import untimed
from warm import WarmProcess

from campaign.fault_class import FaultClass, Size, Trials
from campaign.kills import COMPOSED
from campaign.oracle import HANG_S, Reference, announced_steps, make_reference, verdict_of
from campaign.trial_runs import ending_of
from campaign.verdict import PASSED, Outcome, Verdict
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.storage.local import LocalStorage

Case = TypeVar("Case")
NUMBERS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
TRAINING = (
    "experiment=digits_mlp", "model.hidden=[4]", "loop.max_duration=6", "loop.log_interval=1",
    "loop.eval_interval=3", "loop.eval_steps=1", "checkpoint.save_interval=3",
    "checkpoint.ephemeral_save_interval=2", "checkpoint.save_async=false",
    "+loggers.csv={_target_: trainer_cli.CsvLogger}", "run_dir=run",
)  # fmt: skip
POLICIES = ("checkpoint.on_save_error=raise", "checkpoint.on_save_error=warn")


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """So many of the cases at most, evenly spread."""
    count = min(count, len(cases))
    return [cases[index * len(cases) // count] for index in range(count)]


@contextmanager
def prepare_saves(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Count the operations of each act."""
    cases: list[tuple[Act, int, int, bool]] = []
    for act in ACTS:
        planned = operations(act, folder / act.__name__)
        cases += [
            (act, at, number, persistent)
            for at in range(1, len(planned) + 1)
            for number in NUMBERS
            for persistent in (False, True)
        ]
    cases = spread(cases, count)

    def run_trial(number: int) -> Outcome:
        root = prepared(folder / f"trial{number}")
        outcome = fail_act(root, *cases[number])
        shutil.rmtree(root)
        return outcome

    yield Trials(len(cases), run_trial)


def fail_act(root: Path, act: Act, at: int, number: int, persistent: bool) -> Outcome:
    """Fail an operation of an act: the error names it, and nothing that was committed is lost."""
    what = f"{act.__name__}: {errno.errorcode[number]} at operation {at}, {'for good' if persistent else 'once'}"
    try:
        assert_survives_error(act, root, faulty(at, number=number, persistent=persistent), what)
    except AssertionError as error:
        return Outcome(Verdict.lost, str(error))
    return PASSED


@dataclass(frozen=True)
class LogFault:
    """Which call of a run fails, how, and under which policy."""

    at: int
    number: int
    persistent: bool
    policy: str

    @property
    def arguments(self) -> tuple[str, ...]:
        return str(self.at), str(self.number), "forever" if self.persistent else "once"


@contextmanager
def prepare_runs(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault, and count the calls of a whole run that change its files."""
    (folder / "planned").mkdir()
    _, calls = run_faulty(folder / "planned", LogFault(0, errno.EIO, False, POLICIES[0]))
    everything = [
        LogFault(at, number, persistent, policy)
        for at in range(1, len(calls) + 1)
        for number in NUMBERS
        for persistent in (False, True)
        for policy in POLICIES
    ]
    cases = spread(everything, count)
    references = {}
    for policy in sorted({case.policy for case in cases}):
        place = folder / policy.rpartition("=")[2]
        place.mkdir()
        references[policy] = make_reference(place, *TRAINING, policy, disk=COMPOSED)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        return fail_run(trial, cases[number], references[cases[number].policy])

    yield Trials(len(cases), run_trial)


def run_faulty(cwd: Path, fault: LogFault) -> tuple[Result, list[str]]:
    """Run the command with this fault; returns how it ended, and the calls that change its files."""
    calls = cwd.parent / f"{cwd.name}.calls"
    overrides = (*TRAINING, fault.policy)
    arguments = (*fault.arguments, str(calls), "fit", *overrides)
    program = Path(faulty_files.__file__)
    with WarmProcess(
        warm_server(), arguments, cwd=cwd, env=environment(), program=program, composed=overrides
    ) as process:
        try:
            out, err = process.communicate(HANG_S)
        finally:
            process.kill()
    return Result(process.returncode or 0, out, untimed(err)), calls.read_text().splitlines()


def fail_run(trial: Path, fault: LogFault, reference: Reference) -> Outcome:
    """Run with the fault, then again without."""
    result, calls = run_faulty(trial, fault)
    where = calls[fault.at - 1] if fault.at <= len(calls) else "no call"
    what = f"{errno.errorcode[fault.number]} at {where}, {fault.arguments[2]}, {fault.policy}"
    announced = announced_steps(result)
    if result.code not in (0, 1, 2, 4, 75) or "Traceback" in result.err:
        return Outcome(Verdict.hard_fail, f"{what}: {ending_of(result)}", len(announced))
    if result.code and os.strerror(fault.number) not in result.err:
        return Outcome(Verdict.hard_fail, f"{what}: not the error: {ending_of(result)}")

    if result.code == 0 and (fault.persistent or "it will be tried again" in result.err):
        # The last removal of a finished run may have failed: a later training in its folder clears up after it.
        LocalStorage(trial / "run/checkpoints", run_id=RunDir(trial / "run").run_id).sweep()

    def go_on() -> Result:
        return train("fit", *TRAINING, fault.policy, cwd=trial, disk=COMPOSED, limit_s=HANG_S)

    outcome = verdict_of(trial / "run", reference, announced, go_on, same_checkpoints=fault.policy == POLICIES[0])
    if outcome.verdict is Verdict.passed:
        return outcome
    return Outcome(outcome.verdict, f"{what}: {outcome.detail}; {ending_of(result)}", outcome.announced)


CLASSES = (
    FaultClass(
        key="io_errors",
        title="Error of the disk at the N-th call of a save or a removal",
        what="Each operation of a save, a replacement and a removal fails with EIO, ENOSPC, EDQUOT or EROFS, once or "
        "for good, in Python.",
        promises="L1 L2 L5",
        counts={Size.quick: 200, Size.full: 1500, Size.nightly: 10_000},
        prepare=prepare_saves,
        share=3.5,
    ),
    FaultClass(
        key="io_errors_run",
        title="Error of the disk at the N-th call of a whole run",
        what="A call that changes a file of the run (checkpoints, metrics.jsonl, metrics.csv, event files, config, "
        "summary) fails with EIO, ENOSPC, EDQUOT or EROFS, once or for good, under both values of on_save_error.",
        promises="L1 L2 L4 L5 L6",
        counts={Size.quick: 16, Size.full: 100, Size.nightly: 10_000},
        prepare=prepare_runs,
        share=3.0,
        skipped=lambda: None if sys.platform == "linux" else "needs /proc",
    ),
)
