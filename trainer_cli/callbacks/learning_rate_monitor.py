"""Callbacks that describe a training: rates of parameter groups, sizes of the model's parts, and the first batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer_cli.errors import ConfigError
from trainer_cli.optim import ONLY
from trainer_cli.state import clean_name, unwrap
from trainer_cli.trainer import Callback
from trainer_cli.values import check_whole

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer, TrainingLoop


class LearningRateMonitor(Callback):
    """Logs `train/KEY/group{N}` on log steps (`train/KEY/OPTIMIZER/group{N}` for several optimizers), for each key that
    a group has and that is a number; of a list of numbers, such as `betas`, the first. They are those that the step was
    made with.

    Args:
        keys: settings of the groups.
    """

    measures_only = True

    def __init__(self, keys: Sequence[str] = ("lr",)) -> None:
        self.keys = [keys] if isinstance(keys, str) else list(keys)

    def setup(self, trainer: Trainer) -> None:
        """Refuse a key that no parameter group has."""
        groups = [group for optimizer in trainer.optimizers.values() for group in optimizer.param_groups]
        keys = {key for group in groups for key in group}
        unknown = [key for key in self.keys if key not in keys]
        if trainer.optimizers and unknown:
            raise ConfigError(
                f"no parameter group has '{unknown[0]}'",
                location="keys",
                hint=f"Available: {', '.join(sorted(keys - {'params'}))}.",
            )

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Log the settings that each parameter group had in the step."""
        rates: dict[str, float] = {}
        # As the step was made with them: schedules have changed the groups since.
        used_groups = trainer.step.settings_used()
        for name, optimizer in trainer.optimizers.items():
            prefix = "" if name == ONLY else f"{name}/"
            for number, group in enumerate(used_groups.get(name, optimizer.param_groups)):
                for key in self.keys:
                    value = group.get(key)
                    value = value[0] if isinstance(value, list | tuple) else value
                    if value is not None:
                        rates[f"train/{key}/{prefix}group{number}"] = float(value)
        trainer.log_metrics(rates)


log = logging.getLogger(__name__)


class ParameterTable(Callback):
    """Logs a table when a fit begins: the parameters of each module, the number that is trained, and their bytes.
    A parameter that several modules share is counted once.

    Args:
        depth: how many parts of a module's name are shown; 0: the sum alone.
    """

    measures_only = True

    def __init__(self, depth: int = 1) -> None:
        check_whole("depth", depth, 0)
        self.depth = depth

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Log the table."""
        for line in parameter_table(trainer.model, self.depth):
            log.info("%s", line)


def parameter_table(model: nn.Module, depth: int) -> list[str]:
    """The lines of the table: a row for each module, cut to `depth` parts of its name, and last the whole model."""
    rows: dict[str, list[int]] = {}
    # Tied parameters come once, under their first name.
    for name, parameter in unwrap(model).named_parameters():
        module = ".".join(clean_name(name).split(".")[:-1][:depth])
        # The empty name is the row of the whole model.
        for key in {module: None, "": None}:
            row = rows.setdefault(key, [0, 0, 0])
            row[0] += parameter.numel()
            row[1] += parameter.numel() if parameter.requires_grad else 0
            row[2] += parameter.numel() * parameter.element_size()
    # A stable sort: the whole model last, the others in their order.
    by_label = {key or "(model)": rows[key] for key in sorted(rows, key=lambda key: key == "")}
    width = max([len("module"), *map(len, by_label)])
    lines = [f"{'module':<{width}} {'parameters':>14} {'trained':>14} {'MiB':>10}"]
    for label, (count, trained, size_bytes) in by_label.items():
        lines.append(f"{label:<{width}} {count:>14,} {trained:>14,} {size_bytes / 2**20:>10,.1f}")
    return lines


COLUMNS = ("tensor", "shape", "type", "min", "max", "mean", "not finite")


class BatchSummary(Callback):
    """Prints shape, type and range of every tensor in the first batch of a fit and in the model's outputs for it, and
    logs them as the table `debug/first_batch`.
    """

    measures_only = True

    def __init__(self) -> None:
        self._done = False

    def on_fit_start(self, *args: Any) -> None:
        self._done = False

    def on_after_forward(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        """Log what the first batch of the training and its outputs hold."""
        # Evaluations call the model too, before the first step as well.
        if self._done or not model.training:
            return
        self._done = True
        values = {"batch": batch, "outputs": outputs}.items()
        rows = [_row(*entry) for name, value in values for entry in named(name, value)]
        for row in rows:
            log.info("%s: %s %s from %s to %s, mean %s, %s not finite", *row)
        trainer.log_table("debug/first_batch", COLUMNS, rows)


def named(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in mappings, lists, tuples and dataclasses, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named(f"{path}.{index}", item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from named(f"{path}.{field.name}", getattr(value, field.name))


def _row(path: str, value: Tensor) -> tuple[str | float, ...]:
    """The row of a tensor, see `COLUMNS`; without numbers if it is empty or complex."""
    value = value.detach()
    kind, shape = str(value.dtype).removeprefix("torch."), str(tuple(value.shape))
    if value.numel() == 0 or value.is_complex():
        return path, shape, kind, "", "", "", ""
    # In 64 bits, which hold every number of the other types.
    numbers = value.double().cpu()
    finite = numbers[numbers.isfinite()]
    if finite.numel() == 0:
        return path, shape, kind, "", "", "", numbers.numel()
    low, high, mean = (round(float(number), 6) for number in (finite.min(), finite.max(), finite.mean()))
    return path, shape, kind, low, high, mean, numbers.numel() - finite.numel()
