"""`train report RUN…`: write curves, checkpoints, configs and more of runs into one HTML file.

The file needs no network: it holds the page, its data, and the scripts that draw it. `train fit` writes one into the
run directory at its end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainer_cli.addons.view.forks import forks_among
from trainer_cli.addons.view.report_blocks import Block, clock_time
from trainer_cli.addons.view.report_comparison import ComparedRuns
from trainer_cli.addons.view.report_runs import grouping_keys, groupings
from trainer_cli.addons.view.report_sections import sections
from trainer_cli.addons.view.report_sweep import short_keys
from trainer_cli.commands import no_run
from trainer_cli.environment import versions
from trainer_cli.errors import TrainError, UserError, one_line
from trainer_cli.files import as_path, replace
from trainer_cli.parts import EARLIEST_START
from trainer_cli.runs import Run, RunDir, RunRecord, RunsBelow, ValidationRow, collecting
from trainer_cli.sweep_file import SweepJob, read_jobs, show_paused
from trainer_cli.terminal import format_bytes, format_count

EXAMPLES = """examples:
  train report runs/digits                     into report.html
  train report runs/digits runs/other          several runs, compared
  train report runs/digits/sweep               a sweep: best table, parallel coordinates
  train report runs/compare/lr -o lr.html      a comparison: its verdict, intervals, pairs
  train report runs/digits/validation          only what train validate measured
  train report runs -o all.html                all runs below a folder
  train report --json runs/digits              prints what was written as JSON
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("run_dir", metavar="RUN", nargs="+", type=Path, help="a run's directory, or a folder of runs")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help="file to write (report.html)"
    )
    parser.add_argument("--json", action="store_true", help="print the file and how much it holds as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the report, and print how much it holds."""
    for path in args.run_dir:
        if not path.is_dir():
            raise no_run(path)

    replaced = " (replaced)" if args.output.exists() else ""
    result = report(args.run_dir, args.output, now=time.time())
    for problem in result.problems:
        print(f"warning: {one_line(problem)}", file=sys.stderr)
    if args.json:
        print(json.dumps({"file": str(args.output), **result._asdict()}))
        return 0
    holds = [format_count(result.runs, "run")] if result.runs else []
    holds += [format_count(result.charts, "chart"), format_bytes(result.size_bytes)]
    print(f"{args.output}{replaced}: {', '.join(holds)}; open it in a browser")
    return 0


_PAGE = Path(__file__).with_name("report_page.html")
_PAGE_SCRIPTS = [Path(__file__).with_name(f"report_{name}.js") for name in ("draw", "media", "table", "page")]
_POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:\">"
)
_MARK = '<meta name="generator" content="train report">'
"""Stands in the head of the page: a file without it is not replaced."""
_HEAD_BYTES = 1000
_NO_CHARTS = ("banner", "table", "facts", "text", "media")
_SIDES = "side (A or B)"
"""The grouping that a comparison begins with, as report_page.js names it."""
_NO_CODE = re.compile(r"^\s*(//.*\n)?", re.MULTILINE)


class Report(NamedTuple):
    """How much a report holds."""

    runs: int
    charts: int
    size_bytes: int
    problems: Sequence[str]
    """What cannot be read, and why."""


def report(paths: Sequence[Path], output: Path, *, now: float) -> Report:
    """Read the runs that the paths name, and write the report.

    Args:
        paths: run directories, folders with runs below them, such as that of a sweep, and folders with the results of
            `train validate`. One that is the folder of a `train compare` is reported with the verdict.

    Raises:
        UserError: a path holds nothing to report, or the output is a file of another kind.
    """
    # First: reading the runs may take long.
    _refuse_other_file(output)
    records: list[RunRecord] = []
    validated: list[ValidationRow] = []
    sweep: dict[str, SweepJob] = {}
    problems: list[str] = []
    comparison = None
    for path in paths:
        with collecting(problems, Path.cwd()):
            comparison = ComparedRuns.read(path) if len(paths) == 1 else None
        runs = [Run(compared) for compared in comparison.runs] if comparison else []
        runs = runs or _runs_at(path)
        # `train validate` of checkpoints of different runs writes into folders named validation-….
        rows: list[ValidationRow] = []
        for folder in (path, *sorted(path.glob("validation-*"))):
            with collecting(problems, Path.cwd()):
                rows += ValidationRow.read_all(folder)
        for folder in dict.fromkeys([path, *(run.path.parent for run in runs)]):
            with collecting(problems, Path.cwd()):
                sweep |= read_jobs(folder)
        if not runs and not rows and not sweep and comparison is None:
            cure = "Name runs of `train fit`, or a folder that holds some. A Trainer in Python makes none."
            raise UserError(f"{path} holds no run", cure=cure)
        validated += rows
        # A run may be named twice, also through a link.
        read_paths = {os.path.realpath(record.path) for record in records}
        records += [run.record(now) for run in runs if os.path.realpath(run.path) not in read_paths]
    records = [dataclasses.replace(record, view=show_paused(record.view, sweep)) for record in records]
    names, validated_elsewhere = short_names(records, sweep), _assign_rows(validated, records)
    version = versions(["trainer-cli"])["trainer-cli"] or ""
    configs = [record.config for record in records]
    groups = groupings(configs, grouping_keys(configs))
    if comparison and comparison.runs:
        names, sides = map(list, zip(*comparison.runs.values(), strict=True))
        groups = {_SIDES: sides, **groups}
    data: Block = {
        "title": comparison.title if comparison else _title(paths, records),
        "made": f"Report of {clock_time(now)} UTC by trainer-cli {version}".strip(),
        "runs": [*names, *validated_elsewhere],
        "looks": [look_of(record) for record in records],
        "groups": groups,
        "forks": {at: fork._asdict() for at, fork in forks_among([record.summary for record in records]).items()},
        "sections": sections(records, names, validated_elsewhere, list(sweep.values()), comparison=comparison),
    }
    page = _page(data)
    try:
        # As a whole, so that a browser that reloads the page never reads half of it.
        replace(output, [page])
    except OSError as error:
        cure = "Name another file with -o."
        raise UserError(f"{output} cannot be written: {error.strerror}", cure=cure) from error
    charts = sum(block["kind"] not in _NO_CHARTS for section in data["sections"] for block in section["blocks"])
    problems += [f"{record.path}: {problem}" for record in records for problem in record.problems]
    return Report(len(records), charts, len(page), problems)


