"""A clock that jumps by years, forward and back, and times of files in any order: steps alone count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from command import Result, train

from campaign.fault_class import FaultClass, Size, Trials
from campaign.oracle import HANG_S, Reference, announced_steps, check_kept, make_reference, verdict_of
from campaign.trial_runs import ending_of
from campaign.verdict import Outcome, Verdict

YEAR_S = 365 * 86_400
TRAINING = (
    "experiment=digits_mlp", "model.hidden=[4]", "loop.max_duration=20", "loop.log_interval=1",
    "loop.eval_interval=5", "loop.eval_steps=1", "checkpoint.save_interval=5", "checkpoint.max_checkpoints=2",
    "checkpoint.ephemeral_save_interval=2", "+callbacks.clock._target_=jumping_clock.JumpingClock", "run_dir=run",
)  # fmt: skip


@contextmanager
def prepare(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train with the callback, and without a jump."""
    reference = make_reference(folder, *TRAINING)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        return jump_and_go_on(trial, reference, number)

    yield Trials(count, run_trial)


def jump_and_go_on(trial: Path, reference: Reference, number: int) -> Outcome:
    """Train in three attempts, each with jumps of its own; between them the files' times are shuffled."""
    chance, run = Random(f"clock {number}"), trial / "run"
    announced: list[int] = []
    for stop_at in sorted(chance.sample(range(1, 20), 2)):
        result = _fit(trial, chance, str(stop_at))
        announced += announced_steps(result)
        if result.code != 75:
            return Outcome(Verdict.hard_fail, f"{ending_of(result)}")
        kept = check_kept(run, reference, announced)
        if kept.verdict is not Verdict.passed:
            return kept
        for path in sorted(run.rglob("*")):
            moment = path.stat().st_mtime + chance.uniform(-3, 3) * YEAR_S
            os.utime(path, (moment, moment))
    return verdict_of(run, reference, announced, lambda: _fit(trial, chance, "0"))


def _fit(trial: Path, chance: Random, stop_at: str) -> Result:
    jumps = [chance.choice((-3, 3, 0, chance.uniform(-1, 1))) * YEAR_S for _ in range(3)]
    env: dict[str, Any] = {"JUMPS": " ".join(map(str, jumps)), "STOP_AT": stop_at}
    return train("fit", *TRAINING, cwd=trial, limit_s=HANG_S, **env)


CLASSES = (
    FaultClass(
        key="clock",
        title="Clock that jumps by up to three years",
        what="The clock of the process jumps at each step, and the times of all files are shuffled between three "
        "attempts.",
        promises="L1 L4 L6",
        counts={Size.quick: 2, Size.full: 10, Size.nightly: 200},
        prepare=prepare,
    ),
)
