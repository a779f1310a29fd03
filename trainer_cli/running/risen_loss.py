"""Whether the training loss at a checkpoint is far above the first of the run, so that its weights may be ruined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.strict_json import read_number

LOSS = f"{TRAIN_PREFIX}loss"


class RisenLoss(NamedTuple):
    """A loss that is far above the first one of its run."""

    step: int
    loss: float
    first_step: int
    first_loss: float

    def __str__(self) -> str:
        return (
            f"{LOSS} at step {self.step} is {self.loss:.4g}, above the {self.first_loss:.4g} at step {self.first_step}"
        )


def read_losses(records: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Step -> training loss, of records that have one; NaN and infinity included."""
    losses = {}
    for record in records:
        step, loss = record.get("step"), read_number(record.get(LOSS))
        if isinstance(step, int) and loss is not None:
            losses[step] = loss
    return losses


def find_risen_loss(losses: Mapping[int, float], step: int) -> RisenLoss | None:
    """The last finite loss up to a step, if it is far above the first finite one; else None.

    Far above is by more than the absolute value of the first, so that a positive loss has more than doubled.
    """
    finite = _finite_until(losses, step)
    if not finite:
        return None
    (first_step, first_loss), (last_step, last_loss) = finite[0], finite[-1]
    if last_loss - first_loss <= abs(first_loss):
        return None
    return RisenLoss(last_step, last_loss, first_step, first_loss)


def is_before_rise(losses: Mapping[int, float], step: int) -> bool:
    """Whether the last finite loss up to a step is below the first one."""
    finite = _finite_until(losses, step)
    return bool(finite) and finite[-1][1] < finite[0][1]


def _finite_until(losses: Mapping[int, float], step: int) -> list[tuple[int, float]]:
    """The finite losses up to a step, with their steps, in their order."""
    return [(at, loss) for at, loss in sorted(losses.items()) if at <= step and math.isfinite(loss)]
