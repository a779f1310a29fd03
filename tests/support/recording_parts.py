"""Parts of a project that records which samples each step trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, get_worker_info

from trainer_cli import Callback

BASE = [
    "optimizer=sgd", "scheduler=null", "loop.log_interval=1", "loop.eval_interval=null", "logging.console=off",
    "loggers.tensorboard=null", "checkpoint.save_interval=5", "checkpoint.ephemeral_save_interval=null",
    "+callbacks.seen={_target_: recording_parts.Recording, file: seen}", "run_dir=run", "deterministic=false",
]  # fmt: skip
LINE = ["model=null", "model={_target_: recording_parts.Line}", "data=null"]
PLAIN = [*LINE, "data={_target_: recording_parts.Plain, batch_size: 4}"]
TRUST = ["trust=[recording_parts]"]
"""Overrides of a run of these parts."""


def own(kind: str, workers: int = 0) -> list[str]:
    return [*LINE, f"data={{_target_: recording_parts.Own, kind: {kind}, workers: {workers}}}"]


class Identity(Dataset[Tensor]):
    """Samples that are their own index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Plain:
    """A dataset of the project."""

    def __init__(self, size: int = 23) -> None:
        self.train = Identity(size)


class Own:
    """A DataLoader of the project, which shuffles by itself."""

    def __init__(self, kind: str = "shuffle", size: int = 23, workers: int = 0) -> None:
        loader = partial(DataLoader[Tensor], Identity(size), batch_size=4, num_workers=workers)
        if kind == "shuffle":
            self.train = loader(shuffle=True)
        elif kind == "generator":
            self.train = loader(shuffle=True, generator=torch.Generator().manual_seed(5))
        elif kind == "drop_last":
            self.train = loader(shuffle=True, drop_last=True)
        else:
            weights = [1.0 + index % 3 for index in range(size)]
            self.train = loader(sampler=WeightedRandomSampler(weights, size))


class Counting(IterableDataset[Tensor]):
    """A stream that says where it stands; its workers take turns."""

    def __init__(self, size: int) -> None:
        self.size, self.next = size, 0

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.next < self.size:
            self.next += 1
            if (self.next - 1) % count == number:
                yield torch.tensor([float(self.next - 1)])

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Stream:
    """A stream of the project."""

    def __init__(self, size: int = 23) -> None:
        self.train = Counting(size)


class Line(nn.Module):
    """A model of any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Any) -> Any:
        first = batch["tokens"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
        return (first.float().mean() * self.weight * 1e-3).square().sum()


class Recording(Callback):
    """Appends each batch of this rank to a file: its step, its number in the step, and its contents."""

    def __init__(self, file: str) -> None:
        self.file = f"{file}{os.environ.get('RANK', '0')}.jsonl"
        self.number, self.step = 0, -1

    def on_train_batch_start(self, trainer: Any, model: nn.Module, batch: Any, batch_idx: int) -> None:
        step = trainer.progress.step + 1
        self.number, self.step = (self.number + 1 if step == self.step else 1), step

    def on_train_batch_end(self, trainer: Any, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        # A padding batch holds a sample that does not count.
        content = _as_lists(batch) if trainer.step.counts else []
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, "batch": self.number, "content": content}) + "\n")


class RollBack(Callback):
    """Goes back once, after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_train_batch_end(self, trainer: Any, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step == self.at and not trainer.progress.passed_over:
            trainer.checkpoint.drain()
            trainer.ask_to_roll_back()


class StopAt(Callback):
    """Stops early, once."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_train_batch_end(self, trainer: Any, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step == self.at:
            trainer.stop("asked for", finished=False)


def _as_lists(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: _as_lists(value) for key, value in batch.items()}
    return [_as_lists(value) for value in batch] if isinstance(batch, list | tuple) else batch


def indices_of(content: Any) -> list[int]:
    return [int(value) for (value,) in content]
