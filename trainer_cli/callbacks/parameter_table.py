"""ParameterTable: log how many parameters each part of the model has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_cli.checkpoint.model_state import clean_name, unwrapped
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop

log = logging.getLogger(__name__)


class ParameterTable(Callback):
    """Logs a table once a fit begins: the parameters of each module, how many of them are trained, and their bytes.
    A parameter that several modules share is counted once.

    Args:
        depth: how many parts of a module's name are shown; 0: the sum alone.
    """

    def __init__(self, depth: int = 1) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ConfigError(f"depth is {depth!r}, but it is a number of at least 0", location="depth")
        self.depth = depth

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        for line in parameter_table(trainer.model, self.depth):
            log.info("%s", line)


def parameter_table(model: nn.Module, depth: int) -> list[str]:
    """The lines of the table; the sum is the last."""
    rows: dict[str, list[int]] = {}
    for name, one in unwrapped(model).named_parameters():
        part = ".".join(clean_name(name).split(".")[:-1][:depth])
        for key in ([part] if depth else []) + [""] * (part != "" or not depth):
            row = rows.setdefault(key, [0, 0, 0])
            row[0] += one.numel()
            row[1] += one.numel() if one.requires_grad else 0
            row[2] += one.numel() * one.element_size()
    named = {key or "(model)": rows[key] for key in sorted(rows, key=lambda key: key == "")}
    width = max([len("module"), *map(len, named)])
    lines = [f"{'module':<{width}} {'parameters':>14} {'trained':>14} {'MiB':>10}"]
    return lines + [f"{key:<{width}} {a:>14,} {b:>14,} {c / 2**20:>10,.1f}" for key, (a, b, c) in named.items()]
