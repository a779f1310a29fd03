"""Compose the config of a fit, and fit in the process that it asks for: this one, a rank, or child processes.

An add-on starts child processes: those that are restarted after a failure (`restarts.max`), and the ranks of this
machine (`parallel.processes_per_node`). Each is an ordinary `train fit`, and fits in its own process.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from trainer_cli.auto_values import AUTO
from trainer_cli.config import Composed, compose, diff, from_yaml, given_value, share_time
from trainer_cli.errors import UserError
from trainer_cli.fit_parts import FIT_IN_CHILDREN
from trainer_cli.keys import OF_ONE_COMMAND
from trainer_cli.origin import keep_project, of_source, share_source, use_kept_source
from trainer_cli.parallel import ALONE, ProcessGroup
from trainer_cli.processes.override_text import text_of
from trainer_cli.processes.rank import run_as_rank
from trainer_cli.ranks import (
    is_restarted,
    job_of,
    read_ranks,
    refuse_other_processes,
    tasks_of_mpi,
    tasks_without_srun,
)
from trainer_cli.runs import RunDir
from trainer_cli.schema import ANEW, RESUME_WORDS, TrainConfig
from trainer_cli.scratch import scratch_folder
from trainer_cli.selection import ckpt_argument, provide_steps, run_of
from trainer_cli.terminal import format_count, format_first
from trainer_cli.user_key import is_signed

log = logging.getLogger(__name__)

Observe = Callable[[Composed, ProcessGroup], AbstractContextManager[object]]


def compose_fit(overrides: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config") -> Composed:
    """Compose the config of a fit.

    With `resume=RUN`, `resume=RUN@step500` and the like it is the config of that run, with the overrides on top.

    Where Slurm or torchrun starts the command again, it is the config by which this job has trained the run, and its
    source that the run has kept.

    Raises:
        UserError: they name another run than `resume=` does.
    """
    composed = _compose_fit(overrides, config_dir, config_name)
    run, attempt = RunDir(composed.config.run_dir), _find_earlier_attempt(composed.config)
    if attempt is None or composed.config.source == "project":
        return composed
    use_kept_source(run, attempt["attempt"], of_source(overrides), config_dir)
    # That of another command of this job, or of another user, is not taken.
    if not is_signed([run.read_config(), composed.overrides], attempt.get("config_mac")):
        return _compose_fit(overrides, config_dir, config_name)
    stored = from_yaml(run.config_file, trusted=True, config_dir=config_dir, config_name=config_name)
    stored = stored.with_values({key: composed.raw[key] for key in OF_ONE_COMMAND})
    # A value of `auto` was found by the earlier attempt.
    if changes := [str(change) for change in diff(stored.raw, composed.raw) if not str(change.new).startswith(AUTO)]:
        log.warning(
            "the config is the one of this job's earlier attempt (%s): here differs %s", run.path, format_first(changes)
        )
    return stored._replace(overrides=composed.overrides)


def _find_earlier_attempt(config: TrainConfig) -> dict[str, Any] | None:
    """The last attempt of a run that this job of Slurm or torchrun made before it was started again."""
    job = job_of(os.environ, os.getppid()) if is_restarted(os.environ) else None
    attempts = reversed(RunDir(config.run_dir).attempts) if job is not None else ()
    return next((attempt for attempt in attempts if attempt.get("job") == job), None)


def _compose_fit(overrides: Sequence[str], config_dir: Path | None, config_name: str) -> Composed:
    """`compose_fit` with the source of the project."""
    named = given_value(overrides, "resume")
    names_checkpoint = named is not None and named not in RESUME_WORDS
    if named is not None and names_checkpoint:
        run = run_of(named)
        directory = RunDir(run)
        if directory.exists_as_run():
            changes = [override for override in overrides if not override.startswith("resume=")]
            _refuse_other_run(directory, named, changes)
            resume = "must" if run == named else text_of(named)
            # The run may have been moved: its config still names the directory in which it began.
            changes += [f"run_dir={text_of(str(directory.path))}", f"resume={resume}"]
            return from_yaml(directory.config_file, changes, config_dir=config_dir, config_name=config_name)
    composed = compose(overrides, config_dir=config_dir, config_name=config_name)
    # Otherwise the run that `resume=` names does not exist, and a later check reports that.
    if not names_checkpoint:
        composed.refuse_shipped_default()
    return composed


def _refuse_other_run(run: RunDir, named: str, changes: Sequence[str]) -> None:
    """Refuse a `name` or `run_dir` of another run beside `resume=RUN`, which continues that run."""
    name, directory = given_value(changes, "name"), given_value(changes, "run_dir")
    other = None
    if name is not None and "{" not in name and name != run.path.name:
        stored = from_yaml(run.config_file, trusted=True, missing_ok=True).config.name
        other = f"name={name}" if name != stored else None
    if directory is not None and "{" not in directory and Path(directory).resolve() != run.path.resolve():
        other = f"run_dir={directory}"
    if other is not None:
        fork = shlex.join(["train", "fit", *changes]) + (
            "" if given_value(changes, "ckpt") else f" {ckpt_argument(named)}"
        )
        raise UserError(
            f"resume={named} continues the run {run.path}, and {other} names another",
            where="resume",
            cure=f"To begin that one with these weights: `{fork}`; to continue {run.path}, leave {other} out.",
        )


def provide_fork(config: TrainConfig, *, replays: bool = True, config_dir: Path | None = None) -> None:
    """Compute the steps that `ckpt=` names, if a fit loads them: a run that has a checkpoint resumes instead.

    Args:
        replays, config_dir: as in `provide_steps`.
    """
    if config.ckpt is None:
        return
    run = RunDir(config.run_dir)
    if not run.catalog(run.folder_for(config.checkpoint.folder)).names():
        patterns = [config.ckpt] if isinstance(config.ckpt, str) else config.ckpt
        provide_steps(patterns, replays=replays, config_dir=config_dir)


def fit_in_processes(
    compose: Callable[[], Composed],
    again: Sequence[str],
    *,
    supervised: bool,
    takes_source: bool = False,
    allow_pickle: bool = False,
    observe: Observe = lambda composed, group: nullcontext(),
) -> int:
    """Fit, and return the exit code.

    Args:
        compose: composes the config; called once, on rank 0.
        again: arguments of `train` with which a child process does the same; it ends with this process.
        supervised: this process is such a child.
        takes_source: `again` may have `--submitted=FOLDER`, the source that all attempts are trained by.
        observe: makes what is entered around the training, in each process that trains.
    """

    def fit(composed: Composed, group: ProcessGroup) -> int:
        # Imported here: a mistake in the config is reported before torch is imported.
        from trainer_cli.running import fit

        composed = share_source(composed, group)
        with observe(composed, group):
            return fit(composed, allow_pickle=allow_pickle, group=group)

    with share_time():
        return _fit_in_processes(compose, again, fit, supervised=supervised, takes_source=takes_source)


def _fit_in_processes(
    compose: Callable[[], Composed],
    again: Sequence[str],
    fit: Callable[[Composed, ProcessGroup], int],
    *,
    supervised: bool,
    takes_source: bool,
) -> int:
    """Train in this process, as one rank of many, or in children, as the config and the environment ask for."""
    ranks = read_ranks(os.environ)
    if ranks.world_size > 1:

        def composed_by_main() -> Composed:
            composed = _resume_if_restarted(compose())
            refuse_other_processes(ranks, composed.config.parallel.processes_per_node)
            composed.check_processes(ranks.world_size)
            return composed

        return run_as_rank(composed_by_main, fit)
    composed = _resume_if_restarted(compose())
    config = composed.config
    processes = config.parallel.processes_per_node or 1
    # Mistakes are found here, once: each child would find the same, after it has imported torch.
    if not supervised and (config.restarts.max > 0 or processes > 1):
        _refuse_early(composed, processes)
    mpi_rank, mpi_size = tasks_of_mpi(os.environ) or (0, 1)
    if mpi_size > 1 and mpi_rank == 0 and not supervised:
        print(
            f"train: warning: mpirun has started {format_count(mpi_size, 'process')}, whose ranks are not used: each "
            "trains alone; start them by torchrun or srun",
            file=sys.stderr,
        )
    if processes > 1 or (config.restarts.max > 0 and not supervised):
        setting = f"parallel.processes_per_node={processes}" if processes > 1 else f"restarts.max={config.restarts.max}"
        with ExitStack() as stack:
            if takes_source and config.restarts.max > 0 and not supervised:
                verb, *words = again
                again = [verb, *_keep_submitted(composed, words, stack), *words]
            return FIT_IN_CHILDREN.need(setting)(config, again, supervised=supervised)
    if config.parallel.strategy != "single" and (tasks := tasks_without_srun(os.environ)) is not None:
        print(
            f"train: warning: the Slurm job has {tasks} tasks, but srun did not start this process: it trains alone",
            file=sys.stderr,
        )
    elif config.parallel.strategy == "ddp" and config.parallel.processes_per_node is None:
        print(
            "train: warning: parallel=ddp trains in this process alone: for two add parallel.processes_per_node=2, or "
            "start torchrun --nproc-per-node 2 -m trainer_cli fit NAME parallel=ddp",
            file=sys.stderr,
        )
    if config.parallel.strategy == "fsdp":
        # One process needs a group, too.
        return run_as_rank(lambda: composed, fit)
    return fit(composed, ALONE)


def _keep_submitted(composed: Composed, words: Sequence[str], stack: ExitStack) -> list[str]:
    """The flag by which all attempts are trained by the source of the first; it is kept until `stack` is closed."""
    if composed.config.source == "project" or any(word.startswith("--submitted") for word in words):
        return []
    folder = stack.enter_context(scratch_folder("train-submitted-"))
    kept = keep_project(folder, composed.project_root, composed.config_dirs)
    return [] if kept is None else [f"--submitted={kept}"]


def _resume_if_restarted(composed: Composed) -> Composed:
    """Without `resume=anew` where Slurm or torchrun starts the command again, which would move the new run away."""
    if composed.config.resume == ANEW and _find_earlier_attempt(composed.config) is not None:
        return composed.with_values({"resume": "auto"})
    return composed


def _refuse_early(composed: Composed, processes: int) -> None:
    """Check the config and the run directory once, before each child process would report the same error.

    Raises:
        TrainError: `fit` would refuse them.
    """
    from trainer_cli.running import accepted_changes, refuse_no_optimizer

    with composed.placing():
        refuse_no_optimizer(composed)
        composed.check_processes(processes)
        run = RunDir(composed.config.run_dir)
        if run.exists_as_run() and composed.config.resume != ANEW:
            accepted_changes(run, composed)
