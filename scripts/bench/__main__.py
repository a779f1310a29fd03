"""All tables of what this project costs, ours beside others, in one run: `python scripts/bench --quick`.

Each table is measured in a process of its own, contenders in turn, round after round. Writes results.md and
results.json (and plots) to the folder named by --out. With --compare, reports what got slower since an earlier
results.json and exits with 1 if anything did. Peers that are not installed are skipped: `pip install -r
scripts/bench/peers.txt` into an environment of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import chart
import machine
from settings import Settings, Size
from slower import TOLERANCE, Comparison, compare
from table import Table

TABLES = {
    "cli": "answers", "start": "start", "loop": "loop", "callbacks": "callbacks", "save": "save", "load": "load",
    "stall": "stall", "scale": "scale", "files": "files", "console": "console", "ranks": "ranks",
    "gpu": "gpu",
}  # fmt: skip
"""By name: the module that measures it."""
NOTES = {
    Size.smoke: "Smoke: every row once, in its smallest form; the figures say nothing. ",
    Size.quick: "Quick: small sizes, few rounds. ",
    Size.whole: "",
}


def main() -> int:
    args = _arguments()
    if args.child is not None:
        tables = importlib.import_module(TABLES[args.child]).measure(Settings.from_text(args.settings))
        print(json.dumps([table.to_json() for table in tables]))
        return 0
    before = None if args.compare is None else _read(args.compare)
    args.out.mkdir(parents=True, exist_ok=True)
    tables = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.folder) as scratch:
        result: dict[str, Any] = {"machine": machine.facts(Path(scratch)), "size": args.size, "tables": []}
        settings = Settings(args.size, args.rounds, scratch)
        for name in args.only or TABLES:
            began = time.perf_counter()
            print(f"{name} …", file=sys.stderr, flush=True)
            tables += _measured(name, settings)
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            # After each table, so that a run that is broken off has what it had.
            result["tables"] = [table.to_json() for table in tables]
            (args.out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            (args.out / "results.md").write_text(_page(result, tables, args.out), encoding="utf-8")
    print((args.out / "results.md").read_text(encoding="utf-8"))
    if before is None:
        return 0
    comparison = compare(before, tables, args.tolerance)
    print(message(comparison))
    if comparison.compared == 0:
        return 2
    return 1 if comparison.slower else 0


def message(comparison: Comparison) -> str:
    """What got slower, and faster, and what could not be said."""
    lines = [f"## Compared with the earlier result: {comparison.compared} figures", ""]
    lines += [f"- slower: {change}" for change in comparison.slower]
    lines += [f"- faster: {change}" for change in comparison.faster]
    lines += [f"- not compared: {reason}" for reason in comparison.left_out]
    if comparison.compared and not comparison.slower:
        lines.append("Nothing got slower beyond the noise of the two.")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const=Size.quick, help="small sizes, few rounds, no peers"
    )
    size.add_argument(
        "--smoke", dest="size", action="store_const", const=Size.smoke,
        help="every row once in its smallest form: shows that all can be measured; the figures say nothing",
    )  # fmt: skip
    parser.set_defaults(size=Size.whole)
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each table, instead of its own number")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), metavar="FOLDER", help="(bench-results)")
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), metavar="FOLDER",
        help="on the disk whose speed is measured; what is written there is removed (the working directory)",
    )  # fmt: skip
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="report what got slower; exit with 1 if any")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"growth of a median that is none ({TOLERANCE})"
    )
    parser.add_argument("--child", choices=TABLES, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, but it is at least 1")
    if args.compare is not None and not args.compare.is_file():
        parser.error(f"--compare: there is no file {args.compare}")
    return args


def _measured(name: str, settings: Settings) -> list[Table]:
    """In a process of its own, so that no table inherits another's memory or imports."""
    command = [sys.executable, str(Path(__file__).parent), "--child", name, "--settings", settings.to_text()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the table {name} could not be measured")
    return [Table.from_json(plain) for plain in json.loads(done.stdout.strip().splitlines()[-1])]


def _read(file: Path) -> list[Table]:
    return [Table.from_json(plain) for plain in json.loads(file.read_text(encoding="utf-8"))["tables"]]


def _page(result: dict[str, Any], tables: list[Table], folder: Path) -> str:
    """The Markdown, with a plot beside it for each table that has points."""
    facts = [f"{name}: {value}" for name, value in result["machine"].items()]
    parts = ["# Benchmarks", f"{NOTES[result['size']]}{' · '.join(facts)}"]
    for table in tables:
        parts.append(f"## {table.name}\n\n{table.to_markdown()}")
        column, points = table.columns[0], table.points()
        if points:
            drawing = chart.svg(table.title, table.x_label, f"{column.name}, {column.unit}", points)
            (folder / f"{table.name}.svg").write_text(drawing, encoding="utf-8")
            parts.append(f"![{table.title}]({table.name}.svg)")
            parts += [
                f"{name}: the cost grows with the {slope:.2f}th power (1 is linear)."
                for name, line in points.items()
                if (slope := chart.exponent(line)) is not None
            ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
