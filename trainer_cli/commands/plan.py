"""`train plan`: what a `fit` with these overrides would do, without doing it."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial

from trainer_cli.commands.command_line import add_config_arguments
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.fit_parts import PLAN_JOBS, PROBE
from trainer_cli.steps import Duration, Unit
from trainer_cli.terminal import clear_status, line_width, show_status, wrapped

EXAMPLES = """examples:
  train plan digits
  train plan digits checkpoint.max_checkpoints=3 checkpoint.ephemeral_save_interval=50
  train plan digits checkpoint.save_interval=5min --step-time 0.02
  train plan digits --between-failures 6h
  train plan digits --probe
  train plan digits --json
  train plan -m digits optimizer.lr=1e-3,3e-3

It lists every evaluation, every checkpoint with its reason, what is removed when and why, what is on the disk at the
end, and the most disk that checkpoints take on the way. A run that exists is planned from where it would resume.
Nothing is written or trained. What a run alone can tell is listed as unknown. With --probe a process of its own trains
for about ten seconds in a temporary folder, evaluates and saves once, and the plan says how long the run will take.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the overrides, the estimates of a step, and the output format."""
    add_config_arguments(parser)
    parser.add_argument("-m", "--multirun", action="store_true", help="plan a sweep: a line for each of its jobs")
    parser.add_argument(
        "--step-time", type=float, metavar="SECONDS", help="seconds that an optimizer step takes, for rules in time"
    )
    parser.add_argument("--probe", action="store_true", help="train some steps, to say how long the run will take")
    parser.add_argument(
        "--step-tokens", type=float, metavar="N", help="tokens of an optimizer step, for rules in tokens"
    )
    parser.add_argument(
        "--between-failures", metavar="TIME", help="mean time between failures, such as 6h: the best interval of saves"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Compose and check the config as `fit` does, then print what a fit would do."""
    for flag, value in (("--step-time", args.step_time), ("--step-tokens", args.step_tokens)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"{flag} is {value:g}, but it must be a number above 0")
    between_failures_s = _seconds(args.between_failures)
    if args.multirun:
        if args.probe:
            raise UserError("--probe is for one run, and -m plans several", cure="Leave -m out, or give --step-time.")
        return _plan_sweep(args, between_failures_s)
    from trainer_cli.processes import compose_fit, provide_fork
    from trainer_cli.running import describe_plan, plan

    composed = compose_fit(args.overrides, config_dir=args.config_dir, config_name=args.config_name)
    # A plan touches nothing: it says what must be computed, and does not.
    provide_fork(composed.config, replays=False)
    planned = plan(
        composed,
        step_time_s=args.step_time,
        step_tokens=args.step_tokens,
        between_failures_s=between_failures_s,
        probe=partial(PROBE.need("--probe"), config_dir=args.config_dir) if args.probe else None,
    )
    # A plan of a finished run has not loaded torch.
    clear_status()
    text = describe_plan(planned, as_json=args.json)
    print(text if args.json else wrapped(text, line_width(sys.stdout), indent=15))
    return int(ExitCode.DONE)


def _seconds(text: str | None) -> float | None:
    """The seconds of a duration in time.

    Raises:
        UserError: it is not a duration in time.
    """
    if text is None:
        return None
    try:
        duration = Duration.parse(text)
    except ValueError as error:
        raise UserError(f"--between-failures: {error}") from None
    if duration.unit is not Unit.SECOND:
        raise UserError(f"--between-failures is {text}, but it must be a time, such as 6h")
    return float(duration.value)


def _plan_sweep(args: argparse.Namespace, between_failures_s: float | None) -> int:
    """Compose and check every job as `fit -m` does, then print what each would do."""
    from trainer_cli.config import compose
    from trainer_cli.running import describe_plan, plan

    plans = {}
    jobs = PLAN_JOBS.need("-m")(args.overrides, config_dir=args.config_dir, config_name=args.config_name)
    for number, planned in enumerate(jobs, 1):
        show_status(f"planning job {number:,} of {len(jobs):,} …")
        # Composed anew with the directory of the job, in which a run to resume would be.
        composed = compose(planned.overrides, config_dir=args.config_dir, config_name=args.config_name)
        plans[planned.key] = plan(
            composed, step_time_s=args.step_time, step_tokens=args.step_tokens, between_failures_s=between_failures_s
        )
    clear_status()
    print(describe_plan(plans, as_json=args.json))
    return int(ExitCode.DONE)
