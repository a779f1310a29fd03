"""kill -9 of the runs of a sweep, or of the sweep, while each run has a GPU of its own: none has two at a time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from command import LIMIT_S, Running, running, train
from compare import assert_same_run
from device_watch import environment_of, make_watched_project, read_notes

import trainer_cli.addons.jobs.devices  # noqa: F401  (without the add-on there is no such class)
from campaign.fault_class import FaultClass, Size, Trials
from campaign.kills import wait_until
from campaign.oracle import HANG_S
from campaign.verdict import PASSED, Outcome, Verdict

RUNS = [f"seed={seed}" for seed in range(4)]
SWEEP = (
    "fit", "-m", "--devices", "all", "experiment=mine", "device=cpu", "seed=range(4)", "loggers=jsonl",
    "checkpoint.ephemeral_save_interval=4",
)  # fmt: skip
"""Four runs on two devices, which the CPU stands in for."""
KILLS = 2
START_S, TRAINING_S = 2.0, 1.0
"""About how long it takes from the command to its first run, and from there to the end of the run."""


@contextmanager
def prepare_sweeps(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Run the sweep without a fault."""
    undisturbed = make_watched_project(folder / "undisturbed")
    result = train(*SWEEP, cwd=undisturbed, limit_s=HANG_S, **environment_of(undisturbed))
    assert result.code == 0, result.err

    def run_trial(number: int) -> Outcome:
        project = make_watched_project(folder / f"trial{number}")
        outcome = kill_and_repeat(project, undisturbed, random.Random(number))
        if outcome.verdict is Verdict.passed:
            shutil.rmtree(project)
        return outcome

    yield Trials(count, run_trial)


def kill_and_repeat(project: Path, undisturbed: Path, chance: random.Random) -> Outcome:
    """Kill a run or the sweep, each time in a new start of the command; then let it end, and compare all runs."""
    env = environment_of(project)
    for _ in range(KILLS):
        with running(*SWEEP, cwd=project, **env) as command:
            kills_sweep = kill_at_random(command, project, chance)
            if kills_sweep:
                # Its runs may still save when the command is repeated.
                command.process.wait(LIMIT_S)
            elif (ended := command.end()).code not in (0, 1):
                return Outcome(Verdict.hard_fail, f"ended with {ended.code}: {ended.err}")
    result = train(*SWEEP, cwd=project, limit_s=HANG_S, **env)
    if result.code != 0:
        return Outcome(Verdict.hard_fail, f"the last start ends with {result.code}: {result.err}")
    most, processes = read_notes(project)
    if any(jobs > 1 for jobs in most.values()) or sorted(processes) != RUNS:
        return Outcome(Verdict.hard_fail, f"most runs of a device: {most}; {processes}")
    for name in RUNS:
        try:
            assert_same_run(project / "runs/mine/sweep" / name, undisturbed / "runs/mine/sweep" / name)
        except AssertionError as error:
            return Outcome(Verdict.diverged, f"{name} does not end as in the undisturbed sweep: {error}")
    return PASSED


def kill_at_random(command: Running, project: Path, chance: random.Random) -> bool:
    """Kill the command or one of the runs at a random moment: before the first run starts, or after one or two have.

    Returns whether it was the command.
    """
    before, started = count_starts(project), chance.randrange(3)
    delay_s = chance.random() * (TRAINING_S if started else START_S)
    kills_sweep = chance.random() < 0.6
    wait_until(command, lambda: count_starts(project) >= before + started)
    moment = time.monotonic() + delay_s
    wait_until(command, lambda: time.monotonic() >= moment)
    alive = [pid for notes in read_notes(project)[1].values() for _, pid in notes if belongs_to(pid, project)]
    if kills_sweep or not alive:
        command.signal(signal.SIGKILL)
        return True
    with suppress(ProcessLookupError):
        os.kill(chance.choice(alive), signal.SIGKILL)
    return False


def count_starts(project: Path) -> int:
    """How often a run has begun on a device."""
    return sum(map(len, read_notes(project)[1].values()))


def belongs_to(pid: int, project: Path) -> bool:
    """Whether a process lives, and works in the folder of this project: its number may be another's by now."""
    try:
        return os.readlink(f"/proc/{pid}/cwd") == str(project.resolve())
    except OSError:
        return False


CLASSES = (
    FaultClass(
        key="devices",
        title="kill -9 in a sweep with a GPU for each run",
        what="A sweep of four runs on two devices, for which the CPU stands in, is started twice, and each time the "
        "command or one of its runs is killed at a random moment. The command is repeated at once, while runs of "
        "the killed one may still save. No device ever has two runs, and all runs end as in an undisturbed sweep.",
        promises="L1 L4 L6",
        counts={Size.quick: 1, Size.full: 10, Size.nightly: 50},
        prepare=prepare_sweeps,
        share=6.0,
    ),
)
