"""Replay the checkpoints that a command names as `RUN@stepN` and that no disk has."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_cli.addons.exact.replay_plan import plan_replay
from trainer_cli.addons.jobs import own_command
from trainer_cli.errors import CheckpointError, ExitCode, UserError
from trainer_cli.ranks import without_ranks
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.runs.select import has_step, named_steps
from trainer_cli.schema.sections import TrainConfig

_STDERR = 2


def provide_fork(config: TrainConfig, *, replays: bool = True, config_dir: Path | None = None) -> None:
    """Replay what `ckpt=` names, if a fit loads it: a run that has a checkpoint resumes instead."""
    if config.ckpt is None:
        return
    run = RunDir(config.run_dir)
    if not run.catalog(run.folder_for(config.checkpoint.folder)).names():
        patterns = [config.ckpt] if isinstance(config.ckpt, str) else config.ckpt
        provide_steps(patterns, replays=replays, config_dir=config_dir)


def provide_steps(
    patterns: Sequence[str],
    *,
    replays: bool = True,
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
) -> None:
    """Write into `RUN/replayed` each step that a pattern names as `RUN@stepN`, unless its checkpoint is on the disk.

    It is replayed in a process of its own, because a replay sets seeds, threads and kernels for the whole process.

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
        try:
            plan = plan_replay(run, step, verify=False)
        except UserError as error:
            # Who names a checkpoint that cannot be gets the exit code of that, in whatever command.
            raise CheckpointError(f"{run}@step{step}: {error.what}", cure=error.cure) from error
        if not replays:
            raise CheckpointError(
                f"{run}@step{step}: there is no checkpoint of that step",
                cure=f"To compute it: train replay {shlex.quote(str(run))} {step} --keep ({plan}).",
            )
        print(f"{run}@step{step} was not kept: {plan}", file=sys.stderr, flush=True)
        flags = [] if config_dir is None else ["--config-dir", str(config_dir)]
        command = own_command(["replay", str(run), str(step), *overrides, "--keep", "--quiet", *flags])
        # This process may be a rank of another training, and its output an answer that a program reads.
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STDERR, env=without_ranks(os.environ))
        if done.returncode != ExitCode.DONE:
            raise CheckpointError(f"{run}@step{step} could not be replayed, for the reason above")
