"""Measure every table once and write BENCHMARKS.md with its plots, and five of its rows into the README.

    each table -> bench-results/published.json    kept until all are done: the next call goes on with the rest
    all done   -> docs/benchmarks/results.json    what the pages are written from, by `--render` too
               -> BENCHMARKS.md, docs/benchmarks/*.svg, README.md

A table that fails is named in BENCHMARKS.md with the reason, and the next call measures it again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import chart
import machine
from measuring import TableFailed
from settings import Settings, Size
from table import Table
from timing import HERE

ROOT = HERE.parents[1]
PAGE, README = Path("BENCHMARKS.md"), Path("README.md")
FOLDER = Path("docs/benchmarks")
"""Of the plots and the results, beside the pages."""
RESULTS = FOLDER / "results.json"
_HEADING, _NEXT = "## Benchmarks\n", "## Documentation\n"
ROUNDS = {"load": 3, "ranks": 4, "scale": 1, "stores": 2}
"""Rounds of the tables whose own number is for a longer look: all of them together are to take half an hour."""
Results = dict[str, Any]
"""commit, size, machine, and by name of a table: tables, seconds, failed."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One of the rows that stand at the head of the page and in the README: a figure of ours, and of others."""

    text: str
    table: str
    column: str
    ours: str
    others: Mapping[str, str]
    """Row of the table -> its short name."""
    of: str = "s"
    """Unit to print: `s`, `µs`, or `×` for the ratio to the base."""


CLAIMS: Sequence[Claim] = (
    Claim(
        "Step of a tiny MLP", "loop", "step", "train fit",
        {"bare, fused": "plain loop", "Fabric": "Fabric", "Lightning": "Lightning", "HF Trainer": "HF Trainer"}, "µs",
    ),
    Claim(
        "Save of 1.3 GB, synced to the disk", "save", "time", "train, sync",
        {"torch.save + fsync": "torch.save + fsync", "DCP, sync": "DCP"},
    ),
    Claim(
        "Training waits for a background save", "stall", "stall", "train, async",
        {"DCP async, thread": "DCP async", "torch_checkpointing, async": "torch_checkpointing (no fsync)"},
    ),
    Claim(
        "Training with a save every 10 steps, relative to none", "frequency", "step",
        "train, async: every 10",
        {"DCP async, thread: every 10": "DCP async", "torch.save + fsync: every 10": "torch.save + fsync"}, "×",
    ),
    Claim(
        "Time to reach batch 10,000,000 on a resume", "batches", "time", "train, batch 10,000,000",
        {
            "accelerate, batch 10,000,000": "HF Trainer",
            "StatefulDataLoader, batch 10,000,000": "torchdata, Lightning",
        },
    ),
)  # fmt: skip


Measure = Callable[[str, Settings], list[Table]]
"""The tables of a name; raises TableFailed."""


def publish(names: Sequence[str], settings: Settings, measure: Measure, *, state: Path, root: Path) -> int:
    """Measure what is not yet measured of `names`, and write all pages below `root`.

    Returns the exit status: 1 after a failure.

    Args:
        state: file with what earlier calls have measured, which is removed once nothing has failed.
    """
    results = _unfinished(state, settings)
    results["failed"] = {}
    for name in names:
        if name in results["tables"]:
            continue
        began = time.perf_counter()
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            tables = measure(name, replace(settings, rounds=settings.rounds or ROUNDS.get(name)))
        except TableFailed as error:
            results["failed"][name] = str(error)
            print(f"FAILED: {name}: {error}", file=sys.stderr, flush=True)
        else:
            results["tables"][name] = [table.to_json() for table in tables]
            results["seconds"][name] = round(time.perf_counter() - began)
            print(f"{name}: {results['seconds'][name]} s", file=sys.stderr, flush=True)
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps(results) + "\n", encoding="utf-8")
    results["tables"] = {name: results["tables"][name] for name in names if name in results["tables"]}
    write(results, root)
    if results["failed"]:
        print(f"failed: {', '.join(results['failed'])}; the same command measures them again", file=sys.stderr)
        return 1
    state.unlink(missing_ok=True)
    return 0


def _unfinished(state: Path, settings: Settings) -> Results:
    """What earlier calls have measured on this commit in this size; else a beginning."""
    commit = source_commit()
    if state.exists():
        earlier: Results = json.loads(state.read_text(encoding="utf-8"))
        if (earlier["commit"], earlier["size"]) == (commit, settings.size):
            print(f"going on after {', '.join(earlier['tables']) or 'nothing'}", file=sys.stderr)
            return earlier
        print(f"{state.name} is of another commit or size: all tables are measured again", file=sys.stderr)
    facts = machine.facts(Path(settings.folder))
    return {"commit": commit, "size": settings.size, "machine": facts, "tables": {}, "seconds": {}, "failed": {}}


def source_commit() -> str:
    """The commit, with `-dirty` where the sources are changed; the pages written here do not count."""
    sources = ("trainer_cli", "scripts/bench", "configs", "pyproject.toml", "constraints.txt")
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return f"{commit}-dirty" if _git("status", "--porcelain", "--", *sources) else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def write(results: Results, root: Path) -> None:
    """Write the page, the plots, the results and the section of the README; remove plots of tables that are gone."""
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for path, text in pages(results).items():
        (root / path).write_text(text, encoding="utf-8")
    # A line for each table, so that a difference can be read.
    plain = {**results, "tables": None}
    tables = ",\n".join(f" {json.dumps(name)}: {json.dumps(own)}" for name, own in results["tables"].items())
    text = json.dumps(plain, indent=1).replace('"tables": null', f'"tables": {{\n{tables}\n}}')
    (root / RESULTS).write_text(text + "\n", encoding="utf-8")
    readme = root / README
    readme.write_text(with_section(readme.read_text(encoding="utf-8"), results), encoding="utf-8")


