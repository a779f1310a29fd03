"""`train fit`: train or resume; with `-m` one run for each combination of values."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.commands.command_line import (
    add_allow_pickle,
    add_config_arguments,
    add_job_limits,
    add_no_replay,
)
from trainer_cli.commands.streams import tolerate_lost_output
from trainer_cli.errors import ExitCode, UserError, one_line
from trainer_cli.fit_parts import RUN_SWEEP, JobLimits
from trainer_cli.ranks import read_ranks

if TYPE_CHECKING:
    from trainer_cli.config import Composed

EXAMPLES = """examples:
  train fit digits
  train fit digits optimizer.lr=3e-4 name=slow
  train fit resume=runs/digits loop.max_duration=40ep
  train fit --json digits
  train fit -m --jobs 2 digits optimizer.lr=1e-3,3e-3 'seed=range(3)'
  train fit -m --devices 0,2 digits 'seed=range(4)'
  train fit digits parallel=ddp parallel.processes_per_node=2
  torchrun --nproc-per-node 2 -m trainer_cli fit digits parallel=ddp
  train fit -m --submit slurm --submit partition=gpu --submit timeout_min=60 digits seed=1,2

`train list` shows what there is to choose, `train config --fields` every key with its default and meaning.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the overrides, the flags that say where configs are, and those of a sweep."""
    add_config_arguments(parser)
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="one run for each combination of values: key=a,b, range(…), choice(…), glob(…)",
    )
    add_allow_pickle(parser)
    add_no_replay(parser)
    parser.add_argument(
        "--json", action="store_true", help="print summary.json of the run at the end, and all else on stderr"
    )
    parser.add_argument("--submitted", type=Path, help=argparse.SUPPRESS)
    add_job_limits(parser, "1; with --devices one on each; with --submit slurm all", when="with -m: ")
    parser.add_argument(
        "--submit",
        action="append",
        metavar="WHAT",
        help="with -m: submit the runs by submitit: slurm, local, a .yaml file of parameters, or PARAMETER=VALUE; may "
        "be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Compose and check the config, then fit; or do so for each job of a sweep."""
    tolerate_lost_output()
    if args.multirun:
        if args.json:
            raise UserError("--json is for one run, and -m starts several", cure="`train top --json` lists them.")
        return _sweep(args)
    # They are refused rather than ignored: who gives them expects many runs.
    for flag, value in (("--jobs", args.jobs), ("--submit", args.submit), ("--jobs-per-device", args.jobs_per_device)):
        if value is not None:
            raise UserError(f"{flag} is for a sweep", cure="Add -m.")
    if args.devices is not None:
        raise UserError("--devices is for a sweep", cure="Add -m; a single run takes device=cuda:1.")
    from trainer_cli.commands.summary_at_end import SummaryAtEnd
    from trainer_cli.processes import FitEnd, compose_fit, fit_in_processes, provide_fork

    if args.submitted is not None:
        from trainer_cli.origin import use_submitted

        use_submitted(args.submitted, args.config_dir)
    # The last one ends first: a program that reads the summary finds all that the others have written.
    hooks: list[SummaryAtEnd | FitEnd] = [*([SummaryAtEnd()] if args.json else []), FitEnd()]

    def compose() -> Composed:
        composed = compose_fit(args.overrides, config_dir=args.config_dir, config_name=args.config_name)
        provide_fork(composed.config, replays=not args.no_replay, config_dir=args.config_dir)
        if not args.supervised:
            for sentence in describe_replaced_options(args.overrides):
                print(f"warning: {one_line(sentence)}", file=sys.stderr)
            # The parent of a supervised process writes it, after the last attempt. Of several ranks the main one
            # composes.
            for hook in hooks:
                hook.expect(composed.config)
        return composed

    # The summary is printed once.
    child = [word for word in args.as_child if word != "--json"]
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        return fit_in_processes(
            compose, child, supervised=args.supervised, takes_source=True, allow_pickle=args.allow_pickle
        )


def _sweep(args: argparse.Namespace) -> int:
    """Run a sweep, which `-m` asks for."""
    ranks = read_ranks(os.environ)
    # Rank 0 prints the mistake for all.
    if ranks.rank > 0:
        return int(ExitCode.USER)
    if ranks.world_size > 1:
        raise UserError("a sweep is started by one process, not by torchrun or srun", cure="Leave -m out.")
    return RUN_SWEEP.need("-m")(
        args.overrides,
        config_dir=args.config_dir,
        config_name=args.config_name,
        limits=JobLimits.read(args),
        submit=args.submit or (),
    )


def describe_replaced_options(arguments: Sequence[str]) -> Iterator[str]:
    """A sentence for each choice of a group, such as `callbacks=ema`, that a later choice of the group replaces."""
    from trainer_cli.keys import OPEN, SEVERAL

    chosen: dict[str, tuple[str, list[str]]] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        group = key.lstrip("+")
        options = [option.strip() for option in value.removeprefix("[").removesuffix("]").split(",")]
        is_choice = group in OPEN and all(option.isidentifier() and option != "null" for option in options)
        if not is_choice:
            continue
        before, earlier = chosen.get(group, (argument, options))
        if lost := [option for option in earlier if option not in options]:
            both = "" if group not in SEVERAL else f"; for all write '{group}=[{','.join([*lost, *options])}]'"
            yield f"{before} has no effect: {argument} replaces it{both}"
        chosen[group] = argument, options
