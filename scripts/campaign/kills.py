"""kill -9 at random moments: in start-up, in training, and while a checkpoint is written."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from command import Result, Running, running, train

from campaign.fault_class import FaultClass, Size, Trials
from campaign.oracle import HANG_S, Reference, announced_steps, check_kept, make_reference, verdict_of
from campaign.verdict import Outcome, Verdict

PHASES = ("start-up", "training", "saving")
TRAINING = (
    "experiment=digits_mlp", "model.hidden=[16]", "loop.max_duration=40", "loop.log_interval=5",
    "loop.eval_interval=20", "checkpoint.save_interval=20", "checkpoint.max_checkpoints=2",
    "checkpoint.remove=all_without_rule", "checkpoint.ephemeral_save_interval=4", "run_dir=run",
)  # fmt: skip
"""Eleven saves, two evaluations."""
STEPS = 40
COMPOSED: dict[str, Any] = {}
"""A disk without a fault. With it equal commands share one composed config, which takes most of a start."""
BACKGROUND, SYNCHRONOUS = "checkpoint.save_async=true", "checkpoint.save_async=false"
KILLS = 3
"""A trial kills so many starts in a row: what follows a kill is killed too."""
COLD_EVERY = 20
"""One trial in so many starts a new interpreter, so that some kills come while Python starts."""


@dataclass(frozen=True)
class Undisturbed:
    """The undisturbed run, and how long it took to begin and to train."""

    reference: Reference
    start_s: float
    cold_start_s: float
    training_s: float


@dataclass(frozen=True)
class Moment:
    """When to kill: in start-up, in training, or in a save, after `fraction` of the time that it takes."""

    phase: str
    fraction: float
    cold: bool = False

    def wait(self, started: Running, run: Path, undisturbed: Undisturbed, logs_before: int, share_left: float) -> bool:
        """Wait for it; False where the process has ended before. `share_left`: of the training, at this start."""
        if self.phase == "start-up":
            start_s = undisturbed.cold_start_s if self.cold else undisturbed.start_s
            return _wait_s(started, start_s * self.fraction)
        if not wait_until(started, lambda: len(list(run.glob("tensorboard/*"))) > logs_before):
            return False
        if not _wait_s(started, undisturbed.training_s * share_left * self.fraction):
            return False
        return self.phase == "training" or wait_until(started, lambda: any(run.glob("checkpoints/.tmp.*")))


def wait_until(started: Running, condition: Callable[[], bool]) -> bool:
    """Wait for a condition; False where the process has ended before."""
    until = time.monotonic() + HANG_S
    while not condition():
        if started.process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.0005)
    return True


def _wait_s(started: Running, seconds: float) -> bool:
    end = time.monotonic() + seconds
    wait_until(started, lambda: time.monotonic() >= end)
    return started.process.poll() is None


@contextmanager
def prepare_kills(folder: Path, count: int, _size: Size, *, how: str) -> Iterator[Trials]:
    """Train without a fault, and time the phases."""
    training = (*TRAINING, how)
    reference = make_reference(folder, *training, disk=COMPOSED)
    start_s, training_s = measure_phases(folder / "warm", training, cold=False)
    cold_start_s = measure_phases(folder / "cold", training, cold=True)[0] if count >= COLD_EVERY else start_s
    undisturbed = Undisturbed(reference, start_s, cold_start_s, training_s)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        outcome = kill_at(choose_moments(number, how), training, trial, undisturbed)
        if outcome.verdict is Verdict.passed:
            shutil.rmtree(trial)
        return outcome

    yield Trials(count, run_trial)


def choose_moments(number: int, how: str) -> list[Moment]:
    """When the starts of a trial are killed, one after the other."""
    chance = random.Random(f"{number} {how}")
    first = Moment(PHASES[number % 3], chance.random(), cold=number % COLD_EVERY == COLD_EVERY - 1)
    return [first, *(Moment(chance.choice(PHASES), chance.random()) for _ in range(KILLS - 1))]


def kill_at(moments: Sequence[Moment], training: tuple[str, ...], folder: Path, undisturbed: Undisturbed) -> Outcome:
    """Kill a run at these moments, check after each what is kept, then let it go on to its end."""
    announced: list[int] = []
    for moment in moments:
        share_left = 1 - max(announced, default=0) / STEPS
        result = _kill(training, folder, undisturbed, moment, share_left)
        announced += announced_steps(result)
        if result.code not in (-signal.SIGKILL, 0):
            return Outcome(Verdict.hard_fail, f"ended with {result.code}: {result.err}", len(announced))
        kept = check_kept(folder / "run", undisturbed.reference, announced)
        if kept.verdict is not Verdict.passed:
            return kept

    def go_on() -> Result:
        return train("fit", *training, cwd=folder, disk=COMPOSED, limit_s=HANG_S)

    return verdict_of(folder / "run", undisturbed.reference, announced, go_on)


def _kill(
    training: tuple[str, ...], folder: Path, undisturbed: Undisturbed, moment: Moment, share_left: float
) -> Result:
    """Start, and kill at that moment, unless the training ends before."""
    run = folder / "run"
    logs = len(list(run.glob("tensorboard/*")))
    disk = None if moment.cold or moment.phase == "start-up" else COMPOSED
    with running("fit", *training, cwd=folder, cold=moment.cold, disk=disk) as started:
        if moment.wait(started, run, undisturbed, logs, share_left):
            started.signal(signal.SIGKILL)
        return started.end()


def measure_phases(folder: Path, training: tuple[str, ...], *, cold: bool) -> tuple[float, float]:
    """The seconds from a start to the first step, and from there to the end."""
    folder.mkdir()
    began = time.monotonic()
    with running("fit", *training, cwd=folder, cold=cold) as started:
        wait_until(started, lambda: any(folder.glob("run/tensorboard/*")))
        trains = time.monotonic()
        started.end()
    return trains - began, time.monotonic() - trains


CLASSES = tuple(
    FaultClass(
        key=key,
        title=f"`kill -9` at {KILLS} random moments, {title}",
        what=f"{KILLS} starts in a row are killed, each in start-up, in training or in a save, and the files are "
        f"checked after each. Every {COLD_EVERY}th first start is a new interpreter.",
        promises="L1 L2 L3 L4 L6",
        counts={Size.quick: 6, Size.full: 100, Size.nightly: 1000},
        prepare=partial(prepare_kills, how=how),
        share=5.0,
    )
    for key, title, how in (
        ("kills", "saves in the background", BACKGROUND),
        ("kills_sync", "synchronous saves", SYNCHRONOUS),
    )
)
