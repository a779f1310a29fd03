"""Metrics that accumulate over batches themselves, as those of torchmetrics, and gather over the processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer_cli.errors import UserError
from trainer_cli.parallel import ProcessGroup


@dataclass(frozen=True, slots=True)
class GatheredMetric:
    """A metric with `update`, `compute` and `reset`, by the name under which it is logged."""

    name: str
    metric: Any

    def check(self, group: ProcessGroup) -> None:
        """Raise UserError for a metric that knows only the samples of its process, if there are several processes.

        The `compute` of a metric of torchmetrics gathers over the processes.
        """
        gathers = any(hasattr(self.metric, name) for name in ("sync", "compute_groups"))
        if group.data_size > 1 and not gathers:
            raise UserError(
                f"the metric '{self.name}' is a {type(self.metric).__name__}, which has the samples of one of "
                f"{group.data_size} processes",
                cure="Use a metric of torchmetrics, derive it from torchmetrics.Metric, or return sums or means from "
                "the model's forward.",
            )

    def reset(self, group: ProcessGroup) -> None:
        """Discard all samples. The next ones are gathered over the ranks of `group`."""
        self._gather_among(group)
        self.metric.reset()

    def compute(self, group: ProcessGroup) -> dict[str, float | Tensor]:
        """The numbers in the result, by name. Nested mappings are flattened, and other values left out."""
        self._gather_among(group)
        return _numbers(self.name, self.metric.compute())

    def _gather_among(self, group: ProcessGroup) -> None:
        """Let the metric gather over the ranks with different samples, unless it has a process group of its own."""
        # Over all ranks, the samples of a tensor parallel group would count once for each of its ranks.
        if group.data_group is not None and isinstance(self.metric, nn.Module):
            for module in self.metric.modules():
                if getattr(module, "process_group", group) is None:
                    module.process_group = group.data_group  # type: ignore[assignment]


def _numbers(name: str, value: Any) -> dict[str, float | Tensor]:
    """The numbers in the result of a metric, by name; those of a mapping as `NAME/KEY`. Other values are left out."""
    if isinstance(value, Mapping):
        numbers: dict[str, float | Tensor] = {}
        for key, entry in value.items():
            numbers |= _numbers(f"{name}/{key}", entry)
        return numbers
    if isinstance(value, Tensor):
        return {name: value.detach().reshape(())} if value.numel() == 1 else {}
    return {name: float(value)} if isinstance(value, int | float | np.integer | np.floating) else {}
