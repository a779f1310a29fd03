"""Seconds that `train replay` takes for k steps, beside a `train fit` of as many."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from settings import Settings
from table import Column, Row, Table
from timing import Samples, children_processor, interleaved, run, seconds

TRAIN = (sys.executable, "-m", "trainer_cli")
FIT = (*TRAIN, "fit", "digits_mlp", "run_dir=run", "checkpoint.save_interval=null", "device=cpu")
"""With a checkpoint before the first step and one after the last."""
START, REPLAY_START = "train fit, 1 step", "train replay, 1 step"
LIMIT = "a start + 1.1 × the steps"
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
COLUMNS = [Column("process", "s", 2, resolution=0.03), Column("processor", "s", 2, resolution=0.03)]


def measure(settings: Settings) -> list[Table]:
    """One table. The replay begins at step 0, and looks at the last step."""
    steps = settings.pick(smoke=10, quick=2000, whole=5000)
    fit, replay = f"train fit, {steps:,} steps", f"train replay, {steps:,} steps"
    with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
        _fit(folder, steps)
        measures = {
            START: partial(_fit_anew, settings.scratch, 1),
            REPLAY_START: partial(_timed, (*TRAIN, "replay", "run", "1"), folder),
            fit: partial(_fit_anew, settings.scratch, steps),
            replay: partial(_timed, (*TRAIN, "replay", "run", str(steps)), folder),
        }
        samples, skipped = interleaved(measures, settings.rounds_or(3, 5), warm=settings.warm, needed=list(measures))
    samples[LIMIT] = most_for_replay(samples[START], samples[fit])
    rows = [Row(name, samples[name]) for name in (LIMIT, START, fit, REPLAY_START, replay)]
    notes = [
        "Whole processes, from their start to their end, of `digits_mlp` with its evaluations. The replay computes all "
        "steps from the checkpoint before the first one, compares each record, and prints the last step. The goal "
        f"is at most `{LIMIT}`: the start is a fit of one step, and the steps are the additional time of a fit of all "
        "of them."
    ]
    return [Table("replay", f"Replaying {steps:,} steps", LIMIT, COLUMNS, rows, {"steps": steps}, skipped, notes)]


def most_for_replay(start: Samples, fit: Samples) -> Samples:
    """The most that a replay is to take, of each round: a start, and 1.1 times the steps."""
    return {
        column: [one + 1.1 * (whole - one) for one, whole in zip(start[column], fit[column], strict=True)]
        for column in start
    }


def _fit_anew(scratch: Path, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        return _fit(folder, steps)


def _fit(folder: str, steps: int) -> dict[str, float]:
    return _timed((*FIT, f"loop.max_duration={steps}"), folder)


def _timed(command: tuple[str, ...], folder: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    with children_processor(figures, "processor"):
        figures["process"] = seconds(lambda: run(command, env=ENV, cwd=folder))
    return figures
