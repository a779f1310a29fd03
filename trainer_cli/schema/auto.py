"""Values of a config that a run finds by itself before its first step: `data.batch_size=auto`, `optimizer.lr=auto`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer_cli.errors import ConfigError
from trainer_cli.schema.sections import ParallelStrategy, TrainConfig
from trainer_cli.steps import GLOBAL_BATCH_SIZE

AUTO = "auto"
BATCH_SIZE = "data.batch_size"
LR = "optimizer.lr"
KEYS = (BATCH_SIZE, LR)
"""Keys that may be `auto`, in the order in which their values are found."""
_MOST_SAMPLES = 8192
_BATCH_SIZE = re.compile(r"auto(?::([1-9]\d*))?")


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
        LR: (config.optimizer or {}).get("lr") == AUTO,
    }
    return tuple(key for key in KEYS if is_auto[key])


def replace_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a config, with a number for each value that is `auto`."""
    replaced, data, optimizer = dict(values), values.get("data"), values.get("optimizer")
    numbers = numbers_instead(data if isinstance(data, Mapping) else {})
    if isinstance(data, Mapping) and is_auto_batch_size(data.get("batch_size")):
        replaced["data"] = {**data, "batch_size": numbers[BATCH_SIZE]}
    if isinstance(optimizer, Mapping) and optimizer.get("lr") == AUTO:
        replaced["optimizer"] = {**optimizer, "lr": numbers[LR]}
    return replaced


def numbers_instead(data: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with which a config with the section `data` can be checked and planned before its values are found."""
    # 1 divides every global batch; 32 is the default of the loaders.
    return {BATCH_SIZE: 32 if data.get(GLOBAL_BATCH_SIZE) is None else 1, LR: 1e-3}


def check_auto(config: TrainConfig) -> Iterator[ConfigError]:
    """Refuse what contradicts `auto`."""
    if BATCH_SIZE in auto_keys(config):
        yield from _check_batch_size(config)
    if LR in auto_keys(config):
        yield from _check_rate(config)
    for name, node in (config.optimizer or {}).items():
        if isinstance(node, Mapping) and node.get("lr") == AUTO:
            yield ConfigError(
                f"optimizer.{name}.lr is auto, which only a single optimizer may have",
                location=f"optimizer.{name}.lr",
                hint="Set a number.",
            )


def _check_rate(config: TrainConfig) -> Iterator[ConfigError]:
    for pattern, settings in config.param_groups.items():
        if isinstance(settings, Mapping) and "lr" in settings:
            yield ConfigError(
                f"optimizer.lr is auto, and the rate of param_groups.{pattern} is a number, which does not follow it",
                location=LR,
                hint=f"Give that group an lr_scale in place of lr: {settings['lr']}.",
            )
    if config.parallel.strategy is ParallelStrategy.fsdp:
        yield ConfigError(
            "optimizer.lr is auto, but one process makes the range test alone, and the model is sharded",
            location=LR,
            hint="Set a number.",
        )
    if config.ckpt is not None and config.load.states != ["model"]:
        yield ConfigError(
            "optimizer.lr is auto, but load.states takes more than the weights from the checkpoint, so the rate too",
            location="load.states",
            hint="Set load.states=[model], or a number.",
        )


def _check_batch_size(config: TrainConfig) -> Iterator[ConfigError]:
    if config.loop.microbatch is not None:
        yield ConfigError(
            "data.batch_size is auto, and loop.microbatch splits each batch, so every size would fit",
            location=BATCH_SIZE,
            hint="Set a number, or loop.microbatch=null.",
        )
    if config.parallel.strategy is ParallelStrategy.fsdp:
        yield ConfigError(
            "data.batch_size is auto, and under fsdp the other ranks would wait for one that runs out of memory",
            location=BATCH_SIZE,
            hint="Set a number.",
        )
    if config.loop.grad_accum_steps != 1 and config.data.get(GLOBAL_BATCH_SIZE) is not None:
        yield ConfigError(
            "data.batch_size is auto, but data.global_batch_size and loop.grad_accum_steps decide it",
            location="loop.grad_accum_steps",
            hint="Leave loop.grad_accum_steps out: it follows from the batch size.",
        )


def undecided_error(key: str) -> ConfigError:
    """The error for a command that needs a value which only a training finds."""
    return ConfigError(
        f"{key} is auto: its value is found before the first step of a run",
        location=key,
        hint="Give a number, or the run that has found one.",
    )


def batch_sizes(data: Mapping[str, Any], samples: int, data_size: int) -> list[int]:
    """The batch sizes to try: 2 and its doubles, up to the limit and the samples of a rank.

    With `data.global_batch_size`, sizes of which a whole number makes a step: each is the smallest that is at least
    twice the one before.

    Args:
        data: the section `data` of a config.
        samples: number of training samples.
        data_size: number of ranks among which these are divided.
    """
    most = min(largest_batch_size(data["batch_size"]), samples // data_size)
    total = data.get(GLOBAL_BATCH_SIZE)
    if total is None:
        return [2**power for power in range(1, most.bit_length()) if 2**power <= most] or [1]
    per_rank = total // data_size
    sizes: list[int] = []
    for size in range(2, min(most, per_rank) + 1):
        if per_rank % size == 0 and (not sizes or size >= 2 * sizes[-1]):
            sizes.append(size)
    # Batch norms refuse a single sample, so it is tried only if there is no other size.
    return sizes or [1]
