"""The smallest trainings that still have everything in them, and fakes that record."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer_cli.data.loader import Loader
from trainer_cli.loggers.base import Logger, Record, RunFacts
from trainer_cli.trainer.hooks import VOCABULARY, Callback
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Samples of a noisy line; the noise comes from the sample's own random numbers."""

    def __init__(self, length: int = 10, noise: float = 0.1) -> None:
        self.length, self.noise = length, noise
        self.deterministic = noise == 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([index / self.length, (index % 3) / 3 - 0.5])
        y = x.sum() * 2 + 1
        return x, (y + self.noise * torch.randn(())) if self.noise else y


class Line(nn.Module):
    """Two weights and a bias; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.calls = 0

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        self.calls += 1
        x, y = batch
        error = self.linear(x).squeeze(-1) - y
        return {"loss": error.square().mean(), "mae": error.abs().mean(), "tokens": 3 * len(y)}


class Noisy(nn.Module):
    """All that makes a resume hard: batch norm, dropout, and a parameter that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        x, y = batch
        error = self.body(x).squeeze(-1) - y
        return error.square().mean(), {"mae": error.abs().mean(), "parts/first": error[0]}


class BodyAndHead(nn.Module):
    """Two layers, of which the body is trained at first or not."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 1)
        self.body.requires_grad_(trained)

    def forward(self, batch: Any) -> Any:
        return (self.head(self.body(batch[0]).tanh()).squeeze(-1) - batch[1]).square().mean()


class ListLogger(Logger):
    """Keeps records in a list, across attempts when it is given to each of them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.facts: list[RunFacts] = []
        self.closed = 0

    def rewind(self, run_dir: Path, step: int) -> None:
        self.records = [record for record in self.records if record.step <= step]

    def start(self, facts: RunFacts) -> None:
        self.facts.append(facts)

    def log(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1

    @property
    def stream(self) -> list[tuple[int, dict[str, float]]]:
        """What was logged, without what depends on the clock."""
        return [(record.step, without_clock(record.metrics)) for record in self.records]

    def steps(self, key: str) -> list[int]:
        return [record.step for record in self.records if key in record.metrics]


def without_clock(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if key not in ("train/samples_per_s", "time")}


class Counts(Callback):
    """Counts its steps, over resumes."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class StopAt(Callback):
    """Asks for a stop, to be resumed, once a step is made."""

    def __init__(self, step: int, finished: bool = False) -> None:
        self.step, self.finished = step, finished

    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step == self.step:
            trainer.stop("enough for now", finished=self.finished)


class StopInEvaluation(Callback):
    """Asks for a stop while the evaluation after a step runs."""

    def __init__(self, step: int, batch_idx: int = 0) -> None:
        self.step, self.batch_idx = step, batch_idx

    def on_validate_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.progress.step, batch_idx) == (self.step, self.batch_idx):
            trainer.stop("signal", finished=False)


def recorder(book: list[str], label: str = "", fail_in: tuple[str, ...] = (), error: type = RuntimeError) -> Callback:
    """A callback that overrides every hook, writes down each call, and fails where it is reported to."""

    def method(hook: str) -> Any:
        def call(self: Callback, *args: Any) -> Any:
            book.append(f"{label}{hook}")
            if hook in fail_in:
                raise error(f"{label}{hook} failed")
            return None

        return call

    made: Callback = type("Recorder", (Callback,), {hook: method(hook) for hook in VOCABULARY})()
    return made


def on(**hooks: Callable[..., Any]) -> Callback:
    """A callback with these functions as its hooks, which are called without the callback."""

    def method(function: Callable[..., Any]) -> Any:
        return lambda self, *args: function(*args)

    made: Callback = type("On", (Callback,), {name: method(function) for name, function in hooks.items()})()
    return made


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Unsized:
    """A loader that cannot tell its length."""

    def __init__(self, batches: int, size: int = 2) -> None:
        self.batches, self.size, self.given = batches, size, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.batches):
            self.given += 1
            x = torch.full((self.size, 2), float(number))
            yield x, x.sum(1)


def loader(length: int = 10, batch_size: int = 4, noise: float = 0.1, **settings: Any) -> Loader:
    return Loader(Points(length, noise), batch_size, **{"shuffle": True, "seed": 5, **settings})


def trainer(
    model: Any = Line, *, lr: float = 0.1, callbacks: Any = (), loggers: Any = (), settings: Any = None, **more: Any
) -> Trainer:
    """A trainer of SGD on a tiny model; `settings` are the loop's."""
    loop = TrainingLoop(**{"max_duration": 6, "eval_interval": None, "log_interval": None, **(settings or {})})
    return Trainer(
        model=model,
        optimizer=more.pop("optimizer", lambda made: torch.optim.SGD(made.parameters(), lr=lr)),
        loop=more.pop("loop", loop),
        callbacks=callbacks,
        loggers=loggers,
        seed=more.pop("seed", 0),
        device="cpu",
        **more,
    )


def same(one: Any, other: Any, *, path: str = "") -> list[str]:
    """Where two state trees differ, bit for bit; empty where they are the same."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if set(one) != set(other):
            return [f"{path}: keys {sorted(map(str, set(one) ^ set(other)))}"]
        return [row for key in one for row in same(one[key], other[key], path=f"{path}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        return [
            row
            for index, pair in enumerate(zip(one, other, strict=True))
            for row in same(*pair, path=f"{path}/{index}")
        ]
    if hasattr(one, "shape") and hasattr(other, "shape"):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        alike = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return [] if alike else [f"{path}: {one} and {other}"]
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]


def everything(trained: Trainer) -> dict[str, Any]:
    """All that a resume must bring back, without what depends on the clock."""
    state = trained.checkpoint_state()
    state["progress"] = {name: value for name, value in state["progress"].items() if "seconds" not in name}
    return state


def assert_resumes_exactly(fit: Callable[..., Any], folder: Path, *stops: int) -> tuple[Any, Any]:
    """A run that is stopped after each of these steps ends bit for bit where a run without a stop ends.

    `fit(folder, *callbacks)` trains to the end and returns the trainer; so does this, of both runs.
    """
    straight = fit(folder / "straight")
    expected = everything(straight)
    for stop in stops:
        assert fit(folder / "parts", StopAt(stop)).progress.step == stop
    torch.rand(5), random.random(), np.random.rand()  # What was drawn before a resume does not matter.
    resumed = fit(folder / "parts")
    assert resumed.loaded_step == stops[-1]
    assert same(expected, everything(resumed)) == []
    return straight, resumed
