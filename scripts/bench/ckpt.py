"""How long `train ckpt ls` and the choice of a checkpoint to go on from take in a folder of many small checkpoints.

    python scripts/bench/ckpt.py [COUNT [RUNS]] [--json]

Prints a Markdown table, or JSON. Processes are fresh ones, timed side by side with an empty interpreter; on a busy
machine the processor's time is the steadier measure.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import environment

DISCOVERY = """
import json, sys, time
from pathlib import Path
from trainer_cli.catalog.catalog import Catalog, newest_intact
clock, cpu = time.perf_counter(), time.process_time()
found = newest_intact(Catalog.of(Path(sys.argv[1])), "bench")
clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
assert found is not None and found.step == int(sys.argv[2])
print(json.dumps([clock, cpu]))
"""
Times = tuple[float, float]
"""Seconds of the clock, and of the processor."""


def main(count: int, runs: int, *, as_json: bool) -> None:
    """Make the folder, time, print."""
    times: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        make(root, count)
        for _ in range(runs):
            times.setdefault("python -c pass", []).append(timed(["-c", "pass"]))
            times.setdefault("train ckpt ls", []).append(timed(["-m", "trainer_cli", "ckpt", "ls", str(root)]))
            done = subprocess.run(
                [sys.executable, "-c", DISCOVERY, str(root), str(count)], capture_output=True, text=True, check=True
            )
            clock, cpu = json.loads(done.stdout)
            times.setdefault("resume discovery, newest verified", []).append((clock, cpu))
    figures = {name: dict(zip(("clock_s", "cpu_s"), summary(found), strict=True)) for name, found in times.items()}
    if as_json:
        print(json.dumps({"checkpoints": count, "runs": runs, "figures": figures}, indent=2))
        return
    print(f"| {count} checkpoints | median s | least s | processor, least s |\n|---|---|---|---|")
    for name, values in figures.items():
        clock, cpu = values["clock_s"], values["cpu_s"]
        print(f"| {name} | {clock['median']:.3f} | {clock['least']:.3f} | {cpu['least']:.3f} |")


def summary(found: list[Times]) -> list[dict[str, float]]:
    """Median and least, of the clock and of the processor."""
    return [{"median": statistics.median(one), "least": min(one)} for one in zip(*found, strict=True)]


def make(root: Path, count: int) -> None:
    """Checkpoints of steps 1 to `count`."""
    import torch

    from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer

    checkpointer = make_sync_checkpointer()
    for step in range(1, count + 1):
        facts = CheckpointMetadata(run_id="bench", attempt=1, step=step, metrics={"val/loss": 1 / step})
        checkpointer.save(
            {"model": {"w": torch.zeros(16)}, "progress": {"step": step}}, root / f"step{step}", metadata=facts
        )


def timed(arguments: list[str]) -> Times:
    """The times of a whole process."""
    before, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True, env=environment())
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - before, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=1000)
    parser.add_argument("runs", nargs="?", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    main(given.count, given.runs, as_json=given.json)