def render(root: Path) -> None:
    """Write the pages again from the saved results."""
    write(json.loads((root / RESULTS).read_text(encoding="utf-8")), root)


def pages(results: Results) -> dict[Path, str]:
    """By path: the page, and a plot for each table."""
    tables = [Table.from_json(plain) for own in results["tables"].values() for plain in own]
    texts = {FOLDER / f"{table.name}.svg": drawing(table) for table in tables}
    parts = ["# Benchmarks", _about(results), "## In short", "\n".join(short_rows(results)), _howto(results)]
    for table in tables:
        parts.append(f"## {table.title}\n\n{table.to_markdown()}")
        parts.append(f"![{table.title}]({FOLDER / table.name}.svg)")
        parts += [line] if (line := growth_note(table)) else []
    return {PAGE: "\n\n".join(parts) + "\n", **texts}


def drawing(table: Table) -> str:
    """Lines where rows have places on a plot, else bars of the first column."""
    column = table.columns[0]
    if points := table.points():
        return chart.svg(table.title, table.x_label, f"{column.name}, {column.unit}", points)
    bars = [(row.name, row.samples[column.name]) for row in table.rows]
    return chart.bars(table.title, f"{column.name}, {column.unit}", bars)


def growth_note(table: Table) -> str:
    """The exponents of the lines of a plot; empty for none."""
    slopes = {name: chart.exponent(line) for name, line in table.points().items()}
    exponents = [f"{name} {slope:.2f}" for name, slope in slopes.items() if slope is not None]
    if not exponents:
        return ""
    return f"Exponents of the growth (0: none, 1: linear, 2: quadratic): {' · '.join(exponents)}."


def _about(results: Results) -> str:
    facts = {**results["machine"], "commit": results["commit"]}
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    note = "" if results["size"] == Size.whole else f"\n\nSize: {results['size']}. These figures show nothing."
    return (
        "Written by `python scripts/bench --publish`; the text below a table states what is measured. Contenders take "
        f"turns in one run. Compare the ratios, since seconds depend on the machine.{note}\n\n"
        + "\n".join(["| measured on | |", "| --- | --- |", *rows])
    )


def _howto(results: Results) -> str:
    seconds = sum(results["seconds"].values())
    lines = [
        "## Repeat it",
        "```sh\npython scripts/bench --publish                  # all tables; the same command continues an "
        "interrupted call\n"
        "python scripts/bench --only loop --rounds 10    # one table, into bench-results/\n```",
        f"The contenders are installed into `.venv-bench`. This took {seconds / 60:.0f} minutes; the machine should "
        "do nothing else.",
    ]
    lines += [f"`{name}`: nothing to measure on this machine." for name, own in results["tables"].items() if not own]
    lines += [f"**{name} could not be measured**: {reason}." for name, reason in results["failed"].items()]
    return "\n\n".join(lines)


def with_section(readme: str, results: Results) -> str:
    """The README with its section of benchmarks, which is put in front of the documentation where there is none."""
    facts = results["machine"]
    section = "\n\n".join([
        _HEADING.strip(), "\n".join(short_rows(results)),
        f"Medians on {facts['processors']} cores, {facts['date']}; less is better. "
        "DCP is torch.distributed.checkpoint.\n"
        "torch_checkpointing waits less since it copies the state while the next step runs: what that step changes, "
        "such as\nthe statistics of a batch norm, can have its later value in the checkpoint "
        "([tried](docs/comparison.md#measured)).\n"
        "[All tables](BENCHMARKS.md), with spread, plots and how to repeat them.",
    ])  # fmt: skip
    before, _, after = readme.partition(_NEXT)
    before = before.partition(_HEADING)[0]
    return f"{before}{section}\n\n{_NEXT}{after}"


def short_rows(results: Results) -> list[str]:
    """The lines of the table of claims."""
    tables = {plain["name"]: Table.from_json(plain) for own in results["tables"].values() for plain in own}
    lines = ["| | `train` | others |", "| --- | --- | --- |"]
    for claim in CLAIMS:
        table = tables.get(claim.table)
        ours = None if table is None else _figure(claim, table, claim.ours)
        if table is None or ours is None:
            lines.append(f"| {claim.text} | not measured | |")
            continue
        others = [
            f"{name} {figure}"
            for row, name in claim.others.items()
            if (figure := _figure(claim, table, row)) is not None
        ]
        lines.append(f"| {claim.text} | {ours} | {' · '.join(others)} |")
    return lines


def _figure(claim: Claim, table: Table, name: str) -> str | None:
    row = next((row for row in table.rows if row.name == name), None)
    if row is None:
        return None
    if claim.of == "×":
        ratios = table.ratios(row, claim.column)
        return f"{median(ratios):.2f} ×" if ratios else None
    samples = row.samples.get(claim.column)
    if not samples:
        return None
    figure = median(samples)
    return f"{figure:,.0f} {claim.of}" if figure >= 100 else f"{figure:.3g} {claim.of}"
