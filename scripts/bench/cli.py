"""How long the quick answers of the command take, each beside `python -c pass` in the same minutes.

    python scripts/bench/cli.py [--rounds 15] [--json FILE]

The commands are run in turn, round after round, so that all of them meet the same machine; a busy one makes all
figures larger, and the ratio to an empty Python less so. Prints a table in Markdown, and writes a JSON file if named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from timing import environment

EMPTY = "python -c pass"
TRAIN = (sys.executable, "-m", "trainer_cli")
COMMANDS: Mapping[str, tuple[tuple[str, ...], float | None]] = {
    EMPTY: ((sys.executable, "-c", "pass"), None),
    "train --help": ((*TRAIN, "--help"), 0.15),
    "train fit --help": ((*TRAIN, "fit", "--help"), 0.15),
    "train list": ((*TRAIN, "list"), 0.15),
    "completion of a key": ((*TRAIN, "complete", "--answer"), 0.15),
    "train config digits": ((*TRAIN, "config", "digits"), 0.6),
    "a mistyped key": ((*TRAIN, "fit", "digits", "loop.max_step=3"), 0.6),
    "a mistyped flag": ((*TRAIN, "fit", "--experiment", "digits"), 0.6),
}
"""What is timed, and what it may take on an idle laptop, in seconds."""
EXPECTED = {"a mistyped key": 2, "a mistyped flag": 2}
LINE = "train fit digits optimizer."


def seconds(command: tuple[str, ...], code: int, folder: str) -> float:
    """Wall time of one process."""
    env = {**environment(), "TRAIN_COMPLETE_LINE": LINE}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    wall_s = time.perf_counter() - began
    if done.returncode != code:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}, not {code}:\n{done.stderr[-2000:]}")
    return wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds + 1):
            for name, (command, _) in COMMANDS.items():
                wall_s = seconds(command, EXPECTED.get(name, 0), folder)
                if number:  # The first round reads files that are not cached yet.
                    times[name].append(wall_s)
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for name, (_, goal_s) in COMMANDS.items():
        low, _, high = quantiles(times[name], n=4)
        pairs = [one / empty for one, empty in zip(times[name], times[EMPTY], strict=True)]
        rows.append(
            {
                "command": name, "median_s": median(times[name]), "quartiles_s": [low, high],
                "ratio_to_empty_python": median(pairs), "goal_s": goal_s,
            }
        )  # fmt: skip
    print("| command | median s | quartiles s | times `python -c pass` | goal s |\n|---|---|---|---|---|")
    for row in rows:
        low, high = row["quartiles_s"]
        goal = "" if row["goal_s"] is None else f"{row['goal_s']}"
        print(
            f"| {row['command']} | {row['median_s']:.3f} | {low:.3f} to {high:.3f} "
            f"| {row['ratio_to_empty_python']:.1f} | {goal} |"
        )
    print(f"\nPython {platform.python_version()}, {os.cpu_count()} CPUs, load {load:.1f}, {args.rounds} rounds")
    if args.json is not None:
        facts = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": load, "rounds": args.rounds}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
