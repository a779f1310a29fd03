"""One rank of the table `ranks`: loops by hand and the trainer in turn. Rank 0 prints what it measured as JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer_cli import Trainer, TrainingLoop
from trainer_cli.data.loader import Loader
from trainer_cli.parallel.distributed_group import join_processes
from trainer_cli.parallel.process_group import ProcessGroup
from trainer_cli.strategies.strategy import DDP
from views import Batch, Views

SMALL = [256, 448, 448, 10]
"""Widths: 1.3 MB of gradients, which torch's DistributedDataParallel averages in one bucket."""
LARGE = [1024] * 27 + [10]
"""109 MB of gradients, in five buckets."""
SMALL_BATCH, LARGE_BATCH = 64, 16
WARM = 20
"""Steps that are not measured: the first allocate memory, and torch makes its buckets after the first."""
LARGE_WARM = 2
HAND, TRAINER = "by hand", "trainer"
HAND_TOKENS, TRAINER_TOKENS = "by hand, token weights", "trainer, token weights"
HAND_LARGE, TRAINER_LARGE = "by hand, 109 MB", "trainer, 109 MB"
CONTENDERS = (HAND, TRAINER, HAND_TOKENS, TRAINER_TOKENS, HAND_LARGE, TRAINER_LARGE)


class Net(nn.Module):
    """A perceptron that notes when it is called."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        self.wall: list[float] = []
        self.processor: list[float] = []

    def forward(self, batch: Batch) -> Any:
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


class TokenNet(Net):
    """The mean over the labels that are not 0, of which there are more or less in a batch."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1], ignore_index=0)
        return {"loss": loss, "weight": (batch[1] != 0).sum()}


class Samples(Views):
    """As many samples as the ranks need."""

    def __init__(self, count: int, widths: list[int]) -> None:
        super().__init__(count)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, widths[0], generator=generator)
        self.y = torch.randint(widths[-1], (count,), generator=generator)

    def batch(self, part: slice) -> Batch:
        return self.x[part], self.y[part]


def by_hand(net: Net, loader: Loader) -> None:
    """Train where all batches weigh the same."""
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    for batch in loader.iterate(0):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand_with_tokens(net: Net, loader: Loader) -> None:
    """Train on the mean over the tokens of all ranks, which are summed behind the backward."""
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    ranks = torch.distributed.get_world_size()
    for batch in loader.iterate(0):
        outputs = model(batch)
        total = outputs["weight"].double()
        work = torch.distributed.all_reduce(total, async_op=True)
        (outputs["loss"] * outputs["weight"]).backward()
        work.wait()
        for parameter in net.parameters():
            parameter.grad *= ranks / total
        optimizer.step()
        optimizer.zero_grad()


def by_trainer(net: Net, loader: Loader, group: ProcessGroup) -> None:
    Trainer(
        model=net,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        loop=TrainingLoop(max_duration=len(loader), eval_interval=None, log_interval=50),
        strategy=DDP(group),
    ).fit(loader)


def figures(net: Net, warm: int) -> dict[str, float]:
    """Milliseconds of a step: the median, the mean, and the processor time of this rank."""
    lengths = [after - before for before, after in zip(net.wall[warm:], net.wall[warm + 1 :], strict=False)]
    return {
        "step": statistics.median(lengths) * 1e3,
        "mean": statistics.mean(lengths) * 1e3,
        "processor": (net.processor[-1] - net.processor[warm]) / len(lengths) * 1e3,
    }


def main(steps: int, large_steps: int, large_layers: int, rounds: int) -> None:
    group = join_processes(os.environ)
    large = LARGE[-large_layers:]

    def loader_of(widths: list[int], batch_size: int, count: int) -> Loader:
        data = Samples(group.world_size * count * batch_size, widths)
        return Loader(data, batch_size, shuffle=False, seed=0, rank=group.rank, world_size=group.world_size)

    small_loader = loader_of(SMALL, SMALL_BATCH, steps + WARM)
    large_loader = loader_of(large, LARGE_BATCH, large_steps + LARGE_WARM)
    trainer = partial(by_trainer, group=group)
    trainings: dict[str, tuple[Any, Any, Loader, int]] = {
        HAND: (by_hand, partial(Net, SMALL), small_loader, WARM),
        TRAINER: (trainer, partial(Net, SMALL), small_loader, WARM),
        HAND_TOKENS: (by_hand_with_tokens, partial(TokenNet, SMALL), small_loader, WARM),
        TRAINER_TOKENS: (trainer, partial(TokenNet, SMALL), small_loader, WARM),
        HAND_LARGE: (by_hand, partial(Net, large), large_loader, LARGE_WARM),
        TRAINER_LARGE: (trainer, partial(Net, large), large_loader, LARGE_WARM),
    }
    samples: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds + 1):
        for name in CONTENDERS:
            train, make_net, loader, warm = trainings[name]
            torch.manual_seed(0)
            net = make_net()
            train(net, loader)
            group.barrier()
            if turn == 0:
                continue  # Imports, and memory that is used for the first time.
            columns = samples.setdefault(name, {})
            for column, value in figures(net, warm).items():
                columns.setdefault(column, []).append(value)
    group.close()
    if group.is_main:
        print(json.dumps(samples))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
