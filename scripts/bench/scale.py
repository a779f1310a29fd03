"""How costs grow: of a step with callbacks and parameters, of a save with bytes, tensors and ranks, of discovery with
age."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt import DISCOVERY, make
from save import BUFFERED, DIRECT, durations
from settings import Settings
from state import even_state
from table import Column, Row, Table
from timing import Measure, interleaved
from trainer_cli import Callback, Logging, Trainer, TrainingLoop
from trainer_cli.checkpoint.group_save import RankReport, read_reports
from trainer_cli.checkpoint.save import RankFiles
from trainer_cli.layout.parts import PartTable
from trainer_cli.layout.shards import Shard
from trainer_cli.manifest import FileEntry, Manifest
from trainer_cli.policy.rules import CheckpointKind

MB = 1_000_000
STEP_US = Column("step", "µs", 1, resolution=10.0)


def measure(settings: Settings) -> list[Table]:
    """Six tables, each with a plot."""
    # The vectors are small: a second thread would only wait.
    torch.set_num_threads(1)
    return [
        by_callbacks(settings),
        by_parameters(settings),
        *by_state(settings),
        by_checkpoints(settings),
        by_ranks(settings),
    ]


class Idle(Callback):
    """Overrides a hook of each step, and does nothing there."""

    def on_train_step_end(self, *_: Any) -> None:
        return None


class Deaf(Callback):
    """Overrides nothing."""


class Chain(nn.Module):
    """So many parameters in a row, each a vector; the loss is a sum over them. Notes when it is called."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.stamps: list[float] = []
        self.parts = nn.ParameterList([nn.Parameter(torch.rand(64)) for _ in range(tensors)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.stamps.append(time.perf_counter())
        return torch.stack([*self.parts]).mul(batch).sum()

    def step_us(self) -> float:
        """From call to call, after a fifth of them."""
        counted = self.stamps[len(self.stamps) // 5 :]
        return (counted[-1] - counted[0]) / (len(counted) - 1) * 1e6


def by_callbacks(settings: Settings) -> Table:
    """The Trainer's step with 0 to 1,000 callbacks, beside a plain loop."""
    counts = settings.pick(smoke=[0, 10], quick=[0, 10, 100], whole=[0, 1, 10, 100, 1000])
    steps = settings.pick(smoke=20, quick=200, whole=1000)
    measures: dict[str, Measure] = {"by hand": partial(_by_hand, 4, steps)}
    rows: dict[str, tuple[str, int]] = {}
    for kind, callback in {"overriding one hook": Idle, "overriding none": Deaf}.items():
        for count in counts:
            name = f"{count} callbacks, {kind}"
            measures[name] = partial(_by_trainer, 4, steps, [callback() for _ in range(count)])
            rows[name] = kind, count
    return _steps("scale-callbacks", "A step with so many callbacks", "callbacks", measures, rows, settings, steps)


def by_parameters(settings: Settings) -> Table:
    """A step of a model with 10 to 1,000 parameters, each beside a plain loop over the same."""
    counts = settings.pick(smoke=[10], quick=[10, 100], whole=[10, 100, 300, 1000])
    steps = settings.pick(smoke=20, quick=60, whole=300)
    measures: dict[str, Measure] = {}
    rows: dict[str, tuple[str, int]] = {}
    for count in counts:
        runs = {"by hand": partial(_by_hand, count, steps), "train": partial(_by_trainer, count, steps, [])}
        for kind, run in runs.items():
            name = f"{kind}, {count} parameters"
            measures[name], rows[name] = run, (kind, count)
    return _steps("scale-parameters", "A step with so many parameters", "parameters", measures, rows, settings, steps)


def by_state(settings: Settings) -> list[Table]:
    """A save against bytes (in 100 tensors), and against tensors (of the same bytes), beside the bare write of them."""
    sizes = settings.pick(smoke=[1], quick=[1, 10, 50], whole=[10, 30, 100, 300, 1000, 3000])
    total, counts = settings.pick(smoke=(1, [10]), quick=(20, [10, 100, 1000]), whole=(1000, [10, 100, 1000, 10_000]))
    return [
        _saves("scale-bytes", "A save of so many bytes", "MB", {size: (size, 100) for size in sizes}, settings),
        _saves(
            "scale-tensors", f"A save of {total} MB in so many tensors", "tensors",
            {count: (total, count) for count in counts}, settings,
        ),
    ]  # fmt: skip


def by_checkpoints(settings: Settings) -> Table:
    """Finding the newest sound checkpoint of 1 to 3,000, in a fresh process, its imports not counted."""
    counts = settings.pick(smoke=[1], quick=[1, 30], whole=[1, 10, 100, 1000, 3000])
    measures: dict[str, Measure] = {}
    for count in counts:
        root = settings.scratch / f"of{count}"
        make(root, count)
        measures[f"{count} checkpoints"] = partial(_discovered, root, count)
    samples, _ = interleaved(measures, settings.rounds_or(3, 5), warm=settings.warm, needed=list(measures))
    rows = [
        Row(name, found, base=None, series="discovery", x=float(name.split()[0])) for name, found in samples.items()
    ]
    columns = [Column("time", "ms", 2, resolution=1.0, ratio=False), Column("processor", "ms", 2, 1.0, ratio=False)]
    return Table(
        "scale-checkpoints", "Discovery among so many checkpoints", "", columns, rows, {"counts": counts},
        x_label="checkpoints",
    )  # fmt: skip


def by_ranks(settings: Settings) -> Table:
    """What rank 0 does alone in a save of so many ranks that share every tensor, and in the resume of it: arithmetic
    with made-up reports, in processor time. The ranks' messages are not sent."""
    counts = settings.pick(smoke=[2], quick=[16, 64], whole=[64, 256, 1024])
    tensors = settings.pick(smoke=10, quick=200, whole=1000)
    measures: dict[str, Measure] = {
        f"{count} ranks": partial(_committed, _reports(count, tensors), tensors) for count in counts
    }
    samples, _ = interleaved(measures, settings.rounds_or(3, 5), warm=settings.warm, needed=list(measures))
    rows = [Row(name, found, series="save", x=float(name.split()[0])) for name, found in samples.items()]
    columns = [
        Column("save", "ms", 1, resolution=1.0, ratio=False), Column("manifest", "MB", 3, ratio=False),
        Column("parse", "ms", 1, resolution=1.0, ratio=False), Column("choice of files", "ms", 1, ratio=False),
    ]  # fmt: skip
    return Table(
        "scale-ranks", f"Rank 0 in a save and a resume of so many ranks with {tensors} tensors", "", columns, rows,
        {"counts": counts, "tensors": tensors}, x_label="ranks",
    )  # fmt: skip


_SHAPES = [(4096, 4096), (4096, 1024), (14336, 4096), (4096, 14336), (4096,), (1000,), (128256, 4096)]


def _names(tensors: int) -> list[str]:
    return [f"model/layers.{number}.weight" for number in range(tensors)]


def _reports(ranks: int, tensors: int) -> list[bytes]:
    """The pickled report of each rank, of tensors divided by rows."""
    reports = []
    digest = "xxh3_128:" + "0" * 32
    for rank in range(ranks):
        parts: dict[str, Shard] = {}
        for name, shape in zip(_names(tensors), cycle(_SHAPES), strict=False):
            size = -(-shape[0] // ranks)
            begin = min(rank * size, shape[0])
            if count := min(size, shape[0] - begin):
                parts[name] = Shard(shape, (begin, *(0 for _ in shape[1:])), (count, *shape[1:]))
        file = f"rank{rank}.safetensors"
        files = {file: FileEntry(10**9 + rank, digest), f"rank{rank}.own.json": FileEntry(3000 + rank, digest)}
        reports.append(pickle.dumps(RankReport.of(RankFiles(files, {}, PartTable.of({file: parts})), finite=True)))
    return reports


def _committed(reports: list[bytes], tensors: int) -> dict[str, float]:
    begun = time.process_time()
    ranks = read_reports([pickle.loads(report) for report in reports])
    table = PartTable.joined(rank.parts for rank in ranks)
    assert table.why_uncovered(_names(tensors), {}) is None
    files = {file: entry for rank in ranks for file, entry in rank.files.items()}
    manifest = Manifest(
        run_id="r", attempt=1, step=1, epoch=0, kind=CheckpointKind.regular, reason="r", world_size=len(ranks),
        files=files,
        shards=table,
    )  # fmt: skip
    text = manifest.to_bytes()
    saved = time.process_time()
    shards = Manifest.parse(text).shards
    parsed = time.process_time()
    PartTable.of(shards).by_name()
    chosen = time.process_time()
    return {
        "save": (saved - begun) * 1e3, "manifest": len(text) / MB, "parse": (parsed - saved) * 1e3,
        "choice of files": (chosen - parsed) * 1e3,
    }  # fmt: skip


def _steps(
    name: str, title: str, what: str, measures: Mapping[str, Measure], rows: Mapping[str, tuple[str, int]],
    settings: Settings, steps: int,
) -> Table:  # fmt: skip
    samples, _ = interleaved(measures, settings.rounds_or(3, 7), warm=settings.warm, needed=list(measures))
    found = [
        Row(
            row, own, base=f"by hand, {rows[row][1]} {what}" if what == "parameters" else None,
            series=rows[row][0] if row in rows else None, x=rows[row][1] if row in rows else None,
        )
        for row, own in samples.items()
    ]  # fmt: skip
    base = "by hand" if "by hand" in samples else next(iter(samples))
    return Table(name, title, base, [STEP_US], found, {"steps": steps, "rows": list(measures)}, x_label=what)


def _by_hand(tensors: int, steps: int) -> dict[str, float]:
    model, batch = _model(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches: Any = DataLoader(cast("Any", [batch] * steps), batch_size=None)

    for one in batches:
        optimizer.zero_grad(set_to_none=True)
        model(one).backward()
        optimizer.step()
    return {"step": model.step_us()}


def _by_trainer(tensors: int, steps: int, callbacks: list[Callback]) -> dict[str, float]:
    model, batch = _model(tensors)
    trainer = Trainer(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        logging=Logging(level="error", console="off"),
        loop=TrainingLoop(max_duration=steps, eval_interval=None),
        callbacks={f"callback{number}": one for number, one in enumerate(callbacks)},
    )  # fmt: skip
    batches: Any = DataLoader(cast("Any", [batch] * steps), batch_size=None)
    trainer.fit(batches, ckpt_path=None)
    return {"step": model.step_us()}


def _model(tensors: int) -> tuple[Chain, torch.Tensor]:
    return Chain(tensors), torch.rand(64)


def _saves(name: str, title: str, what: str, kinds: Mapping[int, tuple[int, int]], settings: Settings) -> Table:
    """One size after the other, since the largest fill the memory; in each, the contenders in turn."""
    rows: list[Row] = []
    for x, (megabytes, tensors) in kinds.items():
        tree = even_state(megabytes * MB, tensors)
        wanted = [DIRECT, BUFFERED, "torch.save + fsync", "train, sync"]
        measures = durations(tree, settings.scratch, wanted)
        samples, _ = interleaved(
            measures, settings.rounds_or(3, 5), warm=settings.warm, needed=[BUFFERED, "train, sync"]
        )
        base = DIRECT if DIRECT in samples else BUFFERED
        for kind, found in samples.items():
            own = f"{base}, {x} {what}"
            rows.append(Row(f"{kind}, {x} {what}", {"time": found["time"]}, base=own, series=kind, x=float(x)))
    return Table(
        name, title, "", [Column("time", "s", 3, resolution=0.02)], rows, {"kinds": [*kinds.values()]}, x_label=what
    )


def _discovered(root: Path, count: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", DISCOVERY, str(root), str(count)], capture_output=True, text=True, check=True
    )
    clock, processor = json.loads(done.stdout)
    return {"time": clock * 1e3, "processor": processor * 1e3}
