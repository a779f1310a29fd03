"""What a save costs a training that goes on: the wait, the time lost, and how long until it is durable."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from statistics import median
from typing import Any

from savers import NONE, SAVERS, TORCH, TRAIN, TRAIN_SYNC
from settings import Settings, Size
from table import Column, Row, Table, spread
from timing import HERE, Measure, Samples, Skipped, asked, interleaved

_STEPS = 4


def measure(settings: Settings) -> list[Table]:
    """One table; each contender has a process for itself."""
    plan = {"size": settings.size, "steps": _STEPS, "saves": settings.pick(smoke=1, quick=3, whole=3)}
    names = [NONE, TORCH, TRAIN_SYNC, TRAIN] if settings.small else list(SAVERS)
    measures = trainings(settings, plan, names)
    samples, skipped = interleaved(measures, settings.rounds_or(2, 1), warm=0, needed=[NONE, TORCH, TRAIN_SYNC])
    absent = samples.pop(NONE)
    own = spread(absent["lost"])
    for found in samples.values():
        found["lost"] = [lost - own["median"] for lost in found["lost"]]
    step = median(absent["step"])
    resolution = own["max"] - own["min"]
    columns = [
        Column("stall", "s", 4, resolution=0.005),
        Column("lost", "s", 3, resolution=resolution),
        Column("durable", "s", 3, resolution=0.02),
    ]
    rows = [Row(name, {column.name: found[column.name] for column in columns}) for name, found in samples.items()]
    notes = [
        f"A step takes {step:.3f} s. `stall` is the wait at the save and before the next optimizer step. `lost` is "
        f"what a save and the {_STEPS} steps after it took longer than as many steps before and after those, less what "
        "the same procedure reports with no saves at all: "
        f"{own['median']:.3f} s [{own['min']:.3f} to {own['max']:.3f}]. "
        "Single differences within that range are noise. Costs of a save after those steps are not included. "
        "`durable`: until it survives a power cut, by its documentation; torch_checkpointing and "
        "torch's experimental checkpointer call no fsync."
    ]
    return [Table("stall", "A save while training goes on", TORCH, columns, rows, plan, skipped, notes)]


def trainings(settings: Settings, plan: dict[str, Any], names: Sequence[str]) -> dict[str, Measure]:
    """A process of training.py for each name; in the smallest form one for all, as each imports torch."""
    if settings.size is Size.smoke:
        together = cache(partial(_measured, settings, plan, names))
        return {name: partial(lambda name: _samples(together(), name), name) for name in names}
    return {name: partial(lambda name: _samples(_measured(settings, plan, [name]), name), name) for name in names}


def _measured(settings: Settings, plan: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
        text = json.dumps({**plan, "folder": folder})
        answers: dict[str, Any] = asked((sys.executable, str(HERE / "training.py"), text, *names))
        return answers


def _samples(answers: dict[str, Any], name: str) -> Samples:
    samples: Samples = answers[name]
    if "skipped" in samples:
        raise Skipped(samples["skipped"])
    return samples
