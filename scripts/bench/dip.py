"""How far the step rate falls while a save is written behind the training, and for how long."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import nn

import disk
from savers import DCP, META, SAVERS, TORCH, TRAIN, TRAIN_SYNC
from settings import Settings
from state import gpt_state, size_bytes
from table import Column, Row, Table
from timing import HERE, Samples, Skipped, asked, interleaved, seconds

NAMES = (TORCH, DCP, "DCP async, process", META, TRAIN_SYNC, TRAIN)
_USUAL = 200
"""Steps before each save that say how long one takes."""


def measure(settings: Settings) -> list[Table]:
    """One table; each contender has a process for itself."""
    names = (TRAIN,) if settings.small else NAMES
    saves = settings.pick(smoke=1, quick=3, whole=3)
    measures = {name: partial(_measured, settings, name, saves) for name in names}
    samples, skipped = interleaved(measures, settings.rounds_or(1, 1), warm=0, needed=[TRAIN])
    base = TORCH if TORCH in samples else TRAIN
    size = samples[TRAIN].pop("bytes")[0]
    step = samples[TRAIN].pop("usual")[0]
    columns = [
        Column("slower", "%", 1, resolution=3.0, ratio=False),
        Column("window", "s", 2, resolution=0.05, ratio=False),
        Column("lost", "steps", 1, resolution=5.0),
        Column("worst step", "ms", 1, resolution=2.0, ratio=False),
    ]
    rows = [Row(name, {column.name: found[column.name] for column in columns}) for name, found in samples.items()]
    notes = [
        f"Steps of a small network, {step:.1f} ms each, while a state of {size / 1e9:.2f} GB is saved from time to "
        "time. "
        "`window` is from the call to the end of the write; `slower`: by how much fewer steps than usual are done in "
        "it; `lost`: the same in steps; `worst step` includes the call. 100 % slower: training waits for the whole "
        "save."
    ]
    title = "The step rate while a save is written"
    return [Table("dip", title, base, columns, rows, {"saves": saves}, skipped, notes)]


def _measured(settings: Settings, name: str, saves: int) -> Samples:
    with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
        inner = Settings(settings.size, settings.rounds, folder).to_text()
        samples: Samples = asked((sys.executable, str(HERE / "dip.py"), inner, name, str(saves)))
        return samples


def dips(settings: Settings, saver: str, saves: int) -> Samples:
    """Each save: the window in which it is written, and the steps in it beside those before it."""
    tree, save, step = gpt_state(settings), SAVERS[saver](), _small_training()
    found: Samples = {"window": [], "slower": [], "lost": [], "worst step": []}
    for number in range(saves + 1):
        usual = median(seconds(step) for _ in range(settings.pick(smoke=5, quick=_USUAL, whole=_USUAL)))
        path = settings.scratch / f"step{number + 1}"
        began = time.perf_counter()
        handed = save(tree, path)
        handed.staged()
        times = [time.perf_counter() - began + seconds(step)]
        while not handed.written.done():
            times.append(seconds(step))
        window = time.perf_counter() - began
        handed.written.result()
        disk.remove(path)
        if number == 0:  # The first allocates what the others use again.
            continue
        lost = window - len(times) * usual
        found["window"].append(window)
        found["slower"].append(max(lost, 0.0) / window * 100)
        found["lost"].append(max(lost, 0.0) / usual)
        found["worst step"].append(max(times) * 1e3)
    return {**found, "usual": [usual * 1e3], "bytes": [float(size_bytes(tree))]}


def _small_training() -> Callable[[], None]:
    """One step of it; its parameters are not those that are saved."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(128, 512)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main(settings: Settings, saver: str, saves: int) -> None:
    logging.disable(logging.WARNING)
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        answer: object = dips(settings, saver, saves)
    except Skipped as reason:
        answer = {"skipped": str(reason)}
    print(json.dumps(answer), file=stdout, flush=True)


if __name__ == "__main__":
    main(Settings.from_text(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    sys.stdout.flush()
    # Savers of others leave threads and processes that are not joined.
    os._exit(0)
