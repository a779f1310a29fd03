"""What contradicts `data.batch_size=auto` and `optimizer.lr=auto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer_cli.auto_values import AUTO, BATCH_SIZE, LR, auto_keys
from trainer_cli.errors import ConfigError
from trainer_cli.schema import ParallelStrategy, TrainConfig
from trainer_cli.steps import GLOBAL_BATCH_SIZE


def check_auto(config: TrainConfig) -> Iterator[ConfigError]:
    """Refuse what contradicts `auto`."""
    if BATCH_SIZE in auto_keys(config):
        yield from _check_batch_size(config)
    if LR in auto_keys(config):
        yield from _check_rate(config)
    for name, node in (config.optimizer or {}).items():
        if isinstance(node, Mapping) and node.get("lr") == AUTO:
            key = f"optimizer.{name}.lr"
            message = f"{key} is auto, which only a single optimizer may have"
            yield ConfigError(message, location=key, hint="Set a number.")


def _check_rate(config: TrainConfig) -> Iterator[ConfigError]:
    """Refuse what contradicts `optimizer.lr=auto`."""
    for pattern, settings in config.param_groups.items():
        if isinstance(settings, Mapping) and "lr" in settings:
            message = (
                f"optimizer.lr is auto, and the rate of param_groups.{pattern} is a number, which does not follow it"
            )
            hint = f"Give that group an lr_scale in place of lr: {settings['lr']}."
            yield ConfigError(message, location=LR, hint=hint)
    if config.parallel.strategy is ParallelStrategy.fsdp:
        message = "optimizer.lr is auto, but one process makes the range test alone, and the model is sharded"
        yield ConfigError(message, location=LR, hint="Set a number.")
    if config.ckpt is not None and config.load.states != ["model"]:
        message = (
            "optimizer.lr is auto, but load.states takes more than the weights from the checkpoint, so the rate too"
        )
        yield ConfigError(message, location="load.states", hint="Set load.states=[model], or a number.")


def _check_batch_size(config: TrainConfig) -> Iterator[ConfigError]:
    """Refuse what contradicts `data.batch_size=auto`."""
    if config.loop.microbatch is not None:
        message = "data.batch_size is auto, and loop.microbatch splits each batch, so every size would fit"
        yield ConfigError(message, location=BATCH_SIZE, hint="Set a number, or loop.microbatch=null.")
    if config.parallel.strategy is ParallelStrategy.fsdp:
        message = "data.batch_size is auto, and under fsdp the other ranks would wait for one that runs out of memory"
        yield ConfigError(message, location=BATCH_SIZE, hint="Set a number.")
    if config.loop.grad_accum_steps != 1 and config.data.get(GLOBAL_BATCH_SIZE) is not None:
        message = "data.batch_size is auto, but data.global_batch_size and loop.grad_accum_steps decide it"
        hint = "Leave loop.grad_accum_steps out: it follows from the batch size."
        yield ConfigError(message, location="loop.grad_accum_steps", hint=hint)
