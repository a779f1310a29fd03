"""Seconds of a sweep whose runs see all devices, and of one that gives each run a device of its own."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from settings import Settings
from table import Column, Row, Table
from timing import children_processor, interleaved, run, seconds

RUNS = 4
SHARED, OWN = "--jobs 2", "--jobs 2 --devices 0,1"


def measure(settings: Settings) -> list[Table]:
    """One table. The CPU stands in for two devices."""
    steps = settings.pick(smoke=10, quick=500, whole=2000)
    measures = {name: partial(_sweep, settings.scratch, name, steps) for name in (SHARED, OWN)}
    samples, skipped = interleaved(measures, settings.rounds_or(3, 5), warm=settings.warm, needed=list(measures))
    rows = [Row(name, found) for name, found in samples.items()]
    columns = [Column("process", "s", 2, resolution=0.2), Column("processor", "s", 2, resolution=0.2)]
    notes = [
        f"`train fit -m` with {RUNS} runs of `digits_mlp`, {steps:,} steps each, two at a time on the CPU, which "
        "stands in for the devices: the difference is what it costs to list them, and to lock one for each run."
    ]
    title = f"Sweep over devices (stand-in), {RUNS} runs"
    return [Table("sweep", title, SHARED, columns, rows, {"steps": steps, "runs": RUNS}, skipped, notes)]


def _sweep(scratch: Path, flags: str, steps: int) -> dict[str, float]:
    """Run the sweep in a folder of its own, with the locks of its devices in it."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        command = (
            sys.executable, "-m", "trainer_cli", "fit", "-m", *flags.split(), "digits_mlp", "device=cpu",
            f"seed=range({RUNS})", f"loop.max_duration={steps}",
        )  # fmt: skip
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0,1", "XDG_CACHE_HOME": folder}
        with children_processor(figures, "processor"):
            figures["process"] = seconds(lambda: run(command, env=env, cwd=folder))
    return figures
