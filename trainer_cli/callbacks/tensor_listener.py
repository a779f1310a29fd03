"""TensorListener: log statistics of tensors that a model shows by `observe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer_cli.callbacks.activation_statistics import check_statistics
from trainer_cli.callbacks.tensor_statistics import TensorStatistics
from trainer_cli.config.globs import matches
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.observe import observing

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop


class TensorListener(Callback):
    """Logs `train/tensors/NAME/STATISTIC` on log steps for each tensor that the model passes to
    `trainer_cli.observe(NAME, tensor)` in the last batch of the step.

    Args:
        names: globs of the tensors' names.
        statistics: of `mean`, `std`, `min`, `max` and `norm`.
    """

    def __init__(self, names: Sequence[str] = ("*",), statistics: Sequence[str] = ("norm",)) -> None:
        self.names = [names] if isinstance(names, str) else list(names)
        self.statistics = check_statistics(statistics)
        self._found = TensorStatistics()
        self._active = ExitStack()

    def on_enter_train(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        stack.callback(self._active.close)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        if trainer.progress.step + 1 >= trainer.loop.next_log_step:
            self._active.enter_context(observing(self._look))

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        self._active.close()

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        trainer.log_metrics(self._found.read("train/tensors", self.statistics))

    def _look(self, name: str, tensor: Tensor) -> None:
        if any(matches(name, pattern) for pattern in self.names):
            self._found.add(name, tensor)
