"""`train data RUN STEP`: which samples a step of a run used, or will use."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.addons.exact.replay_command import parse_steps
from trainer_cli.addons.exact.samples import Sample, StepSamples, lines_of_uses
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
_WHOLE = "the batch"
"""Stands for the name of a sample where the loader tells no indices."""


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
    shown: Iterable[tuple[list[dict[str, Any]], Iterable[str]]]
    if args.find is not None:
        uses = list(find_sample(args.run_dir, args.find, overrides=overrides, config_dir=args.config_dir))
        shown = [([asdict(use) for use in uses], lines_of_uses(args.find, uses))]
    else:
        first, last = parse_steps(str(args.steps), keeps=False)
        if args.show:
            shown = _show(args, overrides, first, last)
        else:
            steps = read_step_samples(args.run_dir, first, last, overrides=overrides, config_dir=args.config_dir)
            shown = (([step.as_dict()], step.lines()) for step in steps)
    if args.json:
        print_json([entry for facts, _ in shown for entry in facts])
    else:
        for _, lines in shown:
            print(wrapped("\n".join(lines), line_width(sys.stdout)))
    return int(ExitCode.DONE)


def _show(
    args: argparse.Namespace, overrides: Sequence[str], first: int, last: int
) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """For each step its samples with their contents, for JSON and as lines."""
    from trainer_cli.addons.exact.step_positions import read_records

    with showing_import():
        from trainer_cli.addons.exact.run_data import open_data

    data = open_data(read_records(args.run_dir), overrides, config_dir=args.config_dir)
    folder = args.images or Path(f"{args.run_dir.resolve().name}-samples")
    for step in read_step_samples(args.run_dir, first, last, data=data):
        facts, (title, *lines) = step.as_dict(), step.lines()
        contents: list[dict[str, Any]] = []
        raised: list[str] = []
        for batch, batch_facts in zip(step.batches, facts["batches"], strict=True):
            try:
                loaded = [_look_at(data, step, *content, folder) for content in data.load(step, batch)]
            except TrainError:
                raise
            except Exception as error:
                # The sample is a note of the error.
                notes = getattr(error, "__notes__", ())
                raised.append(one_line(": ".join([*notes, type(error).__name__, str(error)]).removesuffix(": ")))
                batch_facts["raised"] = raised[-1]
                continue
            batch_facts["contents"] = loaded
            contents += loaded
        lines += [line for content in contents for line in _format_lines(content)]
        # First: it is what most look for.
        top = [*(f"  raised  {line}" for line in raised), *_summarize(contents, is_complete=not raised)]
        yield [facts], [title, *top, *lines]


def _summarize(contents: Sequence[dict[str, Any]], *, is_complete: bool) -> Iterator[str]:
    """What is not finite in samples, and the range of each of their integers, with the sample that has the largest."""
    bad = []
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for content in contents:
        of = content["name"] if content["name"] == _WHOLE else f"sample {content['name']}"
        for name, count in content["not_finite"].items():
            bad.append(f"{name}, {of}: {format_count(count, 'value')}".removeprefix(", "))
        for name, (least, largest) in content["integers"].items():
            ranges.setdefault(name, []).append((least, largest, "" if of == _WHOLE else f" ({of})"))
    if not bad and is_complete:
        bad = ["nothing"]
    if len(bad) > _MOST_BAD:
        bad[_MOST_BAD:] = [f"and {len(bad) - _MOST_BAD:,} more"]
    yield from (f"  not finite  {line}" for line in bad)
    texts = []
    for name, of_name in ranges.items():
        least, (_, largest, of) = min(low for low, _, _ in of_name), max(of_name, key=lambda entry: entry[1])
        texts.append(f"{name} from {least:,} to {largest:,}{of if least < largest else ''}".lstrip())
    if texts:
        yield f"  integers    {format_first(texts, _MOST_BAD)}"


def _look_at(data: RunData, step: StepSamples, sample: Sample | None, value: Any, folder: Path) -> dict[str, Any]:
    """The content of a sample, or of a whole batch, and the images that are saved of it, for JSON."""
    from trainer_cli.addons.exact.sample_content import describe_content, look_at_numbers, save_images

    name = _WHOLE if sample is None else sample.name
    not_finite, integers = look_at_numbers(value)
    file = f"step{step.step}-{re.sub('[^A-Za-z0-9_.-]', '_', name)}"
    return {
        "name": name,
        "values": [one_line(line) for line in describe_content(value)],
        "not_finite": not_finite,
        "integers": integers,
        "text": None if sample is None else data.describe(sample),
        "images": [str(path) for path in save_images(value, folder, file)],
    }


def _format_lines(content: dict[str, Any]) -> Iterator[str]:
    yield f"    {content['name']}"
    yield from (f"      {line}" for line in content["values"])
    yield from (f"      | {one_line(line)}" for line in (content["text"] or "").splitlines())
    yield from (f"      saved as {path}" for path in content["images"])
