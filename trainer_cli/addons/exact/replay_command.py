"""`train replay RUN STEP`: make steps of a run again, show what happened in them, and compare all that was recorded."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from bdb import BdbQuit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.addons.exact.divergence import RUINED, BlamedSamples, StepRow
from trainer_cli.commands import add_config_arguments
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.fit_parts import LAUNCH_RANKS
from trainer_cli.ranks import read_ranks
from trainer_cli.terminal import format_count, format_first, line_width, print_json, wrapped, wrapped_report

if TYPE_CHECKING:
    from trainer_cli.addons.exact.replay import Replayed
    from trainer_cli.addons.exact.replay_plan import ReplayPlan
    from trainer_cli.addons.exact.samples import StepSamples
    from trainer_cli.config import Composed
    from trainer_cli.parallel import ProcessGroup
    from trainer_cli.trainer import Callback

EXAMPLES = """examples:
  train replay runs/digits 437                     what happened in step 437
  train replay runs/digits 430..440 --json         in each of these steps
  train replay runs/digits 437 callbacks=norms     with a callback, whose output is in RUN/replayed
  train replay runs/digits 437 --keep              write its state to RUN/replayed/step437

The steps since the newest earlier checkpoint are computed again. Every record on the way is compared with
metrics.jsonl, and every kept checkpoint with the state. Exit code 0: all are equal, bit for bit. 1: some are not; the
first is printed.
"""
_STEPS = re.compile(r"(?:step)?(\d+)(?:\.\.(?:step)?(\d+))?")
_OF_BATCH = ("rank", "number", "samples", "batch", "not_finite", "sample_losses")
"""What a batch has besides its loss and other outputs."""
_DIGESTS = ("seen", "rows", "values", "ranks")
"""What a row has to be compared with that of another run."""
_MOST_ROWS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the steps, the overrides and the flags."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory, or RUN@attempt2")
    parser.add_argument("steps", metavar="STEP", help="a step, or a range of steps: 430..440")
    add_config_arguments(parser)
    parser.add_argument("--keep", action="store_true", help="write the state after the last step into RUN/replayed")
    parser.add_argument("--json", action="store_true", help="print the steps and the comparison as JSON")
    parser.add_argument("--per-sample", action="store_true", help="the loss of each sample, by its name")
    parser.add_argument("--pdb", action="store_true", help="stop before each step, with trainer, model and batch")
    parser.add_argument("--quiet", action="store_true", help="print the result of the comparison alone")
    # Of `train diverge`: digests of all that the steps compute, in the JSON.
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Make the steps in as many processes as the run had."""
    from trainer_cli.addons.exact.replay import compose_replay
    from trainer_cli.addons.exact.replay_plan import plan_replay
    from trainer_cli.messages import to_console
    from trainer_cli.processes import run_as_rank
    from trainer_cli.runs import RunDir, split_attempt

    first, last = parse_steps(args.steps, keeps=args.keep)
    if args.keep and split_attempt(args.run_dir)[1] is not None:
        raise UserError(f"--keep is for the steps of the run, and {args.run_dir} is an earlier attempt of it")
    # Rank 0 alone composes, and so has a plan.
    plan: ReplayPlan | None = None

    def compose() -> Composed:
        nonlocal plan
        to_console("warning")
        plan = plan_replay(args.run_dir, last, first=first)
        return compose_replay(plan, args.overrides, config_dir=args.config_dir, config_name=args.config_name)

    def work(composed: Composed, group: ProcessGroup) -> int:
        shared_plan = group.broadcast(None if plan is None else replace(plan, records=()))
        own_plan = plan or shared_plan
        assert own_plan is not None
        with composed.placing():
            return _replay(args, own_plan, composed, range(first, last + 1), group)

    if read_ranks(os.environ).world_size > 1:
        return run_as_rank(compose, work)
    composed = compose()
    assert plan is not None
    processes = int(RunDir(plan.run).environment_of(plan.attempt).get("processes") or 1)
    if args.pdb and processes > 1:
        raise UserError(f"--pdb is for runs of one process, and {args.run_dir} had {processes}")
    if processes > 1:
        launch_ranks = LAUNCH_RANKS.need(f"the replay of a run of {processes} processes")
        return launch_ranks(args.as_child, processes)
    if composed.config.parallel.strategy == "fsdp":
        # One process needs a group, too.
        return run_as_rank(lambda: composed, work)
    from trainer_cli.parallel import ALONE

    return work(composed, ALONE)


