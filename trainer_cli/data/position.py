"""Check the settings and saved positions of loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_cli.errors import UserError
from trainer_cli.steps import Duration, Unit

STATE_VERSION = 3
"""Changes when the meaning of a saved position changes, or `seed_random` gives other random numbers."""


class PositionedLoader:
    """Base of the loaders of this package, which enter an epoch at any position."""


def timeout_seconds(value: float | str | None) -> float | None:
    """The seconds of a time limit, which is a number of seconds, a string such as 30s or 5min, or None."""
    if value is None:
        return None
    try:
        if not isinstance(value, str):
            seconds = float(value)
        elif (duration := Duration.parse(value)).unit is Unit.SECOND:
            seconds = float(duration.value)
        else:
            raise ValueError
        # A bool is an int, and True would be one second.
        if isinstance(value, bool) or not 0 < seconds < float("inf"):
            raise ValueError
    except (ValueError, TypeError):
        raise UserError(
            f"data.worker_timeout is {value!r}, but it must be a time such as 30s or 5min, or null",
            where="data.worker_timeout",
        ) from None
    return seconds


def check_same(current: Mapping[str, Any], saved: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise UserError if a saved position differs in these entries."""
    differing = [
        f"{name} was {saved.get(name)!r} and is {current[name]!r}" for name in names if saved.get(name) != current[name]
    ]
    if differing:
        raise UserError(
            f"the training data is not what the checkpoint was made with: {'; '.join(differing)}",
            where="data",
            cure="Resume with the same data, or start a new run from these weights with ckpt=.",
        )


def check_batch_size(batch_size: int | None, saved: Mapping[str, Any]) -> None:
    """Raise UserError for a position inside an epoch that is counted in batches of another size."""
    # Old checkpoints do not have the entry: their batch size is taken to be the present one.
    saved_size = saved.get("batch_size", batch_size)
    if saved["batch"] and saved_size != batch_size:
        raise UserError(
            f"the checkpoint is from the middle of an epoch, where this loader's position is counted in batches "
            f"of {saved_size}, but its batch size is {batch_size}: continue with {saved_size} "
            f"(it may change at an epoch's end)",
            where="data.batch_size",
        )


def length_of(sized: Any) -> int | None:
    """The length of a loader, in batches, or of a sampler; None if it has none."""
    try:
        return len(sized)
    except TypeError:
        return None
