"""kill -9 at random moments, again and again: in the end everything is as if nothing had happened.

`TRAIN_KILLS` sets how many kills each experiment gets, `TRAIN_KILLS_SEED` when they come (scripts/faults).
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import SMALL, Running, running, trained
from compare import assert_same_run, metrics

from trainer_cli.checkpoint.naming import Hidden, HiddenName

KILLS = int(os.environ.get("TRAIN_KILLS", "3"))
SEED = int(os.environ.get("TRAIN_KILLS_SEED", "0"))
TRAININGS = {
    "digits_mlp": ("experiment=digits_mlp", "loop.max_duration=12ep", "checkpoint.ephemeral_save_interval=4"),
    "digits": ("experiment=digits", "model.channels=[4,8,8]", "loop.max_duration=6ep", "checkpoint.save_interval=2ep",
               "checkpoint.ephemeral_save_interval=3"),
}  # fmt: skip


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


@pytest.mark.timeout(100 + 30 * KILLS)
@pytest.mark.parametrize(("experiment", "writer"), [("digits_mlp", "process"), ("digits", "thread")])
def test_kills_at_random_moments_change_nothing(experiment: str, writer: str, tmp_path: Path) -> None:
    """Saves are behind the training on any machine: a process writes them, or a thread."""
    training = (
        *TRAININGS[experiment],
        "loop.log_interval=5",
        "checkpoint.save_async=true",
        f"checkpoint.writer={writer}",
    )
    reference = uninterrupted(training, tmp_path)
    moments = random.Random(f"{SEED} {experiment}")
    killed, number = 0, 0
    while killed < KILLS:
        run = tmp_path / str(number)
        number += 1
        while killed < KILLS:
            phase = moments.choice(("start-up", "training", "saving"))
            if not is_killed(training, run, reference, Moment(phase, moments.random())):
                break
            killed += 1
        trained(*training, f"run_dir={run}", cwd=tmp_path)
        assert_same_run(run, reference.run)
        steps = [record["step"] for record in metrics(run)]
        assert steps == sorted(set(steps))


def uninterrupted(training: tuple[str, ...], folder: Path) -> Reference:
    """Train from the beginning to the end."""
    run = folder / "reference"
    before = time.monotonic()
    with running("fit", *training, f"run_dir={run}", cwd=folder) as started:
        _until(started, lambda: any(run.glob("tensorboard/*")))
        begun = time.monotonic()
        result = started.end()
    assert result.code == 0, result.err
    return Reference(run, begun - before, time.monotonic() - begun)


def is_killed(training: tuple[str, ...], run: Path, reference: Reference, moment: Moment) -> bool:
    """Start, and kill at that moment; False where the training ended first, as it should."""
    logs = len(list(run.glob("tensorboard/*")))
    with running("fit", *training, f"run_dir={run}", cwd=run.parent) as started:
        if moment.wait(started, run, reference, logs, KILLS):
            started.signal(signal.SIGKILL)
        result = started.end()
    assert result.code in (-signal.SIGKILL, 0), result.err
    return result.code != 0


def test_a_start_waits_for_a_save_that_a_killed_training_handed_over(tmp_path: Path) -> None:
    """What its writer process still holds becomes the newest checkpoint, and the run goes on from there."""
    trained(*SMALL, "loop.hard_stop=10st", "run_dir=run", cwd=tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    run_id = json.loads((checkpoints / "step10" / "manifest.json").read_text())["run_id"]
    staging = checkpoints / str(HiddenName(Hidden.tmp, "step10", run_id, 1))
    (checkpoints / "step10").rename(staging)
    held = os.open(staging, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    log = tmp_path / "run" / "train.log"
    with running("fit", *SMALL, "run_dir=run", cwd=tmp_path) as started:
        started.wait_for(lambda: "handed over" in log.read_text(), "waiting")
        staging.rename(checkpoints / "step10")
        os.close(held)
        result = started.end()
    assert result.code == 0, result.err
    assert "resuming at step 10" in result.err
