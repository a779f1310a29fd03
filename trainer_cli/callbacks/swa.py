"""SWA: evaluate the equal average of weights along the end of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_cli.callbacks.ema import EMA
from trainer_cli.checkpoint.model_state import clean_name, unwrapped
from trainer_cli.config.schema import needed_duration
from trainer_cli.errors import ConfigError

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop


class SWA(EMA):
    """Stochastic weight averaging (Izmailov et al., 2018, arXiv:1803.05407): the mean of the weights at `start`, and
    after each `every` from the run's beginning that follows. Everything else is as in `EMA`, but floating-point
    buffers, such as the statistics of batch norm, are averaged too, as by torch's `AveragedModel(use_buffers=True)`.
    For the constant rate of the paper use torch.optim.swa_utils.SWALR as the scheduler.

    Args:
        start: where the average begins; steps, or a duration in steps or epochs.
        every: how often weights are added; steps, or a duration in steps or epochs.
    """

    def __init__(self, start: int | str, every: int | str = "1ep") -> None:
        super().__init__(0.0, 1, start)
        self._interval = needed_duration("every", every)
        self._count = 1
        """Weights in the average."""

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        every = loop.steps_of(self._interval)
        if every is None:
            raise ConfigError(f"SWA: every is {self._interval}, which is not a number of steps", hint="Give steps.")
        self.every = max(1, every)
        super().on_fit_start(trainer, train_loader, val_loaders, loop)

    def state_dict(self) -> dict[str, Any]:
        """The average by name, and how many weights are in it."""
        return {**super().state_dict(), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._count = int(state.get("count", 1))

    def _share(self) -> float:
        self._count += 1
        return 1.0 / self._count

    def _trained(self) -> dict[str, Tensor]:
        assert self._model is not None
        buffers = unwrapped(self._model).named_buffers()
        return super()._trained() | {clean_name(name): one for name, one in buffers if one.is_floating_point()}
