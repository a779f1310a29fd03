"""`train fit`: train or resume; with `-m` one run for each combination of several values."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainer_cli.cli.main import add_allow_pickle, add_config_arguments
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.parallel.process_group import (
    LostRankError,
    PeerError,
    ProcessGroup,
    from_environment,
    is_of_peer,
    ranks_in,
)

if TYPE_CHECKING:
    from trainer_cli.config.compose import Composed

EXAMPLES = """examples:
  train fit +experiment=digits
  train fit +experiment=digits optimizer.lr=3e-4 name=slow
  train fit resume=runs/digits loop.max_duration=40ep
  train fit -m --jobs 2 +experiment=digits optimizer.lr=1e-3,3e-3 'seed=range(3)'

`train list` shows what there is to choose, `train config --fields` every key with its default and meaning.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides, the flags that say where configs are, and those of a sweep."""
    add_config_arguments(parser)
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="one run for each combination of values: key=a,b, range(…), choice(…), glob(…)",
    )
    add_allow_pickle(parser)
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, metavar="N", help="with -m: so many runs at a time (1)")


def run(args: argparse.Namespace) -> int:
    """Compose and check the config, then fit; or do so for each job of a sweep."""
    ranks = ranks_in(os.environ)
    several = ranks.world_size > 1
    if args.multirun:
        if ranks.rank > 0:
            return int(ExitCode.USER)
        if several:
            raise UserError("a sweep is started by one process, not by torchrun or srun", cure="Leave -m out.")
        from trainer_cli.run.sweep import sweep

        at_once = 1 if args.jobs is None else args.jobs
        return sweep(args.overrides, config_dir=args.config_dir, config_name=args.config_name, at_once=at_once)
    if args.jobs is not None:
        raise UserError("--jobs is for a sweep", cure="Add -m.")
    from trainer_cli.run.compose_fit import compose_fit

    compose = partial(compose_fit, args.overrides, config_dir=args.config_dir, config_name=args.config_name)
    if several:
        if args.supervised:
            from trainer_cli.run.children import stop_with_parent

            stop_with_parent()
        return _fit_as_rank(compose, allow_pickle=args.allow_pickle)
    composed = compose()
    if composed.config.restarts.max > 0 and not args.supervised:
        from trainer_cli.run.supervise import supervise

        return supervise(composed.config, _again(args))
    if args.supervised:
        from trainer_cli.run.children import stop_with_parent

        stop_with_parent()
    processes = composed.config.parallel.processes_per_node or 1
    if processes > 1:
        from trainer_cli.parallel.launch import launch

        return launch(["fit", *_again(args)], processes)
    if composed.config.parallel.strategy == "fsdp":
        # One process needs a group, too.
        return _fit_as_rank(lambda: composed, allow_pickle=args.allow_pickle)
    # Only now: a mistake in the config is answered without what training needs.
    from trainer_cli.run.fit import fit

    return fit(composed, allow_pickle=args.allow_pickle)


def _again(args: argparse.Namespace) -> list[str]:
    """The arguments that a supervised process is started with."""
    flags = {"--config-dir": args.config_dir, "--config-name": args.config_name}
    given = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
    return [*args.overrides, *given, *(["--allow-pickle"] if args.allow_pickle else []), "--supervised"]


def _fit_as_rank(compose: Callable[[], Composed], *, allow_pickle: bool) -> int:
    """Fit as one of the processes that torchrun or srun has started, with the config that rank 0 composes.

    Only the rank that fails says why; the others end with the same exit code as an error of the training.
    """
    group = from_environment(os.environ, alone_too=True)
    try:
        composed = group.on_main(compose)
        group.limit(composed.config.parallel.timeout_s)
        from trainer_cli.run.fit import fit

        code = fit(composed, allow_pickle=allow_pickle, group=group)
        # The launcher ends all when the first ends early, and rank 0 has the summary to write.
        group.barrier()
        return code
    except Exception as error:
        if is_of_peer(error):
            return _after_a_peer(error, group)
        if not group.fails_first():
            return int(getattr(error, "exit_code", ExitCode.FAILED))
        if not group.is_main:
            print(f"train: on rank {group.rank} of {group.world_size}:", file=sys.stderr)
        raise
    finally:
        group.close()


def _after_a_peer(error: Exception, group: ProcessGroup) -> int:
    """The exit code after another rank failed. The first rank that finds one gone says so."""
    if not isinstance(error, PeerError):
        error = group.lost("while the run was started or ended")
    if isinstance(error, LostRankError) and group.fails_first():
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code
