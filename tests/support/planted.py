"""Trainings whose batches are spoilt at given places, and that save often."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny import ListLogger, Noisy, loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.trainer.hooks import Callback


class Plant(Callback):
    """Fills the inputs or targets of batches, by epoch and number in it: the data is bad, not the step."""

    def __init__(self, *places: tuple[int, int], how: str = "input", value: float = math.nan) -> None:
        self.places, self.how, self.value = places, how, value
        self.seen: list[tuple[int, int]] = []

    def on_train_step_start(self, trainer: Any, model: Any, batch: Any) -> None:
        self.seen.append((trainer.progress.epoch, trainer.progress.batch))
        if self.seen[-1] in self.places:
            batch[0 if self.how == "input" else 1].fill_(self.value)


def fit_and_save(
    folder: Path,
    named: Mapping[str, Callback],
    *callbacks: Callback,
    logger: ListLogger | None = None,
    settings: Mapping[str, Any] | None = None,
    saves: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Train a model that is hard to resume with some callbacks, five batches an epoch, and save every third step."""
    made = trainer(
        more.pop("model", Noisy),
        callbacks={**named, **{type(callback).__name__: callback for callback in callbacks}},
        loggers=[logger or ListLogger()],
        settings={"max_duration": 12, "log_interval": 2, **(settings or {})},
        run_dir=folder,
        checkpoint=CheckpointerCallback(folder / "ckpt", **{"save_interval": 3, **(saves or {})}),
        **more,
    )
    made.fit(loader(20), loader(6, shuffle=False))
    return made
