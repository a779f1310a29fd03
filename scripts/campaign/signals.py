"""Signals that stop a run, from its first instants to its last."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

from command import Result, Running, running, train

from campaign.fault_class import FaultClass, Size, Trials
from campaign.kills import COMPOSED, Undisturbed, measure_phases, wait_until
from campaign.oracle import HANG_S, announced_steps, make_reference, verdict_of
from campaign.verdict import Outcome, Verdict

TRAINING = (
    "experiment=digits_mlp", "model.hidden=[16]", "loop.max_duration=60", "loop.log_interval=5",
    "loop.eval_interval=5", "checkpoint.save_interval=20", "checkpoint.max_checkpoints=2",
    "checkpoint.ephemeral_save_interval=4", "run_dir=run",
)  # fmt: skip
"""A third of the time is evaluation, a third saving."""
WAYS = ((SIGTERM,), (SIGINT,), (SIGHUP,), (SIGUSR1,), (SIGINT, SIGINT), (SIGTERM, SIGTERM))
FIRST_S = 0.02
"""When the earliest signal comes, in seconds after the start of the process."""
STOPPED, INTERRUPTED = 75, 130
STEP_AND_SAVE_S = 0.1
"""The longest step, evaluation batch or save of this training on an idle core, and one checkpoint to load."""
LIMIT_S = 0.5 + STEP_AND_SAVE_S
"""From the signal to the exit, without the time in which other processes had the cores."""


@dataclass(frozen=True)
class Moment:
    """When the signals come: in a phase, after `fraction` of the time that it takes."""

    phase: str
    fraction: float

    def wait(self, started: Running, run: Path, undisturbed: Undisturbed, logs_before: int) -> None:
        """Wait for it, or for the end of the process."""
        began = time.monotonic()

        def pass_s(seconds: float, since: float) -> bool:
            return wait_until(started, lambda: time.monotonic() >= since + seconds)

        if self.phase in ("start", "cold start"):
            start_s = undisturbed.cold_start_s if self.phase == "cold start" else undisturbed.start_s
            pass_s(FIRST_S + start_s * self.fraction, began)
        elif self.phase == "end":
            wait_until(started, (run / "checkpoints/step60").exists)
            pass_s(0.2 * self.fraction, time.monotonic())
        elif wait_until(started, lambda: len(list(run.glob("tensorboard/*"))) > logs_before):
            pass_s(undisturbed.training_s * self.fraction, time.monotonic())
            if self.phase == "saving":
                wait_until(started, lambda: any(run.glob("checkpoints/.tmp.*")))


PHASES = ("training", "start", "saving", "end", "training", "cold start", "start", "saving", "training", "end", "start")


@contextmanager
def prepare_signals(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a signal, and time the phases."""
    reference = make_reference(folder, *TRAINING, disk=COMPOSED)
    start_s, training_s = measure_phases(folder / "warm", TRAINING, cold=False)
    cold_start_s = measure_phases(folder / "cold", TRAINING, cold=True)[0] if count >= len(PHASES) else start_s
    undisturbed = Undisturbed(reference, start_s, cold_start_s, training_s)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        moment = Moment(PHASES[number % len(PHASES)], random.Random(number).random())
        way = WAYS[number // len(PHASES) % len(WAYS)]
        # One start in three is a resume, which loads a checkpoint.
        outcome = stop_at(moment, way, trial, undisturbed, resumes=number % 3 == 1)
        if outcome.verdict is Verdict.passed:
            shutil.rmtree(trial)
        return outcome

    yield Trials(count, run_trial)


def stop_at(
    moment: Moment, way: tuple[signal.Signals, ...], folder: Path, undisturbed: Undisturbed, *, resumes: bool
) -> Outcome:
    """Send a run signals at a moment, check how it ends, and let it go on to its end."""

    def fit(*more: str) -> Result:
        return train("fit", *TRAINING, *more, cwd=folder, disk=COMPOSED, limit_s=HANG_S)

    announced = announced_steps(fit("loop.hard_stop=30")) if resumes else []
    logs = len(list(folder.glob("run/tensorboard/*")))
    with running("fit", *TRAINING, cwd=folder, cold=moment.phase == "cold start") as started:
        moment.wait(started, folder / "run", undisturbed, logs)
        handled = catches(started.process.pid, way[0])
        signalled = time.monotonic()
        for number in way:
            started.signal(number)
            time.sleep(0.005)
        exit_s = wait_for_exit(started) - signalled
        result = started.end()
    announced += announced_steps(result)
    wanted = {0, STOPPED, *([INTERRUPTED] if way == (SIGINT, SIGINT) else [])}
    # Before a handler stands, the signal ends the process.
    if result.code not in (wanted if handled else {*wanted, -way[0]}):
        return Outcome(Verdict.hard_fail, f"{moment} {way}: ended with {result.code}: {result.err}", len(announced))
    if result.code == STOPPED and exit_s > LIMIT_S:
        return Outcome(Verdict.hard_fail, f"{moment} {way}: {exit_s:.2f} s to the exit: {result.err}", len(announced))
    outcome = verdict_of(folder / "run", undisturbed.reference, announced, fit)
    return replace(outcome, measured_s=exit_s if result.code == STOPPED else 0.0)


def wait_for_exit(started: Running) -> float:
    """Wait for the end of a process; returns its time, less the time that the process has waited for a core since.

    It is the time of the last look at which the process ran: on a busy machine the next one may be late.
    """
    pid = started.process.pid
    waited_s = [processor_wait_s(pid)]
    last = time.monotonic()
    until = last + HANG_S
    while runs(pid) and last < until:
        last = time.monotonic()
        waited_s.append(processor_wait_s(pid))
        time.sleep(0.001)
    # Threads that have ended are no longer in the sum.
    return last - (max(waited_s) - waited_s[0])


def runs(pid: int) -> bool:
    """Whether a process has not ended; one that has is a zombie until its parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processor_wait_s(pid: int) -> float:
    """How long the threads of a process were ready to run, and waited for a core."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            total_ns += int(thread.read_text().split()[1])
    return total_ns / 1e9


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


CLASSES = (
    FaultClass(
        key="signals",
        title="SIGTERM, Ctrl-C, SIGHUP, SIGUSR1, once and twice",
        what=f"One signal or two come from {FIRST_S} s after the start on: while Python starts, torch is imported, the "
        "config composed, a checkpoint loaded, in training, evaluation, a save and at the end. The "
        "process ends with 75 (130 at a second Ctrl-C) within one step, one save and half a second. Time during "
        "which it waits for a core does not count.",
        measures="from the signal to an exit with 75",
        promises="L1 L3 L4 L6",
        counts={Size.quick: 18, Size.full: 200, Size.nightly: 2000},
        prepare=prepare_signals,
        share=8.0,
    ),
)
