"""Microseconds that each callback adds to a step of a tiny network, switched on alone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainer_cli
from settings import Settings
from table import Column, Row, Table
from timing import interleaved

BARE, LOGGED = "no callback", 50
MODULES = ["0", "2"]


def _made(name: str, *args: Any, **settings: Any) -> Callable[[], Any] | None:
    """Makes one of this class, unless its add-on was deleted."""
    made = getattr(trainer_cli, name, None)
    return None if made is None else lambda: made(*args, **settings)


def _those(rows: dict[str, Callable[[], Any] | None]) -> dict[str, Callable[[], Any]]:
    return {name: make for name, make in rows.items() if make is not None}


CALLBACKS = _those({
    BARE: lambda: None,
    "CheckFinite, raise": _made("CheckFinite"),
    "CheckFinite, skip": _made("CheckFinite", "skip"),
    "EMA": _made("EMA"),
    "SWA, each step": _made("SWA", 1, 1),
    "ThresholdStopper": _made("ThresholdStopper", "train/loss", -1.0),
    "EarlyExit": _made("EarlyExit", [lambda trainer: False]),
    "SelectiveGrad": _made("SelectiveGrad", 0.5),
    "Norms, all": _made("Norms", weights=True, per_layer=True),
    "LearningRateMonitor": _made("LearningRateMonitor"),
    "Throughput": _made("Throughput", flops=True),
    "DurationProfiler": _made("DurationProfiler"),
    "MemoryMonitor": _made("MemoryMonitor"),
    "ActivationStatistics": _made("ActivationStatistics", MODULES),
    "DumpActivations, every 100": _made("DumpActivations", MODULES, every=100),
    "TensorListener": _made("TensorListener"),
    "TorchProfiler, 3 steps": _made("TorchProfiler"),
    "AnomalyDetection": _made("AnomalyDetection"),
    "ScopedFlags": _made("ScopedFlags", train={"torch.backends.cuda.matmul.allow_tf32": True}),
    "BatchSummary": _made("BatchSummary"),
    "ParameterTable": _made("ParameterTable"),
})  # fmt: skip
SPARSITIES = _those({
    "sparsity, static": _made("Static", 0.8),
    "sparsity, GMP": _made("GMP", 0.8, every=20),
    "sparsity, SET": _made("SET", 0.8, every=20),
    "sparsity, RigL": _made("RigL", 0.8, every=20),
})  # fmt: skip


class Net(nn.Sequential):
    """A multi-layer perceptron with its loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(cast("Any", super()).forward(batch[0]), batch[1])


class Batches(Dataset[Any]):
    """Ready-made batches, the same few again and again."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.made = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(16)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.made[index % 16]


def measure(settings: Settings) -> list[Table]:
    """One table: a fit without callbacks, and with each of them."""
    steps = settings.pick(smoke=60, quick=600, whole=1500)
    classes = {name.lower() for name in trainer_cli.__all__}
    # Without those whose add-on was deleted: a row names its class.
    makers = {
        name: make
        for name, make in {**CALLBACKS, **SPARSITIES}.items()
        if name == BARE or classes.intersection(re.findall(r"\w+", name.lower()))
    }
    measures = {name: partial(_step, name, make, steps, settings.scratch / "run") for name, make in makers.items()}
    samples, skipped = interleaved(measures, settings.rounds_or(3, 3), warm=settings.warm, needed=list(makers))
    rows = [Row(name, found) for name, found in samples.items()]
    for row in rows:
        pairs = zip(row.samples["processor"], samples[BARE]["processor"], strict=True)
        row.samples["added"] = [own - bare for own, bare in pairs]
    columns = [
        Column("step", "µs", 1, resolution=5.0),
        Column("processor", "µs", 1, resolution=5.0),
        Column("added", "µs", 1, resolution=15.0, ratio=False),
    ]
    return [
        Table(
            "callbacks", "A step of a tiny MLP, with", BARE, columns, rows, {"steps": steps, "log_interval": LOGGED},
            skipped, [
                "One thread, AdamW fused, no logger and no checkpoint; the parameters are six tensors. `added` is "
                "processor time, which varies less on a busy machine."
            ],
        )
    ]  # fmt: skip


def _step(name: str, make: Callable[[], Any], steps: int, run_dir: Path) -> dict[str, float]:
    """The mean step of one fit."""
    torch.set_num_threads(1)
    made = make()
    trainer = trainer_cli.Trainer(
        model=Net,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        loop=trainer_cli.TrainingLoop(max_duration=steps, log_interval=LOGGED, eval_interval=None),
        sparsity=made if name in SPARSITIES else None,
        callbacks=[made] if name in CALLBACKS and made is not None else [],
        seed=0,
        device="cpu",
        run_dir=run_dir,
        logging=trainer_cli.Logging(level="error", console="off"),
    )
    loader = DataLoader(Batches(steps), batch_size=None)
    began, used = time.perf_counter(), time.process_time()
    trainer.fit(loader)
    seconds, processor = time.perf_counter() - began, time.process_time() - used
    return {"step": seconds / steps * 1e6, "processor": processor / steps * 1e6}
