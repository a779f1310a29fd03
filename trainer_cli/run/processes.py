"""In which process a config is trained: this one, one that is started again after a failure, or one of several."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainer_cli.config.processes import check_processes
from trainer_cli.config.resolvers import one_moment
from trainer_cli.errors import ExitCode
from trainer_cli.parallel.peers import LostRankError, PeerError, is_of_peer, noting, waited
from trainer_cli.parallel.process_group import ALONE, ProcessGroup, from_environment
from trainer_cli.parallel.ranks import ranks_in, refuse_other_processes, tasks_without_srun

if TYPE_CHECKING:
    from trainer_cli.config.compose import Composed

log = logging.getLogger(__name__)


def fit_in_processes(
    compose: Callable[[], Composed], again: Sequence[str], *, supervised: bool, allow_pickle: bool = False
) -> int:
    """Fit, and return the exit code.

    Args:
        compose: makes the config; called once, by rank 0 if there are several processes.
        again: arguments of `train` that start this again, as a process that ends when this one does.
        supervised: this process was started by them.
    """
    with one_moment():
        return _fit_in_processes(compose, again, supervised=supervised, allow_pickle=allow_pickle)


def _fit_in_processes(
    compose: Callable[[], Composed], again: Sequence[str], *, supervised: bool, allow_pickle: bool
) -> int:
    ranks = ranks_in(os.environ)
    if ranks.world_size > 1:

        def composed_by_main() -> Composed:
            composed = compose()
            refuse_other_processes(ranks, composed.config.parallel.processes_per_node)
            with composed.placing():
                check_processes(composed.config, ranks.world_size)
            return composed

        return _fit_as_rank(composed_by_main, allow_pickle=allow_pickle)
    composed = compose()
    config = composed.config
    processes = config.parallel.processes_per_node or 1
    if not supervised and (config.restarts.max > 0 or processes > 1):
        _refuse_early(composed, processes)
    if config.restarts.max > 0 and not supervised:
        from trainer_cli.run.supervise import supervise

        return supervise(config, again)
    if processes > 1:
        from trainer_cli.parallel.launch import launch

        return launch(again, processes)
    if config.parallel.strategy != "single" and (tasks := tasks_without_srun(os.environ)) is not None:
        print(
            f"train: warning: the Slurm job has {tasks} tasks, but srun did not start this process: it trains alone",
            file=sys.stderr,
        )
    elif config.parallel.strategy == "ddp" and config.parallel.processes_per_node is None:
        print(
            "train: warning: parallel=ddp trains in this process alone: set parallel.processes_per_node, or start the "
            "processes by torchrun or srun",
            file=sys.stderr,
        )
    if config.parallel.strategy == "fsdp":
        # One process needs a group, too.
        return _fit_as_rank(lambda: composed, allow_pickle=allow_pickle)
    # Only now: a mistake in the config is answered without what training needs.
    from trainer_cli.run.fit import fit

    return fit(composed, allow_pickle=allow_pickle)


def _refuse_early(composed: Composed, processes: int) -> None:
    """Refuse what the config and the run directory show before processes are started, each of which would find it.

    Raises:
        TrainError: as `fit` would.
    """
    from trainer_cli.run.run_dir import RunDir
    from trainer_cli.run.start import accepted_changes, refuse_no_optimizer

    with composed.placing():
        refuse_no_optimizer(composed)
        check_processes(composed.config, processes)
        run = RunDir(composed.config.run_dir)
        if run.exists_as_run():
            accepted_changes(run, composed)


def _fit_as_rank(compose: Callable[[], Composed], *, allow_pickle: bool) -> int:
    """Fit as one of the processes that torchrun or srun has started, with the config that rank 0 composes.

    Only the rank that fails says why; the others end with the same exit code as an error of the training.
    """
    # Where rank 0 serves the store and ends, torch writes a warning of thirty lines on each other rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        group = from_environment(os.environ, alone_too=True)
    except PeerError as error:
        return _after_a_peer(error, ALONE)
    try:
        with noting("while rank 0 composed the config"):
            composed = group.on_main(compose)
        group.limit(composed.config.parallel.timeout_s)
        from trainer_cli.run.fit import fit

        code = fit(composed, allow_pickle=allow_pickle, group=group)
        # The launcher ends all when the first ends early, and rank 0 has the summary to write.
        with noting("while the ranks ended"):
            group.barrier()
        return code
    except Exception as error:
        if is_of_peer(error):
            return _after_a_peer(error, group)
        if not group.fails_first(error):
            return int(getattr(error, "exit_code", ExitCode.FAILED))
        if not group.is_main:
            print(f"train: on rank {group.rank} of {group.world_size}:", file=sys.stderr)
        raise
    finally:
        group.close()


def _after_a_peer(error: Exception, group: ProcessGroup) -> int:
    """The exit code after another rank failed. The first rank that finds one gone says so."""
    if not isinstance(error, PeerError):
        error = group.lost(waited(error, "while the run was started"))
    if isinstance(error, LostRankError) and group.fails_first():
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code
