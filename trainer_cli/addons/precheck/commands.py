"""`train check data` and `train check model`: their arguments, and their reports."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainer_cli.auto_values import stand_ins
from trainer_cli.commands import Check, add_config_arguments
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.messages import to_console
from trainer_cli.running import showing_import
from trainer_cli.terminal import line_width, wrapped

if TYPE_CHECKING:
    from trainer_cli.addons.precheck.findings import PrecheckReport


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for reading samples of all sets (60)")
    parser.add_argument("--all", action="store_true", help="read every sample, however long it takes")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the steps on one batch (20)")
    parser.add_argument("--steps", type=int, metavar="N", default=100, help="steps on one batch (100)")


def _run(args: argparse.Namespace) -> int:
    """Compose the config, make the check, and print what it found."""
    for flag in ("seconds", "steps"):
        if not getattr(args, flag, 1) > 0:
            raise UserError(f"--{flag} is {getattr(args, flag):g}, but it must be above 0")
    with showing_import():
        from trainer_cli.addons.precheck.data_check import check_data
        from trainer_cli.addons.precheck.model_check import check_model
        from trainer_cli.config import compose

    composed = compose(args.overrides, config_dir=args.config_dir, config_name=args.config_name)
    composed.refuse_shipped_default()
    to_console(composed.config.logging.level)
    composed = composed.with_values(stand_ins(composed.config))
    composed.check_targets()
    with composed.placing():
        report: PrecheckReport = (
            check_model(composed, args.steps, args.seconds)
            if hasattr(args, "steps")
            else check_data(composed, math.inf if args.all else args.seconds)
        )
    print(json.dumps(asdict(report), indent=2) if args.json else wrapped(str(report), line_width(sys.stdout)))
    return int(ExitCode.FAILED if report.findings else ExitCode.DONE)


CHECKS = {
    "data": Check(
        "samples: in two sets, twice, without a label, not finite, of unequal shapes",
        _add_data_arguments,
        _run,
        ("train check data digits", "train check data digits_mlp --all --json"),
        "reads samples of every set, as many as a minute allows, and says how many of how many.",
    ),
    "model": Check(
        "a model with one batch: samples that mix, parameters without gradient, a loss that does not fall",
        _add_model_arguments,
        _run,
        ("train check model digits_mlp", "train check model digits --steps 20 --json"),
        "evaluates one batch in parts, and trains on it alone for 100 steps or 20 seconds. Neither writes anything.",
    ),
}
