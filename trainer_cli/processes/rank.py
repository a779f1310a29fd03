"""Train as one of the ranks that torchrun, srun or a parent has started together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from trainer_cli.config import Composed
from trainer_cli.errors import ExitCode
from trainer_cli.parallel import (
    ALONE,
    LostRankError,
    PeerError,
    ProcessGroup,
    is_of_peer,
    join_processes,
    noted_activity,
    noting,
)


def run_as_rank(compose: Callable[[], Composed], work: Callable[[Composed, ProcessGroup], int]) -> int:
    """Do the work of one of the processes that torchrun or srun has started, with the config that rank 0 composes.

    Only the rank that fails reports the error; all ranks exit with its code.

    Args:
        work: called on every rank; returns the exit code.
    """
    # If rank 0, which serves the store, ends first, torch logs a warning of thirty lines on each other rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        group = join_processes(os.environ, alone_too=True)
    except PeerError as error:
        return _after_a_peer(error, ALONE)
    try:
        with noting("while rank 0 composed the config"):
            composed = group.on_main(compose)
        # It is set only now: the limit is in the config, which rank 0 has just sent.
        group.set_timeout(composed.config.parallel.timeout_s)
        code = work(composed, group)
        # A launcher kills all ranks when one exits with 75, and rank 0 may still be writing the summary.
        with noting("while the ranks ended"):
            group.barrier()
        return code
    except Exception as error:
        if is_of_peer(error):
            return _after_a_peer(error, group)
        # The first rank to claim reports; on the others the same error would only repeat it.
        if not group.claim_failure(error):
            return int(getattr(error, "exit_code", ExitCode.FAILED))
        if not group.is_main:
            print(f"train: on rank {group.rank} of {group.world_size}:", file=sys.stderr)
        raise
    finally:
        group.close()


def _after_a_peer(error: Exception, group: ProcessGroup) -> int:
    """The exit code after another rank failed. The first rank that notices the loss reports it."""
    if not isinstance(error, PeerError):
        error = group.lost_error(noted_activity(error, "while the run was started"))
    if isinstance(error, LostRankError) and group.claim_failure():
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code
