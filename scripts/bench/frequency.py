"""Time of a training that saves after every 1, 5, 10, 25, 50 and 100 steps, relative to one that does not save."""

from __future__ import annotations

from typing import Any

from savers import DCP, META, TORCH, TRAIN, TRAIN_SYNC
from settings import Settings
from stall import trainings
from table import Column, Row, Table
from timing import interleaved

SAVERS = (TORCH, DCP, META, TRAIN_SYNC, TRAIN)


def measure(settings: Settings) -> list[Table]:
    """One table with a plot; each contender has a process for itself."""
    plan: dict[str, Any] = {
        "size": settings.pick(smoke="smoke", quick="quick", whole="quick"),
        "steps": settings.pick(smoke=4, quick=40, whole=40),
        "every": settings.pick(smoke=[1, 2], quick=[1, 10, 50], whole=[1, 5, 10, 25, 50, 100]),
    }
    names = [TORCH, TRAIN_SYNC, TRAIN] if settings.small else SAVERS
    samples, skipped = interleaved(
        trainings(settings, plan, names), settings.rounds_or(2, 2), warm=0, needed=[TORCH, TRAIN_SYNC, TRAIN]
    )
    rows = []
    for name, found in samples.items():
        base = f"{name}: no saves"
        rows.append(Row(base, {"step": found["0"]}))
        rows += [
            Row(f"{name}: every {every}", {"step": found[str(every)]}, base=base, series=name, x=float(every))
            for every in plan["every"]
        ]
    notes = [
        "Wall time of a training over its steps, until the last save is durable, without its first steps and their "
        "saves, which prepare what all others use. `train` is the Trainer with its CheckpointerCallback; the others "
        "are called in a plain loop. Each keeps the newest checkpoint, and is compared with itself without saves, "
        "before and after. The state of 63 MB is to a step of some 30 ms as the smallest one that PCcheck published "
        "(1.1 GB, 0.3 s; 1.02 with a save after every 50 steps, CheckFreq 1.17, on an A100 and a cloud disk)."
    ]
    columns = [Column("step", "ms", 2, resolution=0.2)]
    title = "A training that saves after every so many steps"
    return [Table("frequency", title, "", columns, rows, plan, skipped, notes, x_label="steps from save to save")]
