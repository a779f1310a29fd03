"""One rank of the table `ranks`: a loop by hand and the trainer in turn. Rank 0 prints what it measured as JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer_cli import Trainer, TrainingLoop
from trainer_cli.data.loader import Loader
from trainer_cli.parallel.process_group import ProcessGroup, from_environment
from trainer_cli.parallel.strategy import DDP
from views import Batch, Views

INPUTS, WIDTH, CLASSES, BATCH = 256, 448, 10, 64
WARM = 20


class Net(nn.Module):
    """A perceptron that notes when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        )
        self.wall: list[float] = []
        self.processor: list[float] = []

    def forward(self, batch: Batch) -> Tensor:
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


class Samples(Views):
    """As many samples as the ranks need."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, INPUTS, generator=generator)
        self.y = torch.randint(CLASSES, (count,), generator=generator)

    def batch(self, part: slice) -> Batch:
        return self.x[part], self.y[part]


def by_hand(net: Net, loader: Loader, group: ProcessGroup, *, sums: bool = False) -> None:
    """Train. With `sums`, six numbers are summed over the ranks in each step, behind the backward."""
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    numbers = torch.zeros(6, dtype=torch.float64)
    for batch in loader.iterate(0):
        loss = model(batch)
        work = group.start_sum(numbers) if sums else None
        loss.backward()
        if work is not None:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()


def by_trainer(net: Net, loader: Loader, group: ProcessGroup) -> None:
    Trainer(
        model=net,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        loop=TrainingLoop(max_duration=len(loader), eval_interval=None, log_interval=50),
        strategy=DDP(group),
    ).fit(loader)


def main(steps: int, rounds: int) -> None:
    group = from_environment(os.environ)
    data = Samples(group.world_size * (steps + WARM) * BATCH)
    loader = Loader(data, BATCH, shuffle=False, seed=0, rank=group.rank, world_size=group.world_size)
    found: dict[str, dict[str, list[float]]] = {}
    ways: dict[str, Any] = {
        "by hand": by_hand,
        "by hand, with sums": partial(by_hand, sums=True),
        "trainer": by_trainer,
    }
    for turn in range(rounds + 1):
        for name, train in ways.items():
            torch.manual_seed(0)
            net = Net()
            train(net, loader, group)
            group.barrier()
            if turn == 0:
                continue  # Imports, and memory that is used for the first time.
            samples = found.setdefault(name, {"step": [], "processor": []})
            lengths = [after - before for before, after in zip(net.wall[WARM:], net.wall[WARM + 1 :], strict=False)]
            samples["step"].append(statistics.median(lengths) * 1e3)
            samples["processor"].append((net.processor[-1] - net.processor[WARM]) / (len(net.wall) - 1 - WARM) * 1e3)
    group.close()
    if group.is_main:
        print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
