"""The smallest trainings: a linear layer under SGD, on samples that depend on their index alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    FitResult,
    Loader,
    Logger,
    Record,
    RunFacts,
    Trainer,
    TrainingLoop,
)

CLOCK = ("_per_s", "/time/", "/memory/")
"""Parts of the names of metrics that depend on the machine."""


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples `(x, y)` that depend on their index alone."""

    deterministic = True

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.tensor([index / self.length, 0.5]), torch.tensor(1.0)


class Net(nn.Module):
    """A linear layer under a squared loss; `mae` is a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        x, y = batch
        error = self.layer(x).squeeze(-1) - y
        return {"loss": error.square().mean(), "mae": error.abs().mean()}


class ListLogger(Logger):
    """Keeps the records, and which of its methods were called."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.calls: list[str] = []

    def rewind(self, run_dir: Path, step: int) -> None:
        self.calls.append("rewind")
        self.records = [record for record in self.records if record.step <= step]

    def start(self, facts: RunFacts) -> None:
        self.calls.append("start")

    def log(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.calls.append("close")

    def values(self, key: str) -> dict[int, float]:
        """The values of a metric by step."""
        return {record.step: record.metrics[key] for record in self.records if key in record.metrics}

    @property
    def stream(self) -> list[tuple[int, dict[str, float | None]]]:
        """Step and metrics of each record; None for what depends on the machine."""
        return [
            (
                record.step,
                {key: None if any(part in key for part in CLOCK) else value for key, value in record.metrics.items()},
            )
            for record in self.records
        ]


class StopAt(Callback):
    """Stops the training after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step == self.step:
            trainer.stop("a signal", finished=False)


class Script(Callback):
    """Reports `val/score`: the values in turn, one an evaluation; the last one for all that follow."""

    def __init__(self, values: Sequence[float], name: str = "val/score") -> None:
        self.values, self.name, self.count = values, name, 0

    def on_validate_end(self, trainer: Trainer, model: nn.Module, loop: Any) -> None:
        trainer.log_metrics({self.name: self.values[min(self.count, len(self.values) - 1)]})
        self.count += 0 if trainer.sanity_checking else 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Evaluated(Callback):
    """Notes the step of each evaluation, and how many batches it had."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.batches: list[int] = []
        self.sanity_batches = 0

    def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: Any) -> None:
        if not trainer.sanity_checking:
            self.steps.append(trainer.progress.step)
            self.batches.append(0)

    def on_validate_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.sanity_checking:
            self.sanity_batches += 1
        else:
            self.batches[-1] += 1


class Trained(Callback):
    """Notes each training batch: its step, its epoch and its index."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int]] = []
        self.data: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        self.batches.append((trainer.progress.step, trainer.progress.epoch, batch_idx))
        self.data.append(batch[0].clone())


class FailIn(Callback):
    """Raises in a hook, at its n-th call from a step on."""

    def __init__(self, hook: str, step: int = 0, error: type[BaseException] = RuntimeError) -> None:
        self.step, self.error = step, error
        self.__class__ = type("FailIn", (FailIn,), {hook: self._method(hook)})

    def _method(self, hook: str) -> Any:
        def call(self: FailIn, *args: Any) -> None:
            trainer = next((argument for argument in args if isinstance(argument, Trainer)), None)
            if trainer is None or (trainer.progress.step >= self.step and not trainer.sanity_checking):
                raise self.error(f"{hook} failed")

        return call


@dataclass
class Run:
    """A trainer that has trained, and what it did."""

    trainer: Trainer
    result: FitResult
    log: ListLogger
    evaluated: Evaluated
    trained: Trained


def make_trainer(
    folder: Path | None = None,
    *,
    loop: Mapping[str, Any] | None = None,
    save: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] | Mapping[str, Callback] = (),
    model: Any = Net,
    **more: Any,
) -> Trainer:
    """A trainer of SGD for four steps, without evaluations, logs or saves; `loop` and `save` are settings of these."""
    checkpoint = None
    if save is not None:
        assert folder is not None
        settings = {"save_interval": None, "pre_train_checkpoint": False, "save_async": False, **save}
        checkpoint = CheckpointerCallback(settings.pop("folder", folder / "checkpoints"), **settings)
    return Trainer(
        model=model,
        optimizer=more.pop("optimizer", lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
        loop=TrainingLoop(**{"max_duration": 4, "eval_interval": None, "log_interval": None, **(loop or {})}),
        checkpoint=checkpoint,
        callbacks=callbacks,
        seed=more.pop("seed", 0),
        device="cpu",
        **more,
    )


def rows(batches: int, batch_size: int = 1, **settings: Any) -> Loader:
    """A loader of so many batches."""
    return Loader(Rows(batches * batch_size), batch_size, **{"shuffle": False, "seed": 0, **settings})


def fit(
    folder: Path | None = None,
    *,
    batches: int = 4,
    val: Any = 2,
    train: Any = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    fit_arguments: Mapping[str, Any] | None = None,
    **more: Any,
) -> Run:
    """Train on `batches` an epoch; `val` is a number of batches, or loaders. The rest is as of `make_trainer`."""
    log, evaluated, trained = ListLogger(), Evaluated(), Trained()
    trainer = make_trainer(folder, callbacks=[*callbacks, evaluated, trained], loggers=[log, *loggers], **more)
    loaders = rows(val) if isinstance(val, int) and val else val or None
    result = trainer.fit(rows(batches) if train is None else train, loaders, **(fit_arguments or {}))
    return Run(trainer, result, log, evaluated, trained)


def saved(folder: Path, name: str = "checkpoints") -> list[int]:
    """The steps of the checkpoints in `folder/name`."""
    return sorted(int(path.name[4:]) for path in (folder / name).glob("step*") if path.name[4:].isdigit())


class Descent(torch.optim.Optimizer):
    """Plain gradient descent; torch's own would import its compiler when a subclass calls `super().step()`."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad


class Counts(Callback):
    """Counts backwards and optimizer steps, and keeps the gradients of each step."""

    def __init__(self) -> None:
        self.backwards, self.steps, self.zeros = 0, 0, 0
        self.clipped: list[torch.Tensor] = []

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Any) -> None:
        self.backwards += 1

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Any) -> None:
        self.steps += 1
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.clipped.append(torch.cat([gradient.flatten() for gradient in gradients]).clone())

    def on_before_optimizer_zero_grad(self, trainer: Trainer, model: nn.Module, optimizer: Any) -> None:
        self.zeros += 1


class Counting(Descent):
    """Counts its steps."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


def two_optimizers() -> dict[str, Any]:
    return {
        "first": lambda model: Counting([model.layer.weight], lr=0.1),
        "second": lambda model: Counting([model.layer.bias], lr=0.2),
    }


class Logs(Callback):
    """Logs in one hook."""

    def __new__(cls, hook: str, values: Mapping[str, Any]) -> Any:
        def call(self: Any, trainer: Trainer, *args: Any) -> None:
            if not trainer.sanity_checking:
                trainer.log_metrics(values)

        return object.__new__(type("LogsIn", (Callback,), {hook: call}))