def parse_steps(text: str, *, keeps: bool) -> tuple[int, int]:
    """The first and the last of the steps that an argument names.

    Args:
        keeps: whether the state after the last one is written, so that it may be 0.

    Raises:
        UserError: it names none.
    """
    match = _STEPS.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a step", cure="Write the number of a step, or a range of steps: 430..440.")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last or (first == 0 and not (keeps and last == 0)):
        raise UserError(
            "step 0 is the state before the first step: the first is 1"
            if first == 0
            else f"{text} ends before it begins"
        )
    return first, last


def _replay(args: argparse.Namespace, plan: ReplayPlan, composed: Composed, steps: range, group: ProcessGroup) -> int:
    """Make the steps and print, on rank 0, what happened in them."""
    from trainer_cli.addons.exact.replay import replay
    from trainer_cli.addons.exact.step_trace import StepTrace

    if group.is_main and not args.quiet and not args.json:
        print(f"{plan.run}: {plan}", file=sys.stderr, flush=True)
    trace = StepTrace(steps, digests=args.digests, per_sample=args.per_sample, debugs=args.pdb)
    callbacks: dict[str, Callback] = {} if args.quiet and not args.digests else {"step_trace": trace}
    keep = [plan.last] if args.keep else []
    try:
        replayed = replay(plan, composed, keep=keep, callbacks=callbacks, group=group, config_dir=args.config_dir)
    except BdbQuit:
        return int(ExitCode.FAILED)
    except Exception:
        # A step that fails is looked at for the sake of what it did before.
        if group.is_main and not args.json:
            _print_steps(args, trace.rows, _read_samples(args, trace.rows))
        raise
    if group.is_main:
        samples = _read_samples(args, trace.rows)
        if args.json:
            print_json(_as_dict(replayed, trace.rows, samples, digests=args.digests))
        else:
            _print_steps(args, trace.rows, samples)
            print("\n".join([str(replayed), *(f"kept: {path}" for path in replayed.kept.values())]))
    return int(ExitCode.DONE if replayed.equal else ExitCode.FAILED)


def _read_samples(args: argparse.Namespace, rows: Sequence[StepRow]) -> dict[int, StepSamples]:
    """The samples of the steps; without those that are unknown from the order of the data alone."""
    if args.quiet or not rows:
        return {}
    from trainer_cli.addons.exact.step_samples import find_known_samples

    return find_known_samples(
        args.run_dir,
        rows[0].step,
        rows[-1].step,
        overrides=args.overrides,
        config_dir=args.config_dir,
        show=lambda text: print(text, file=sys.stderr),
    )


def _print_steps(args: argparse.Namespace, rows: Sequence[StepRow], samples: Mapping[int, StepSamples]) -> None:
    beginning = ""
    for row in rows:
        print(f"step {row.step} (epoch {row.epoch}, batch {row.batch_idx})")
        of_step = samples.get(row.step)
        blamed = row.blamed or BlamedSamples()
        if RUINED in (row.not_finite or ""):
            # All that follows from such weights is not finite, and no sample is to blame.
            bad = [str(row.not_finite), *blamed.metrics]
            print("\n".join(under("not finite", bad)), end="\n\n")
            continue
        if of_step is not None:
            print(wrapped("\n".join(list(of_step.lines())[1:]), line_width(sys.stdout)))
        facts: list[tuple[str, str]] = []
        for batch in row.batches:
            rank = f"rank {batch['rank']}, " if any(other["rank"] for other in row.batches) else ""
            facts.append(("batch", f"{rank}{format_count(batch['samples'], 'sample')}: {batch['batch']}"))
            facts += [("", f"{name} {value:.6g}") for name, value in batch.items() if name not in _OF_BATCH]
            names = _find_names(of_step, batch)
            facts += [("", text) for text in _describe_losses(batch, names, whole=args.per_sample)]
        # Numbers without repetitions that follow one another.
        rates = {name: dict.fromkeys(f"{value:.6g}" for value in values) for name, values in row.lr.items()}
        facts += [(f"lr {name}".removesuffix(" optimizer"), ", ".join(values)) for name, values in rates.items()]
        if row.grad_norm is not None:
            facts.append(("gradients", f"norm {row.grad_norm:.6g}, the largest of"))
            facts += [("", f"{name} {norm:.6g}") for name, norm in row.grad_norms.items()]
        # The batch first: what the model makes of it follows from it.
        bad = [text for batch in row.batches for text in _describe_bad_rows(batch, _find_names(of_step, batch))]
        bad += filter(None, [row.not_finite])
        # An activation may be infinite on purpose, as in a mask; a loss is not.
        if not beginning and not all(math.isfinite(batch["loss"]) for batch in row.batches):
            cause = [*name_bad_samples(row.batches, of_step), *bad, "the loss"][0]
            beginning = f"not finite since step {row.step}: {cause}"
        if blamed.metrics:
            end = "" if bad or blamed.batches else ", though no batch alone gives such a value"
            bad.append(", ".join(blamed.metrics) + end)
        failed = (
            [] if blamed.failed is None else list(_describe_errors(blamed.failed, _find_names(of_step, blamed.failed)))
        )
        for batch in blamed.batches:
            of, names = f"{batch['loader']}, ", batch["names"]
            bad += [f"{of}{text}" for text in _describe_bad_rows(batch, names)]
            bad += [f"{of}loss {text}" for text in _describe_losses(batch, names, whole=False)]
            failed += [f"{of}{text}" for text in _describe_errors(batch, names)]
        lines = [f"  {title:<11} {text}" for title, text in facts]
        lines += [*under("not finite", bad or ["nothing"]), *under("failed", failed)]
        print(wrapped_report("\n".join(lines), line_width(sys.stdout)), end="\n\n", flush=True)
    if len(rows) > 1 and beginning:
        print(beginning)


