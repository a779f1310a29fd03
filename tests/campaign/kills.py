"""kill -9 at random moments: in start-up, in training, and while a checkpoint is written."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from command import Result, Running, running, train

from campaign.fault_class import FaultClass, Size, Trials
from campaign.oracle import HANG_S, Reference, announced_steps, check_kept, make_reference, verdict_of
from campaign.verdict import Outcome, Verdict

PHASES = ("start-up", "training", "saving")
TRAINING = (
    "experiment=digits_mlp", "model.hidden=[16]", "loop.max_duration=120", "loop.log_interval=5",
    "loop.eval_interval=30", "checkpoint.save_interval=40", "checkpoint.max_checkpoints=2",
    "checkpoint.ephemeral_save_interval=4",
)  # fmt: skip
"""Half a second of steps, thirty saves, four evaluations."""
BACKGROUND, SYNCHRONOUS = "checkpoint.save_async=true", "checkpoint.save_async=false"
SECOND_KILL = 0.3
"""Share of the trials in which the start after a kill is killed too."""
COLD_EVERY = 20
"""Every so manieth trial is a new interpreter, so that some kills come while Python starts."""


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

    def wait(self, started: Running, run: Path, undisturbed: Undisturbed, logs_before: int) -> bool:
        """Wait for it; False where the process has ended before."""
        if self.phase == "start-up":
            start_s = undisturbed.cold_start_s if self.cold else undisturbed.start_s
            return _wait_s(started, start_s * self.fraction)
        if not wait_until(started, lambda: len(list(run.glob("tensorboard/*"))) > logs_before):
            return False
        if not _wait_s(started, undisturbed.training_s * self.fraction):
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
    reference = make_reference(folder, *training)
    undisturbed = Undisturbed(reference, *_times(folder, training))

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        return kill_at(moments(number, how), training, trial / "run", undisturbed)

    yield Trials(count, run_trial)


def moments(number: int, how: str) -> list[Moment]:
    """When the starts of a trial are killed, one after the other."""
    chance = random.Random(f"{number} {how}")
    first = Moment(PHASES[number % 3], chance.random(), cold=number % COLD_EVERY == 0)
    again = [Moment(chance.choice(PHASES), chance.random())] if chance.random() < SECOND_KILL else []
    return [first, *again]


def kill_at(moments: list[Moment], training: tuple[str, ...], run: Path, undisturbed: Undisturbed) -> Outcome:
    """Kill a run at these moments, check after each what is kept, then let it go on to its end."""
    announced: list[int] = []
    for moment in moments:
        result = _kill(training, run, undisturbed, moment)
        announced += announced_steps(result)
        if result.code not in (-signal.SIGKILL, 0):
            return Outcome(Verdict.hard_fail, f"ended with {result.code}: {result.err}", len(announced))
        kept = check_kept(run, undisturbed.reference, announced)
        if kept.verdict is not Verdict.passed:
            return kept

    def go_on() -> Result:
        return train("fit", *training, f"run_dir={run}", cwd=run.parent, limit_s=HANG_S)

    return verdict_of(run, undisturbed.reference, announced, go_on)


def _kill(training: tuple[str, ...], run: Path, undisturbed: Undisturbed, moment: Moment) -> Result:
    """Start, and kill at that moment, unless the training ends before."""
    logs = len(list(run.glob("tensorboard/*")))
    with running("fit", *training, f"run_dir={run}", cwd=run.parent, cold=moment.cold) as started:
        if moment.wait(started, run, undisturbed, logs):
            started.signal(signal.SIGKILL)
        return started.end()


def _times(folder: Path, training: tuple[str, ...]) -> tuple[float, float, float]:
    """The seconds from a start to the first step, warm and cold, and from there to the end."""
    times = []
    for name, cold in (("warm", False), ("cold", True)):
        run = folder / name
        began = time.monotonic()
        with running("fit", *training, f"run_dir={run}", cwd=folder, cold=cold) as started:
            wait_until(started, lambda run=run: any(run.glob("tensorboard/*")))  # type: ignore[misc]
            trains = time.monotonic()
            started.end()
        times.append((trains - began, time.monotonic() - trains))
    (warm_s, training_s), (cold_s, _) = times
    return warm_s, cold_s, training_s


CLASSES = tuple(
    FaultClass(
        key=key,
        title=f"`kill -9` at a random moment, {title}",
        what="The process is killed in start-up, in training or in a save; three in ten of the starts after it too. "
        f"Every {COLD_EVERY}th first start is a new interpreter.",
        promises="L1 L2 L3 L4 L6",
        counts={Size.quick: 20, Size.full: 300, Size.nightly: 3000},
        prepare=partial(prepare_kills, how=how),
        share=2.0,
    )
    for key, title, how in (
        ("kills", "saves in the background", BACKGROUND),
        ("kills_sync", "synchronous saves", SYNCHRONOUS),
    )
)
