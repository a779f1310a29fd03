"""What a search trains of a grid and finds in it, and what it costs to pause a run and to go on with it."""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from settings import Settings
from table import Column, Row, Table
from timing import children_processor, interleaved, run, seconds

GRID = "grid"
PRUNED = {GRID: (), "sweep.prune=asha": ("sweep.prune=asha",), "sweep.prune=median": ("sweep.prune=median",)}
BASE = ("fit", "-m", "digits_mlp", "device=cpu", "report=false", "loggers=jsonl")
FEW, MANY = 2, 10
"""Pauses of one run. Both start the server of the forks, and the first process imports torch."""
PAUSED = "a pause and the continuation"


def measure(settings: Settings) -> list[Table]:
    """Two tables."""
    rates = settings.pick(smoke="1e-4,0.01", quick="1e-4,1e-3,0.01,0.1", whole="1e-5,1e-4,1e-3,3e-3,0.01,0.03,0.1,1")
    widths = settings.pick(smoke="[8],[16]", quick="[4],[16],[64]", whole="[4],[16],[64],[256]")
    steps = settings.pick(smoke=10, quick=90, whole=360)
    words = (
        *BASE, f"optimizer.lr={rates}", f"model.hidden={widths}", f"loop.max_duration={steps}",
        f"loop.eval_interval={steps // 10}",
    )  # fmt: skip
    losses: dict[str, list[float]] = {}
    measures = {name: partial(_search, settings.scratch, (*words, *more), losses) for name, more in PRUNED.items()}
    samples, skipped = interleaved(measures, settings.rounds_or(1, 3), warm=0, needed=list(measures))
    runs = len(losses[GRID])
    for values in samples.values():
        values["steps"] = [100 * trained / (steps * runs) for trained in values["steps"]]
        # The same run has the same loss in each sweep.
        values["rank"] = [1.0 + sum(loss < best for loss in losses[GRID]) for best in values["loss"]]
    columns = [
        Column("steps", "% of the grid", 0, ratio=False), Column("rank", "of the best found", 0, ratio=False),
        Column("loss", "best found", 4, ratio=False), Column("process", "s", 1, resolution=0.5),
    ]  # fmt: skip
    notes = [
        f"`train fit -m digits_mlp` with {runs} combinations of a learning rate and a width, up to {steps} steps "
        "each, one at a time. The rank is that of the run with the best validation loss of those that were trained to "
        "the end, among all runs of the grid."
    ]
    rows = [Row(name, values) for name, values in samples.items()]
    tables = [
        Table("search", f"Search, {runs} runs", GRID, columns, rows, {"steps": steps, "runs": runs}, skipped, notes)
    ]
    pauses = {PAUSED: partial(_pause, settings.scratch)}
    samples, skipped = interleaved(pauses, settings.rounds_or(3, 9), warm=settings.warm, needed=[PAUSED])
    columns = [Column("wall", "s", 2, resolution=0.05, ratio=False), Column("processor", "s", 2, ratio=False)]
    notes = [
        f"A run of `digits_mlp` that a search pauses {MANY} times, less one that it pauses {FEW} times, for each "
        "pause: the checkpoint, the end of the process, a decision, and another process that loads the checkpoint."
    ]
    rows = [Row(name, values) for name, values in samples.items()]
    title, counts = "A run that is paused", {"pauses": MANY - FEW}
    return [*tables, Table("pauses", title, PAUSED, columns, rows, counts, skipped, notes)]


def _sweep(scratch: Path, words: tuple[str, ...]) -> tuple[dict[str, float], list[Mapping[str, str]]]:
    """What a sweep takes, and the rows of its table."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        command = (sys.executable, "-m", "trainer_cli", *words)
        with children_processor(figures, "processor"):
            figures["process"] = seconds(lambda: run(command, env={"OMP_NUM_THREADS": "1"}, cwd=folder))
        with open(Path(folder) / "runs/digits_mlp/sweep/sweep.csv", encoding="utf-8") as file:
            return figures, list(csv.DictReader(file))


def _search(scratch: Path, words: tuple[str, ...], losses: dict[str, list[float]]) -> dict[str, float]:
    """A search: the steps that it trains, and the loss that it finds; `losses` gets those of its finished runs."""
    figures, rows = _sweep(scratch, words)
    found = [float(row["best val/loss"]) for row in rows if row["status"] == "finished"]
    losses[words[-1] if words[-1].startswith("sweep.") else GRID] = found
    return {"steps": sum(int(row["step"]) for row in rows), "loss": min(found), **figures}


def _pause(scratch: Path) -> dict[str, float]:
    """The seconds of one of the pauses that one search has more than another."""
    words = (*BASE, "optimizer.lr=choice(0.01)", "loop.max_duration=40", "loop.eval_interval=2", "sweep.prune=asha")
    few, many = (
        _sweep(scratch, (*words, f"sweep.rungs=[{','.join(f'{2 + 2 * number}st' for number in range(pauses))}]"))[0]
        for pauses in (FEW, MANY)
    )
    return {
        name: (many[measured] - few[measured]) / (MANY - FEW)
        for name, measured in (("wall", "process"), ("processor", "processor"))
    }