def under(title: str, texts: Sequence[str]) -> list[str]:
    """The lines of texts, of which the first has a title."""
    return [f"  {'' if number else title:<11} {text}" for number, text in enumerate(texts)]


def name_bad_samples(batches: Iterable[Mapping[str, Any]], samples: StepSamples | None) -> list[str]:
    """What of the batches of a step is not finite, and the samples that have it, or whose loss alone is not."""
    lines: list[str] = []
    for batch in batches:
        names = _find_names(samples, batch)
        lines += _describe_bad_rows(batch, names)
        lines += _describe_losses(batch, names, whole=False)
    return lines


def _find_names(samples: StepSamples | None, batch: Mapping[str, Any]) -> list[str] | None:
    return None if samples is None else samples.names(batch["rank"], batch["number"])


def _describe_bad_rows(batch: Mapping[str, Any], names: Sequence[str] | None) -> Iterator[str]:
    """The leaves of a batch with NaN, and the samples that have it."""
    for name, rows in batch.get("not_finite", {}).items():
        yield f"batch {name}" + (f", {_name_rows(rows, names)}" if rows else "")


def _describe_errors(batch: Mapping[str, Any], names: Sequence[str] | None) -> Iterator[str]:
    """For each exception that samples of a batch raise alone, which ones do."""
    errors: Mapping[int, str] = batch.get("raised", {})
    rows_of: dict[str, list[int]] = {}
    for row, error in errors.items():
        rows_of.setdefault(error.removesuffix("."), []).append(row)
    rest = batch["samples"] - len(errors)
    end = f"; the other {rest:,} do not" if rest else ""
    for error, rows in rows_of.items():
        yield f"{_name_rows(rows, names)} {'raises' if len(rows) == 1 else 'raise'} {error}{end}"


def _name_rows(indices: Sequence[int], names: Sequence[str] | None) -> str:
    """The samples at rows of a batch, by their names where they are known."""
    shown = [str(index) if names is None else names[index] for index in indices[:_MOST_ROWS]]
    more = f" and {len(indices) - len(shown):,} more" if len(indices) > len(shown) else ""
    return f"{'row' if names is None else 'sample'}{'s' * (len(indices) > 1)} {', '.join(shown)}{more}"


def _describe_losses(batch: Mapping[str, Any], names: Sequence[str] | None, *, whole: bool) -> Iterator[str]:
    """The losses of the samples of a batch with their names, or of those alone that are not finite."""
    losses: list[float] | str | None = batch.get("sample_losses")
    if losses is None:
        return
    if isinstance(losses, str):
        yield f"of each sample: not known: {losses}"
        return
    labels = names if names is not None and len(names) == len(losses) else [f"row {row}" for row in range(len(losses))]
    listed = [
        f"{label} {loss:.4g}"
        for label, loss in zip(labels, map(float, losses), strict=True)
        if whole or not math.isfinite(loss)
    ]
    if whole:
        yield f"of each sample: {', '.join(listed)}"
    elif listed:
        shown = format_first(listed, _MOST_ROWS)
        yield f"of samples alone: {shown}; the other {len(losses) - len(listed):,} are finite"
    else:
        yield "of each sample alone: finite"


def _as_dict(
    replayed: Replayed, rows: Iterable[StepRow], samples: Mapping[int, StepSamples], *, digests: bool
) -> dict[str, Any]:
    plan = replayed.plan
    return {
        "run": plan.run,
        "start": plan.start,
        "start_step": plan.start_step,
        "steps": [
            {name: value for name, value in asdict(row).items() if digests or name not in _DIGESTS}
            | {"samples": samples[row.step].as_dict() if row.step in samples else None}
            for row in rows
        ],
        "equal": replayed.equal,
        "result": str(replayed),
        "records": replayed.records,
        "differences": [asdict(difference) for difference in replayed.differences],
        "states": replayed.states,
        "kept": replayed.kept,
    }
