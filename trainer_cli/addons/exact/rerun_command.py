"""`train rerun RUN -o NEW`: make a run again, and compare everything that it recorded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.commands import add_overrides
from trainer_cli.errors import ExitCode

if TYPE_CHECKING:
    from trainer_cli.addons.exact.rerun import Rerun
    from trainer_cli.config import Composed
    from trainer_cli.parallel import ProcessGroup
    from trainer_cli.trainer import Callback

EXAMPLES = """examples:
  train rerun runs/digits -o runs/digits-again
  train rerun digits.tar.gz -o runs/digits-again trust=[source]    a file of `train pack`, from somebody else
  train rerun runs/digits -o runs/edited source=project            with the project as it is now

The run is trained again from step 1, with the source, config and seed that it keeps, as a run of its own in NEW. Every
record is compared with metrics.jsonl, and every kept checkpoint with the state, bit for bit. If it is stopped or
killed, the same command continues it.

Exit code 0: all are equal. 1: some are not; the first is printed, with what is known of the cause.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the new directory and the overrides."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory, or a file of `train pack`")
    parser.add_argument("-o", "--output", metavar="NEW", type=Path, required=True, help="directory of the new run")
    add_overrides(parser, "key=value, as where it trains; source=project, trust=[source]")


def run(args: argparse.Namespace) -> int:
    """Train the run again in as many processes as it had, and print how far it is equal."""
    from trainer_cli.processes import fit_in_processes
    from trainer_cli.runs import Run

    # Rank 0 alone composes, and so has it.
    rerun: Rerun | None = None

    def compose() -> Composed:
        from trainer_cli.addons.exact.rerun import Rerun

        nonlocal rerun
        rerun = Rerun(args.run_dir, args.output, args.overrides)
        return rerun.compose()

    def observe(composed: Composed, group: ProcessGroup) -> Callback:
        from trainer_cli.addons.exact.rerun_observer import RerunObserver

        return RerunObserver(rerun, group)

    code = fit_in_processes(compose, args.as_child, supervised=args.supervised, observe=observe)
    if args.supervised or rerun is None or code not in (ExitCode.DONE, ExitCode.STOPPED_EARLY):
        return code
    original = rerun.original
    reached = Run(rerun.new.path).reached
    step, is_complete = min(reached, original.last), reached >= original.last
    if (difference := rerun.find_difference(step)) is not None:
        print("\n".join([f"not equal: {difference}", *(f"likely cause: {cause}" for cause in rerun.find_causes())]))
        return int(ExitCode.FAILED)
    ends = original.ends and f"; later steps are not made again: {original.ends}"
    print(rerun.describe_compared(step) + (ends if is_complete else ", so far"))
    return int(ExitCode.DONE) if is_complete else code
