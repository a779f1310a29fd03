"""Values of a config that a run finds by itself before its first step: `data.batch_size=auto` and others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_cli.schema import TrainConfig
from trainer_cli.steps import GLOBAL_BATCH_SIZE

AUTO = "auto"
BATCH_SIZE = "data.batch_size"
WORKERS = "data.num_workers"
LR = "optimizer.lr"
KEYS = (BATCH_SIZE, WORKERS, LR)
"""Keys that may be `auto`, in the order in which their values are found."""
_MOST_SAMPLES = 8192
_BATCH_SIZE = re.compile(r"auto(?::([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class AutoDecision:
    """The value that was found for a key, why it was chosen, and what was measured."""

    value: Any
    reason: str
    measured: Mapping[str, Any]
    """Name -> values of all trials."""


def is_auto_batch_size(value: Any) -> bool:
    """Whether a value of `data.batch_size` is `auto`, or `auto:LIMIT`."""
    return isinstance(value, str) and _BATCH_SIZE.fullmatch(value) is not None


def largest_batch_size(value: str) -> int:
    """The largest batch size that `auto` (8192) or `auto:LIMIT` allows."""
    match = _BATCH_SIZE.fullmatch(value)
    assert match is not None
    return int(match[1] or _MOST_SAMPLES)


def auto_keys(config: TrainConfig) -> tuple[str, ...]:
    """The keys of a config whose values are still to be found, in the order in which they are found."""
    is_auto = {
        BATCH_SIZE: is_auto_batch_size((config.data or {}).get("batch_size")),
        WORKERS: (config.data or {}).get("num_workers") == AUTO,
        LR: (config.optimizer or {}).get("lr") == AUTO,
    }
    return tuple(key for key in KEYS if is_auto[key])


def replace_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a config, with a number for each value that is `auto`, for checks before these are found."""
    replaced, data, optimizer = dict(values), values.get("data"), values.get("optimizer")
    numbers = numbers_instead(data if isinstance(data, Mapping) else {})
    if isinstance(data, Mapping) and is_auto_batch_size(data.get("batch_size")):
        replaced["data"] = {**data, "batch_size": numbers[BATCH_SIZE]}
    if isinstance(data, Mapping) and data.get("num_workers") == AUTO:
        replaced["data"] = {**replaced["data"], "num_workers": numbers[WORKERS]}
    if isinstance(optimizer, Mapping) and optimizer.get("lr") == AUTO:
        replaced["optimizer"] = {**optimizer, "lr": numbers[LR]}
    return replaced


def stand_ins(config: TrainConfig) -> dict[str, Any]:
    """Key -> the number with which a config is checked and planned, for each value that is still to be found."""
    numbers = numbers_instead(config.data or {})
    return {key: numbers[key] for key in auto_keys(config)}


def numbers_instead(data: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with which a config with the section `data` can be checked and planned before its values are found."""
    # 1 divides every global batch; 32 is the default of the loaders.
    return {BATCH_SIZE: 32 if data.get(GLOBAL_BATCH_SIZE) is None else 1, WORKERS: 0, LR: 1e-3}
