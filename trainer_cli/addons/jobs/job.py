"""`train _job FILE`: the internal verb by which a sweep starts each of its runs."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.commands import add_config_dir, tolerate_lost_output

if TYPE_CHECKING:
    from trainer_cli.config import Composed
    from trainer_cli.parallel import ProcessGroup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file with the frozen config, the overrides that it was composed with, the folder of configs, and the
    length at which it pauses."""
    parser.add_argument("file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--hold", type=Path, action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--metric", help=argparse.SUPPRESS)
    parser.add_argument("--until", help=argparse.SUPPRESS)
    parser.add_argument("--submitted", type=Path, help=argparse.SUPPRESS)
    add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Fit with the config in the file; stop when the parent process ends."""
    from trainer_cli.addons.jobs.devices import hold
    from trainer_cli.addons.jobs.sweep_table import recording_error
    from trainer_cli.config import Composed
    from trainer_cli.processes import stop_with_parent

    hold(args.hold)
    if not args.supervised:
        stop_with_parent()
    tolerate_lost_output()
    with recording_error(args.file):
        # Imported here: an error of these imports is recorded too.
        from trainer_cli.origin import use_submitted
        from trainer_cli.processes import FitEnd, fit_in_processes, provide_fork

        if args.submitted is not None:
            use_submitted(args.submitted, args.config_dir)
        end = FitEnd()

        def compose() -> Composed:
            """Read the frozen config again, and tell it those that act at the end of the fit."""
            until = {}
            if args.until is not None:
                until["loop.hard_stop"] = int(args.until) if args.until.isdecimal() else args.until
            composed = Composed.thaw(args.file, args.overrides, config_dir=args.config_dir, values=until)
            provide_fork(composed.config, config_dir=args.config_dir)
            if not args.supervised:
                end.expect(composed.config)
            return composed

        def observe(composed: Composed, group: ProcessGroup) -> AbstractContextManager[object]:
            if args.metric is None:
                return nullcontext()
            # Imported here: it imports torch.
            from trainer_cli.addons.jobs.needed_metric import NeededMetric

            return NeededMetric(args.metric)

        with end:
            return fit_in_processes(
                compose, args.as_child, supervised=args.supervised, takes_source=True, observe=observe
            )
