"""What saves cost a training that goes on: the wait, the time lost, and how long until they are durable."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any

from savers import BESIDE, NONE, RAW, SAVERS, TORCH
from settings import Settings, Size
from table import Column, Row, Table, spread
from timing import HERE, Measure, Samples, Skipped, asked, interleaved
from training import EVERY, WARM

OFTEN = (TORCH, BESIDE, "train, sync", "train, async")
_NONE, _BETWEEN, _EVERY = "no saves", "between", f"every {EVERY}"
_SHARE = 0.65
"""How much of a step the raw write of a state takes at most where saves after every step are measured."""
_MOST = 8
"""Sequences a step."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and a step, and how many saves a process makes in stretches of how many steps."""

    size: str
    saves: int
    steps: int
    batch: int = 1


def measure(settings: Settings) -> list[Table]:
    """Two tables: single saves, and one after every step or every fifth."""
    if settings.small:
        saves = settings.pick(smoke=1, quick=3, whole=10)
        return [_single(settings, Sizes(settings.size, saves, 4)), _often(settings, Sizes(settings.size, saves, 5))]
    return [
        _single(settings, Sizes(settings.size, 10, 4)),
        _often(settings, _long_enough(settings, Sizes(settings.size, 5, 5))),
    ]


def _single(settings: Settings, sizes: Sizes) -> Table:
    names = [NONE, TORCH, "train, sync", "train, async"] if settings.small else list(SAVERS)
    measures = _measures(settings, sizes, names, often=False)
    samples, skipped = interleaved(measures, settings.rounds_or(2, 3), warm=0, needed=[NONE, TORCH, "train, sync"])
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
        f"A step takes {step:.3f} s. `stall` is the wait at the save and before the next optimizer step; the most is "
        f"the worst of {len(samples[TORCH]['stall'])}. `lost` is what a save and the {sizes.steps} steps after it took "
        "longer than as many steps before and after those, less what the same procedure reports with no saves at all: "
        f"{own['median']:.3f} s [{own['min']:.3f} to {own['max']:.3f}] of {own['count']}. Single differences within "
        "that range are none; the medians are of as many. What a save costs after those steps is not in it."
    ]
    return Table("stall", "A save while training goes on", TORCH, columns, rows, asdict(sizes), skipped, notes)


def _long_enough(settings: Settings, sizes: Sizes) -> Sizes:
    """With steps so long that a save after each of them does not measure the disk alone; at most so many sequences."""
    for batch in range(1, _MOST):
        own = replace(sizes, batch=batch)
        try:
            found = _measures(settings, replace(own, saves=3, steps=2), [RAW], often=False)[RAW]()
        except Skipped:
            return sizes
        if median(found["durable"]) <= _SHARE * median(found["step"]):
            return own
    return replace(sizes, batch=_MOST)


def _often(settings: Settings, sizes: Sizes) -> Table:
    measures = _measures(settings, sizes, OFTEN, often=True)
    samples, skipped = interleaved(measures, settings.rounds_or(2, 3), warm=0, needed=(TORCH, "train, sync"))
    rows = []
    for name, found in samples.items():
        for often, own in _in_order(found):
            base = _BETWEEN if often in (_BETWEEN, _EVERY) else _NONE
            rows.append(Row(f"{name}: {often}", {"step": own}, base=f"{name}: {base}"))
    columns = [Column("step", "s", 3, resolution=0.01)]
    return Table(
        "often", "Saves after every step, and every fifth", f"{TORCH}: no saves", columns, rows, asdict(sizes), skipped,
        ["Wall time of a training over its steps, until the last save is durable, but for the first "
         f"{WARM} steps and the saves in them, which get ready what all others use. "
         "`train` is the Trainer with its CheckpointerCallback, beside itself without saves, before and after; "
         "torch.save a plain loop, beside itself. Each keeps the newest checkpoint. Stretches of many steps differ "
         f"by more than a save after every {EVERY} costs: a step of these is therefore compared with the third and the "
         "fourth after each save (`between`), by when that is durable. A raw write of as many "
         "bytes beside a plain loop is no checkpoint: it is what the disk alone costs the steps on this machine. "
         f"Where it can, a whole-sized run takes so many sequences a step (`batch`, {_MOST} at most) that such a write "
         f"alone takes {_SHARE} of one: else saves after every step would tell of the disk."],
    )  # fmt: skip


def _in_order(found: Samples) -> list[tuple[str, list[float]]]:
    return [(often, found[often]) for often in (_NONE, _BETWEEN, _EVERY, "every step")]


def _measures(settings: Settings, sizes: Sizes, names: Sequence[str], *, often: bool) -> dict[str, Measure]:
    """A process for each name; in the smallest form one for all, as each imports torch."""
    if settings.size is Size.smoke:
        together = cache(partial(_measured, settings, sizes, names, often=often))
        return {name: lambda name=name: _samples(together(), name) for name in names}
    return {name: lambda name=name: _samples(_measured(settings, sizes, [name], often=often), name) for name in names}


def _measured(settings: Settings, sizes: Sizes, names: Sequence[str], *, often: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
        plan = json.dumps({**asdict(sizes), "often": often, "folder": folder})
        answers: dict[str, Any] = asked((sys.executable, str(HERE / "training.py"), plan, *names))
        return answers


def _samples(answers: dict[str, Any], name: str) -> Samples:
    samples: Samples = answers[name]
    if "skipped" in samples:
        raise Skipped(samples["skipped"])
    return samples
