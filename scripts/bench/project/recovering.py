"""A training that kills its own process, once at each step named in BENCH_KILLS, and notes in BENCH_STAMPS when its
attempts came how far: for the tables of recovery and of failures."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer_cli import Callback

STAMPS = Path(os.environ["BENCH_STAMPS"])
SLEEP_S = float(os.environ.get("BENCH_SLEEP_MS", "0")) / 1e3
VOCABULARY, LENGTH = 256, 16


def stamp(what: str, **facts: Any) -> None:
    with STAMPS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, "at": time.time(), **facts}) + "\n")


def killed_at() -> set[int]:
    """The steps at which this training was killed."""
    lines = STAMPS.read_text(encoding="utf-8").splitlines() if STAMPS.exists() else []
    return {entry["step"] for line in lines if (entry := json.loads(line))["what"] == "killed"}


stamp("imported")


class Stamps(Callback):
    """Notes the load and the first step of an attempt, and the end; kills."""

    def __init__(self) -> None:
        self._kills = {int(step) for step in os.environ.get("BENCH_KILLS", "").split(",") if step} - killed_at()
        self._first = True
        self._times: deque[float] = deque(maxlen=21)

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        stamp("loaded", step=trainer.progress.step)

    def on_train_step_end(self, trainer: Any, *_: Any) -> None:
        self._times.append(time.perf_counter())
        if self._first:
            self._first = False
            stamp("stepped")
        if trainer.progress.step in self._kills:
            stamp("killed", step=trainer.progress.step)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, *_: Any) -> None:
        times = list(self._times)
        pace = median(after - before for before, after in pairwise(times)) if len(times) > 1 else 0.0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        stamp("ended", seconds=pace, peak_mb=peak / 2**20 if sys.platform == "darwin" else peak / 1024)


class Wide(nn.Module):
    """So many million parameters of which a step uses few; a step sleeps, as one that waits for an accelerator."""

    def __init__(self, millions: float) -> None:
        super().__init__()
        self.rows = nn.Embedding(max(int(millions * 1e6) // 256, VOCABULARY), 256)
        self.head = nn.Linear(256, 1)

    def forward(self, batch: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        loss: Tensor = self.head(self.rows(batch)).square().mean()
        return loss


class Tokens(Dataset[Tensor]):
    """Random rows; as many as any training here needs."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(index, index + LENGTH) % VOCABULARY


class Data:
    """For `train`."""

    def __init__(self) -> None:
        self.train = Tokens()
