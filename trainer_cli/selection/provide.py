"""Compute the steps that `RUN@stepN` names and no checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer_cli.parts import REPLAY_STEP
from trainer_cli.runs import RunDir
from trainer_cli.selection.patterns import has_step, named_steps


def provide_steps(
    patterns: Sequence[str],
    *,
    replays: bool = True,
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
) -> None:
    """Write into `RUN/replayed` each step that a pattern names as `RUN@stepN`, unless its checkpoint is on the disk.

    Args:
        replays: False: refuse it.
        overrides: of the config of the run.

    Raises:
        CheckpointError: the run has not made that step, `replays` is False, or the replay failed, or its records are
            not those of the run.
    """
    for run, step in dict.fromkeys(named_steps(patterns)):
        # A folder of checkpoints without its run has no config to replay with. A damaged checkpoint is reported by what
        # reads it: what a user names is never replaced.
        if not RunDir(run).exists_as_run() or has_step(run, step):
            continue
        replay = REPLAY_STEP.need(f"{run}@step{step}, of which there is no checkpoint,")
        replay(run, step, replays=replays, overrides=overrides, config_dir=config_dir)
