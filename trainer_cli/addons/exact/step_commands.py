"""The commands that look at a step, or an evaluation, of a run that has failed in it."""

from __future__ import annotations

import shlex
from pathlib import Path

from trainer_cli.addons.exact.replay_plan import earliest_start
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.runs import RunDir


def describe_commands(run: Path, first: int, last: int, *, loads: bool = True) -> str | None:
    """A sentence with the commands that look at steps of a run; None if they cannot be replayed.

    Several steps are those in which the loss began not to be finite.

    Args:
        loads: whether the samples can be loaded.
    """
    start = earliest_start(RunDir(run))
    if start is None or start >= last:
        return None
    first = max(first, start + 1)
    name = shlex.quote(str(run))
    if first < last:
        # No --show: of many steps it would load and draw each sample.
        search = f"`train bisect {name} '{TRAIN_PREFIX}loss is not finite'` finds the step and its samples"
        return f"{search}, and `train replay {name} {first}..{last}` computes these steps again."
    words = f"{name} {first}"
    shows = " --show` shows" if loads else "` lists"
    return f"`train replay {words}` computes the step again, and `train data {words}{shows} the samples."


def describe_evaluation(run: Path, step: int) -> str | None:
    """A sentence with the command that looks at the evaluation after a step; None if it cannot be replayed."""
    start = earliest_start(RunDir(run))
    if start is None or start >= step:
        return None
    return f"`train replay {shlex.quote(str(run))} {step}` evaluates again, and names the sample."
