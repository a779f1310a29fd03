"""All tables of what this project costs, ours beside others, in one run: `python scripts/bench --quick`.

Each table is measured in a process of its own, contenders in turn, round after round. Writes results.md and
results.json (and plots) to the folder named by --out. With --compare, reports what got slower since an earlier
results.json and exits with 1 if anything did. A row says where a peer is not installed: scripts/bench/peers.txt lists
them. With --publish, all of it with every peer, in an environment that is made for it, becomes BENCHMARKS.md: half an
hour on two cores that do nothing else. A table that fails is reported, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import peers_environment
import publish
from measuring import TableFailed, answer_as_child, measured
from settings import Settings, Size
from slower import TOLERANCE, Comparison, compare
from table import Table

TABLES = {
    "cli": "answers", "start": "start", "loop": "loop", "callbacks": "callbacks", "save": "save", "linked": "linked",
    "load": "load", "stall": "stall", "frequency": "frequency", "dip": "dip", "recovery": "recovery",
    "failures": "failures", "batches": "batches", "growth": "growth", "scale": "scale", "files": "files",
    "console": "console", "ranks": "rank_table", "gpu": "gpu", "stores": "stores",
    "replay": "replayed", "sweep": "sweep_devices", "search": "searched", "serve": "served", "source": "kept",
    "probe": "forecast",
}  # fmt: skip
"""By name: the module that measures it."""
NOTES = {
    Size.smoke: "Smoke: every row once, in its smallest form; the figures say nothing. ",
    Size.quick: "Quick: small sizes, few rounds. ",
    Size.whole: "",
}


def main() -> int:
    args = _arguments()
    # A shell's background jobs ignore Ctrl-C, and hand that down; what is measured must hear it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # As at Ctrl-C, so that the processes of a table end too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if args.child is not None:
        return answer_as_child(TABLES[args.child], Settings.from_text(args.settings))
    if args.render:
        publish.render(args.root)
        return 0
    if args.publish:
        return _publish(args)
    before = None if args.compare is None else _read(args.compare)
    args.out.mkdir(parents=True, exist_ok=True)
    tables: list[Table] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.folder) as scratch:
        result: dict[str, Any] = {"machine": machine.facts(Path(scratch)), "size": args.size, "tables": []}
        settings = Settings(args.size, args.rounds, scratch)
        for name in args.only or TABLES:
            began = time.perf_counter()
            print(f"{name} …", file=sys.stderr, flush=True)
            try:
                tables += measured(name, settings)
            except TableFailed as error:
                failed.append(name)
                print(f"FAILED: {name}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            # After each table, so that a run that is broken off has what it had.
            result["tables"] = [table.to_json() for table in tables]
            (args.out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            (args.out / "results.md").write_text(_page(result, tables, args.out), encoding="utf-8")
    if tables:
        print((args.out / "results.md").read_text(encoding="utf-8"))
    if failed:
        return 1
    if before is None:
        return 0
    comparison = compare(before, tables, args.tolerance)
    print(message(comparison))
    if comparison.compared == 0:
        return 2
    return 1 if comparison.slower else 0


def _publish(args: argparse.Namespace) -> int:
    if args.size is Size.whole:
        peers_environment.enter()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.folder) as scratch:
        settings = Settings(args.size, args.rounds, scratch)
        state = args.out / "published.json"
        return publish.publish(args.only or list(TABLES), settings, measured, state=state, root=args.root)


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
    parser.add_argument(
        "--publish",
        action="store_true",
        help="write BENCHMARKS.md, its plots and the rows of the README; tables that an earlier call finished are kept",
    )
    parser.add_argument("--render", action="store_true", help="write these again from docs/benchmarks/results.json")
    parser.add_argument(
        "--root", type=Path, default=publish.ROOT, metavar="FOLDER", help="whose pages are written (the project's)"
    )
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
        parser.error(f"--rounds is {args.rounds}, but it must be at least 1")
    if args.compare is not None and not args.compare.is_file():
        parser.error(f"--compare: there is no file {args.compare}")
    return args


def _read(file: Path) -> list[Table]:
    return [Table.from_json(plain) for plain in json.loads(file.read_text(encoding="utf-8"))["tables"]]


def _page(result: dict[str, Any], tables: list[Table], folder: Path) -> str:
    """The Markdown, with a plot beside it for each table that has points."""
    facts = [f"{name}: {value}" for name, value in result["machine"].items()]
    parts = ["# Benchmarks", f"{NOTES[result['size']]}{' · '.join(facts)}"]
    for table in tables:
        parts.append(f"## {table.name}\n\n{table.to_markdown()}")
        if table.points():
            (folder / f"{table.name}.svg").write_text(publish.drawing(table), encoding="utf-8")
            parts += [f"![{table.title}]({table.name}.svg)", publish.growth_note(table)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
