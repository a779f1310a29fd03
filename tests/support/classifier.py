"""Trainings of a small classifier with dropout and batch norm, Adam and a schedule, which make a resume hard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    Loader,
    LoadOptions,
    Logger,
    Trainer,
    TrainingLoop,
)
from trainer_cli.commands.command_line import main

STEPS = 5
"""Steps of an epoch of `train_loader()`."""


class Words(Dataset[Any]):
    """Samples of three classes; each has as many tokens as `length` says, and noise of its own."""

    def __init__(self, size: int, length: int = 4) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.tensor([index % 3, index % 2, index / self.size, 1.0]) + 0.1 * torch.randn(4)
        return {"inputs": inputs, "labels": torch.tensor(index % 3), "ids": torch.zeros(self.length)}


class Classifier(nn.Module):
    """Two layers: `features` with what makes a resume hard, and `classifier`."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), norm(8), nn.ReLU(), nn.Dropout(0.2))
        self.classifier = nn.Linear(8, 3)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        logits = self.classifier(self.features(batch["inputs"]))
        loss = nn.functional.cross_entropy(logits, batch["labels"])
        return {"loss": loss, "logits": logits, "tokens": batch["ids"].numel()}


def train_loader(size: int = 10, batch_size: int = 2, length: int = 4) -> Loader:
    return Loader(Words(size, length), batch_size, shuffle=True, seed=3)


def val_loader() -> Loader:
    return Loader(Words(4), 4, shuffle=False, seed=0)


def make_trainer(
    duration: int | str = 10,
    *,
    callbacks: Iterable[Callback] = (),
    logger: Logger | None = None,
    loop: Mapping[str, Any] | None = None,
    model: Callable[[], nn.Module] | nn.Module = Classifier,
    **settings: Any,
) -> Trainer:
    """A trainer of Adam with a schedule; `settings` are further arguments of Trainer."""
    return Trainer(
        model=model,
        optimizer=lambda made: torch.optim.Adam(made.parameters(), lr=0.01),
        schedulers=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        loop=TrainingLoop(**{"max_duration": duration, "eval_interval": None, "log_interval": 1, **(loop or {})}),
        callbacks=list(callbacks),
        loggers=[] if logger is None else [logger],
        **{"seed": 0, "device": "cpu", **settings},
    )


def fit(duration: int | str = 10, ckpt_path: Any = None, *callbacks: Callback, **settings: Any) -> Trainer:
    """A trainer after its fit; without `ckpt_path`, one that goes on where its folder says."""
    keywords = {} if ckpt_path is None else {"ckpt_path": ckpt_path, "load": settings.pop("load", LoadOptions())}
    trainer = make_trainer(duration, callbacks=callbacks, **settings)
    trainer.fit(train_loader(), **keywords)
    return trainer


def saver(folder: Path | str = "checkpoints", **settings: Any) -> CheckpointerCallback:
    """Saves only as `settings` say, in the main thread."""
    return CheckpointerCallback(
        folder, **{"save_interval": None, "pre_train_checkpoint": False, "save_async": False, **settings}
    )


def names(folder: Path | str = "checkpoints") -> list[str]:
    """The checkpoints in a folder."""
    paths = [path for path in Path(folder).iterdir() if not path.is_symlink()]
    return sorted(path.name for path in paths if (path / "manifest.json").exists())


def saved_by(
    duration: int | str, loader: Loader | None = None, folder: str = "checkpoints", **settings: Any
) -> list[int]:
    """The steps at which a run saves."""
    # A norm that takes batches of one sample.
    trainer = make_trainer(duration, model=lambda: Classifier(nn.LayerNorm), checkpoint=saver(folder, **settings))
    trainer.fit(loader or train_loader())
    return sorted(int(name.removeprefix("step")) for name in names(folder))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert list(first) == list(second)
    assert not [name for name in first if not torch.equal(first[name], second[name])]


def run_train(*words: str) -> int:
    """The exit code of a command, in this process: a small experiment, without what the claims do not need."""
    small = ("experiment=digits_mlp", "loggers=none", "data.num_workers=0", "loop.eval_interval=null")
    return main(["fit", *small, "checkpoint.save_async=false", *words])
