"""`train data RUN STEP`: which samples a step of a run used, or will use."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.addons.exact.replay_command import parse_steps
from trainer_cli.addons.exact.samples import StepSamples, lines_of_uses
from trainer_cli.addons.exact.step_samples import find_sample, read_step_samples
from trainer_cli.commands import add_config_dir, add_overrides
from trainer_cli.errors import ExitCode, TrainError, UserError, one_line
from trainer_cli.running import showing_import
from trainer_cli.terminal import format_count, format_first, line_width, print_json, wrapped

if TYPE_CHECKING:
    from trainer_cli.addons.exact.run_data import RunData

EXAMPLES = """examples:
  train data runs/digits 437              the samples of step 437: index, position in the epoch, rank and batch
  train data runs/digits 437..440         of four steps
  train data runs/digits 437 --json       as JSON
  train data runs/digits --find 12        the steps that used sample 12, or will use it

Nothing is trained. `--show` also loads the samples, as the training did: shapes and values, texts, and images as PNG
files. If a loader has no indices, such as one over an IterableDataset, its batches are computed again.
"""

_MOST_BAD = 8
"""Values that are not finite and listed at the top of a step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the steps and the flags."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory, or RUN@attempt2")
    parser.add_argument("steps", metavar="STEP[..LAST]", nargs="?", help="a step, or a range of steps: 430..440")
    add_overrides(parser, "changes of the run's config, such as where its files are now")
    parser.add_argument("--find", metavar="INDEX", help="list the steps of this sample; in a mixture SOURCE:INDEX")
    parser.add_argument("--show", action="store_true", help="load the samples and show them")
    parser.add_argument("--images", metavar="DIR", type=Path, help="folder for the images of --show (RUN-samples)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Print the samples of the steps, or the steps of a sample."""
    overrides = list(args.overrides)
    if args.steps is not None and "=" in args.steps:
        # Without a step the first override is parsed as the step.
        overrides.insert(0, args.steps)
        args.steps = None
    if args.steps is None and args.find is None:
        run_name = shlex.quote(str(args.run_dir))
        raise UserError("data needs a step, or --find INDEX", cure=f"For example: `train data {run_name} 1`")
    if args.steps is not None and args.find is not None:
        raise UserError("data takes a step or --find INDEX, not both")
    if args.images is not None and not args.show:
        raise UserError("--images has no effect without --show")
    if args.find is not None:
        uses = list(find_sample(args.run_dir, args.find, overrides=overrides, config_dir=args.config_dir))
        if args.json:
            print_json([asdict(use) for use in uses])
        else:
            print(wrapped("\n".join(lines_of_uses(args.find, uses)), line_width(sys.stdout)))
        return int(ExitCode.DONE)
    first, last = parse_steps(args.steps or "", keeps=False)
    if args.show:
        shown = _show(args, overrides, first, last)
    else:
        steps = read_step_samples(args.run_dir, first, last, overrides=overrides, config_dir=args.config_dir)
        shown = ((step.as_dict(), list(step.lines())) for step in steps)
    if args.json:
        print_json([facts for facts, _ in shown])
    else:
        for _, lines in shown:
            print(wrapped("\n".join(lines), line_width(sys.stdout)))
    return int(ExitCode.DONE)


def _show(
    args: argparse.Namespace, overrides: Sequence[str], first: int, last: int
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """For each step its samples with their contents, for JSON and as lines."""
    from trainer_cli.addons.exact.step_positions import read_records

    with showing_import():
        from trainer_cli.addons.exact.run_data import open_data

    data = open_data(read_records(args.run_dir), overrides, config_dir=args.config_dir)
    folder = args.images or Path(f"{args.run_dir.resolve().name}-samples")
    for step in read_step_samples(args.run_dir, first, last, data=data):
        facts, (title, *lines) = step.as_dict(), step.lines()
        bad: list[str] = []
        raised: list[str] = []
        for batch, batch_facts in zip(step.batches, facts["batches"], strict=True):
            try:
                contents = [_show_sample(data, step, content, folder) for content in data.load(step, batch)]
            except Exception as error:
                if isinstance(error, TrainError):
                    raise
                # The sample is a note of the error.
                notes = getattr(error, "__notes__", ())
                raised.append(one_line(": ".join([*notes, type(error).__name__, str(error)]).removesuffix(": ")))
                batch_facts["raised"] = raised[-1]
                continue
            batch_facts["contents"] = [facts for facts, _ in contents]
            lines += [line for _, sample_lines in contents for line in sample_lines]
            for facts_of_sample, _ in contents:
                for name, count in facts_of_sample["not_finite"].items():
                    of = "the batch" if facts_of_sample["name"] == "the batch" else f"sample {facts_of_sample['name']}"
                    bad.append(f"{name}, {of}: {format_count(count, 'value')}".removeprefix(", "))
        # First: it is what most look for.
        listed = bad[:_MOST_BAD] + [f"and {len(bad) - _MOST_BAD:,} more"] * (len(bad) > _MOST_BAD)
        top = [f"  not finite  {line}" for line in listed or ["nothing"] * (not raised)]
        contents_facts = [facts for batch in facts["batches"] for facts in batch.get("contents", [])]
        top += [f"  integers    {line}" for line in _integers(contents_facts)]
        yield facts, [title, *(f"  raised  {line}" for line in raised), *top, *lines]


def _integers(contents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line with the range of each integer of the samples, and the sample that has its largest value."""
    names = dict.fromkeys(name for facts in contents for name in facts["integers"])
    texts = []
    for name in names:
        found = [(*facts["integers"][name], facts["name"]) for facts in contents if name in facts["integers"]]
        least, (_, largest, sample) = min(low for low, _, _ in found), max(found, key=lambda entry: entry[1])
        of = f" (sample {sample})" if sample != "the batch" and least < largest else ""
        texts.append(f"{name} from {least:,} to {largest:,}{of}".lstrip())
    if texts:
        yield format_first(texts, _MOST_BAD)


def _show_sample(
    data: RunData, step: StepSamples, content: tuple[Any, Any], folder: Path
) -> tuple[dict[str, Any], list[str]]:
    from trainer_cli.addons.exact.sample_content import (
        count_not_finite,
        describe_content,
        find_integer_ranges,
        save_images,
    )

    sample, value = content
    name = "the batch" if sample is None else sample.name
    values = [one_line(line) for line in describe_content(value)]
    text = None if sample is None else data.describe(sample)
    file = f"step{step.step}-{re.sub('[^A-Za-z0-9_.-]', '_', name)}"
    images = [str(path) for path in save_images(value, folder, file)]
    counts = count_not_finite(value)
    facts = {
        "name": name,
        "values": values,
        "not_finite": counts,
        "integers": find_integer_ranges(value),
        "text": text,
        "images": images,
    }
    lines = [f"    {name}", *(f"      {line}" for line in values)]
    lines += [f"      | {one_line(line)}" for line in (text or "").splitlines()]
    return facts, lines + [f"      saved as {path}" for path in images]
