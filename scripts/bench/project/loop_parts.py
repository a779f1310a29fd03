"""The network, the batches and the clock of the loop's tables: every trainer runs these, and is asked nothing itself.

The clock stands in the network's forward, once a step. Where BENCH_RESULT names a file, what it saw is written there
at the process's end.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

INPUTS, WIDTH, CLASSES, BATCH, DIFFERENT = 64, 128, 10, 32, 64
STEPS = int(os.environ.get("BENCH_STEPS", "100"))
WARM = int(os.environ.get("BENCH_WARM", "0"))
"""Steps before those that count."""
stamps: list[float] = []
processor: dict[int, float] = {}
"""Processor seconds of this process, all its threads, at the calls of the network that a figure begins or ends at."""


class Net(nn.Module):
    """A multi-layer perceptron that notes when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        stamps.append(time.perf_counter())
        if len(stamps) in (2, WARM + 1, STEPS):
            processor[len(stamps)] = time.process_time()
        scores: Tensor = self.layers(x)
        return scores


class Model(nn.Module):
    """The network with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """As many ready-made batches as there are steps: fetching one costs next to nothing."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = [torch.randn(BATCH, INPUTS, generator=generator) for _ in range(DIFFERENT)]
        self.y = [torch.randint(CLASSES, (BATCH,), generator=generator) for _ in range(DIFFERENT)]

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index % DIFFERENT], self.y[index % DIFFERENT]


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The same numbers one sample at a time, for a loader to put together."""

    deterministic = True

    def __init__(self) -> None:
        batches = Batches()
        self.x, self.y = torch.cat(batches.x), torch.cat(batches.y)

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index % (DIFFERENT * BATCH)], self.y[index % (DIFFERENT * BATCH)]


def loader() -> DataLoader[tuple[Tensor, Tensor]]:
    """The ready-made batches, in order."""
    return DataLoader(Batches(), batch_size=None)


def collating_loader() -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches put together from samples, in a random order."""
    return DataLoader(Samples(), batch_size=BATCH, shuffle=True)


class ReadyData:
    """For `train`: the ready-made batches, by the same DataLoader that the others get."""

    def __init__(self) -> None:
        self.train = loader()


class SampleData:
    """For `train`: the samples, which its own loader puts together."""

    def __init__(self) -> None:
        self.train = Samples()


def seen() -> dict[str, float]:
    """Seconds from the process's start to the end of the first step, and microseconds a step after the warm-up.

    Each also as the processor's time, which is steadier on a busy machine. A step lasts from one call of the network
    to the next. When the process was started is for its parent to say, in BENCH_BEGUN.
    """
    found: dict[str, float] = {}
    if len(stamps) > 1 and "BENCH_BEGUN" in os.environ:
        begun = float(os.environ["BENCH_BEGUN"]) - (time.time() - time.perf_counter())
        found["first step"] = stamps[1] - begun
        found["first step, processor"] = processor[2]
    counted = stamps[WARM:STEPS]
    if len(counted) > 1:
        found["step"] = (counted[-1] - counted[0]) / (len(counted) - 1) * 1e6
        if len(stamps) >= STEPS:
            found["processor"] = (processor[STEPS] - processor[WARM + 1]) / (len(counted) - 1) * 1e6
    return found


if "BENCH_RESULT" in os.environ:
    atexit.register(lambda: Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(seen())))