def _assign_rows(rows: Sequence[ValidationRow], records: Sequence[RunRecord]) -> dict[str, list[ValidationRow]]:
    """Add each result of `train validate` to the record of its run. Returns those of other runs, by name."""
    saved_in: dict[str, Path] = {}
    for record in records:
        # A run may save in a folder elsewhere, which a damaged config does not name.
        with suppress(UserError, OSError):
            saved_in[os.path.realpath(RunDir(record.path).stored_checkpoints())] = record.path
    of_run: dict[str, list[ValidationRow]] = {}
    for row in rows:
        folder = as_path(row.checkpoint).parent
        run = saved_in.get(os.path.realpath(folder), folder.parent)
        of_run.setdefault(os.path.abspath(run), []).append(row)
    for record in records:
        rows_of_record = of_run.pop(os.path.abspath(record.path), [])
        record.validation = sorted([*record.validation, *rows_of_record], key=lambda row: row.step)
    common_folder = os.path.commonpath(of_run) if len(of_run) > 1 else os.getcwd()
    return {os.path.relpath(path, common_folder): run_rows for path, run_rows in of_run.items()}


def look_of(record: RunRecord) -> Block:
    """What the page needs for the commands that look at a step: the run in the words of a shell, and its earliest state
    to replay from.
    """
    start, find_start = None, EARLIEST_START.find()
    if find_start is not None:
        with suppress(OSError, TrainError):
            start = find_start(RunDir(record.path))
    return {"run": shlex.quote(str(record.path)), "start": start}


def _title(paths: Sequence[Path], records: Sequence[RunRecord]) -> str:
    """The name of a single run; else the number of runs, after the path if that is the only one."""
    if len(records) == 1:
        return records[0].path.name
    if not records:
        return str(paths[0])
    count = f"{len(records)} runs"
    return count if len(paths) > 1 else f"{paths[0]}: {count}"


def _runs_at(path: Path) -> list[Run]:
    """The run in a folder; if it is no run itself, the runs below it, sorted by path."""
    runs = sorted(RunsBelow(path).find(), key=lambda run: run.path)
    # A run is reported without those of its sweep.
    return runs[:1] if runs and runs[0].path == path else runs


def short_names(records: Sequence[RunRecord], sweep: Mapping[str, SweepJob]) -> list[str]:
    """Short names of the runs: the swept values for a job of a sweep, else what differs between the paths.

    Args:
        sweep: see `read_jobs`.
    """
    paths = [os.path.realpath(record.path) for record in records]
    if len(paths) == 1:
        return [records[0].path.name]
    common = os.path.commonpath(paths) if paths else ""
    jobs = [sweep.get(path) for path in paths]
    short = short_keys({key for job in jobs if job is not None for key in job.swept})
    names = []
    for path, job in zip(paths, jobs, strict=True):
        name = os.path.relpath(path, common)
        if job is not None and job.swept:
            # The run whose sweep it is, or nothing for the only sweep, and the values of this job.
            run_of_sweep = name.rpartition("sweep/")[0].rstrip("/")
            name = f"{run_of_sweep} {', '.join(f'{short[key]}={text}' for key, text in job.swept.items())}".strip()
        names.append(name)
    return names


def _refuse_other_file(output: Path) -> None:
    """Raise UserError if the report would replace a file that is no report, or its folder does not exist."""
    if not output.parent.is_dir():
        raise UserError(f"there is no folder {output.parent}", where="-o")
    try:
        with open(output, "rb") as file:
            # Only a report of ours is replaced: -o may name another file by mistake.
            if _MARK.encode() in file.read(_HEAD_BYTES):
                return
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise UserError(f"{output} is a folder", where="-o", cure=f"Name a file: -o {output / 'report.html'}") from None
    raise UserError(f"{output} exists, and is not a report", where="-o", cure="Name another file, or remove this one.")


def _page(data: Block) -> bytes:
    """The whole HTML file of a report, with its data and its scripts."""
    # Inside a script element `<` may begin the end tag or a comment.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = f'<script type="application/json" id="data">{text}</script>\n<script>\n{page_script()}</script>'
    return page_frame(_POLICY, scripts).encode(errors="replace")


def page_frame(policy: str, scripts: str) -> str:
    """The HTML of the page.

    Args:
        policy: element for its head that restricts what the page may load.
        scripts: elements with its data and its scripts.
    """
    frame = _PAGE.read_text("utf-8")
    assert _MARK in frame[:_HEAD_BYTES]
    before, after = frame.replace("<!--POLICY-->", policy).split("<!--SCRIPTS-->")
    return f"{before}{scripts}{after}"


def page_script() -> str:
    """The JavaScript that draws the page."""
    # Without indents and lines of comments, which would be a tenth of a report.
    return _NO_CODE.sub("", "".join(file.read_text("utf-8") for file in _PAGE_SCRIPTS))
