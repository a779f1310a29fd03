"""kill -9 at random moments, again and again: in the end everything is as if nothing had happened.

`TRAIN_KILLS` sets how many kills each experiment gets, `TRAIN_KILLS_SEED` when they come (scripts/faults).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import Running, running, trained
from compare import assert_same_run, metrics

KILLS = int(os.environ.get("TRAIN_KILLS", "2"))
SEED = int(os.environ.get("TRAIN_KILLS_SEED", "0"))
TRAININGS = {
    "digits_mlp": ("experiment=digits_mlp", "loop.max_duration=12ep", "checkpoint.ephemeral_save_interval=4"),
    "digits": ("experiment=digits", "model.channels=[4,8,8]", "loop.max_duration=6ep", "checkpoint.save_interval=2ep",
               "checkpoint.ephemeral_save_interval=3"),
}  # fmt: skip


COLD = "digits_mlp"
"""The experiment whose commands are new interpreters, so that some kills come while python starts."""


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run, and how long it took to begin and to train."""

    run: Path
    beginning_s: float
    training_s: float


@dataclass(frozen=True)
class Moment:
    """When to kill: in start-up, in training, or in a save; `delay` is a fraction of what may be waited for."""

    phase: str
    delay: float

    def wait(self, started: Running, run: Path, reference: Reference, logs_before: int, kills: int) -> bool:
        """Wait for it; False where the process has ended before."""
        if self.phase == "start-up":
            return _passed(started, reference.beginning_s * self.delay)
        if not _until(started, lambda: len(list(run.glob("tensorboard/*"))) > logs_before):
            return False
        # Short enough that most of the kills find something left to interrupt.
        if not _passed(started, 2 * reference.training_s * self.delay / max(kills, 1)):
            return False
        return self.phase == "training" or _until(started, lambda: any(run.glob("checkpoints/.tmp.*")))


def _passed(started: Running, seconds: float) -> bool:
    end = time.monotonic() + seconds
    _until(started, lambda: time.monotonic() >= end)
    return started.process.poll() is None


def _until(started: Running, condition: Callable[[], bool]) -> bool:
    while not condition():
        if started.process.poll() is not None:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.timeout(600 + 30 * KILLS)
@pytest.mark.parametrize("experiment", TRAININGS)
def test_kills_at_random_moments_change_nothing(experiment: str, tmp_path: Path) -> None:
    """Saves are in the background on any machine."""
    training = (*TRAININGS[experiment], "loop.log_interval=5", "checkpoint.save_async=true")
    cold = experiment == COLD
    reference = uninterrupted(training, tmp_path, cold)
    moments = random.Random(f"{SEED} {experiment}")
    killed, number = 0, 0
    while killed < KILLS:
        run = tmp_path / str(number)
        number += 1
        while killed < KILLS:
            phase = moments.choice(("start-up", "training", "saving"))
            if not is_killed(training, run, reference, Moment(phase, moments.random()), cold):
                break
            killed += 1
        trained(*training, f"run_dir={run}", cwd=tmp_path)
        assert_same_run(run, reference.run)
        steps = [record["step"] for record in metrics(run)]
        assert steps == sorted(set(steps))


def uninterrupted(training: tuple[str, ...], folder: Path, cold: bool) -> Reference:
    """Train from the beginning to the end."""
    run = folder / "reference"
    before = time.monotonic()
    with running("fit", *training, f"run_dir={run}", cwd=folder, cold=cold) as started:
        _until(started, lambda: any(run.glob("tensorboard/*")))
        begun = time.monotonic()
        result = started.end()
    assert result.code == 0, result.err
    return Reference(run, begun - before, time.monotonic() - begun)


def is_killed(training: tuple[str, ...], run: Path, reference: Reference, moment: Moment, cold: bool) -> bool:
    """Start, and kill at that moment; False where the training ended first, as it should."""
    logs = len(list(run.glob("tensorboard/*")))
    with running("fit", *training, f"run_dir={run}", cwd=run.parent, cold=cold) as started:
        if moment.wait(started, run, reference, logs, KILLS):
            started.signal(signal.SIGKILL)
        result = started.end()
    assert result.code in (-signal.SIGKILL, 0), result.err
    return result.code != 0
