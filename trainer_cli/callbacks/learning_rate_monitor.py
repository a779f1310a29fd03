"""LearningRateMonitor: log the learning rate, and other settings, of every parameter group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.optimizers import ONLY

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer


class LearningRateMonitor(Callback):
    """Logs `train/KEY/group{N}` on log steps (`train/KEY/OPTIMIZER/group{N}` for several optimizers), for each key that
    a group has and that is a number; of a list of numbers, such as `betas`, the first. They are those that the step was
    made with.

    Args:
        keys: settings of the groups.
    """

    def __init__(self, keys: Sequence[str] = ("lr",)) -> None:
        self.keys = [keys] if isinstance(keys, str) else list(keys)

    def setup(self, trainer: Trainer) -> None:
        known = {key for one in trainer.optimizers.values() for group in one.param_groups for key in group}
        if trainer.optimizers and (unknown := [key for key in self.keys if key not in known]):
            raise ConfigError(
                f"no parameter group has '{unknown[0]}'",
                location="keys",
                hint=f"There are: {', '.join(sorted(known - {'params'}))}.",
            )

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        found: dict[str, float] = {}
        used = trainer.step.settings_used()
        for name, optimizer in trainer.optimizers.items():
            prefix = "" if name == ONLY else f"{name}/"
            for number, group in enumerate(used.get(name, optimizer.param_groups)):
                for key in self.keys:
                    value = group.get(key)
                    value = value[0] if isinstance(value, list | tuple) else value
                    if value is not None:
                        found[f"train/{key}/{prefix}group{number}"] = float(value)
        trainer.log_metrics(found)
