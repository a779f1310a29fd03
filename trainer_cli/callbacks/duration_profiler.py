"""DurationProfiler: log how long the parts of a step take."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop

_PARTS = ("data", "forward", "backward", "optimizer", "rest")


class DurationProfiler(Callback):
    """Logs on log steps the mean seconds of a step since the last one, by part: `train/time/data` (waiting for the
    batch), `train/time/forward`, `train/time/backward`, `train/time/optimizer`, and `train/time/rest` (everything else,
    as callbacks and schedules); and `train/time/evaluation`, of the evaluations since.

    On CUDA the parts are measured by events in the stream, which are read on log steps; else by the clock.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []
        """What ended, and when."""
        self._step = 0
        self._evaluation_s = 0.0
        self._on_cuda = False

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        self._on_cuda, self._step = trainer.device.type == "cuda", trainer.progress.step

    def on_load_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        # The training goes back to it.
        self._step = trainer.progress.step
        self._marks.clear()

    def on_train_start(
        self, trainer: Trainer, model: nn.Module, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        self._mark("")

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        self._mark("data")

    def on_before_forward(
        self, trainer: Trainer, model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        if model.training:
            self._mark("rest")

    def on_after_forward(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if model.training:
            self._mark("forward")

    def on_before_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        self._mark("rest")

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        self._mark("backward")

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        self._mark("rest")

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        self._mark("optimizer")

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._mark("rest")

    def on_enter_validate_all(self, trainer: Trainer, stack: ExitStack, val_loaders: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        stack.callback(lambda: self._add_evaluation(time.perf_counter() - began))

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        steps, self._step = max(1, trainer.progress.step - self._step), trainer.progress.step
        sums = dict.fromkeys(_PARTS, 0.0)
        if self._on_cuda and self._marks:
            self._marks[-1][1].synchronize()
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            if part:
                sums[part] += before.elapsed_time(after) / 1000 if self._on_cuda else after - before
        found = {f"train/time/{part}": spent / steps for part, spent in sums.items()}
        if self._evaluation_s:
            found["train/time/evaluation"], self._evaluation_s = self._evaluation_s, 0.0
        trainer.log_metrics(found)
        self._marks.clear()
        self._mark("")

    def _add_evaluation(self, seconds: float) -> None:
        self._evaluation_s += seconds

    def _mark(self, ended: str) -> None:
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((ended, event))
        else:
            self._marks.append((ended, time.perf_counter()))
