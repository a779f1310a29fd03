"""Check what a config says about processes and batch sizes, before any process is started."""

from __future__ import annotations

from trainer_cli.config.arguments import SAVER
from trainer_cli.errors import ConfigError
from trainer_cli.ranks import check_shards, check_tensor_size
from trainer_cli.schema.auto import BATCH_SIZE, auto_keys, undecided_error
from trainer_cli.schema.checkpoint_config import CheckpointFormat
from trainer_cli.schema.sections import Dtype, ParallelConfig, ParallelStrategy, TrainConfig
from trainer_cli.steps import divide_step


def check_processes(config: TrainConfig, world_size: int) -> None:
    """Check the config against the number of processes.

    Raises:
        ConfigError: the config cannot be trained by this number of processes.
    """
    parallel = config.parallel
    check_strategy(parallel, config.precision.dtype, world_size)
    check_tensor_size(parallel.tensor_size, world_size)
    if parallel.strategy is ParallelStrategy.fsdp:
        check_shards(parallel.shard_size, parallel.tensor_size, world_size)
    # Ranks of one tensor group train on the same samples.
    data_size = world_size // parallel.tensor_size
    if BATCH_SIZE in auto_keys(config):
        # Of a batch size that is still to be found, only the samples of a step are known.
        divide_step({**config.data, "batch_size": None}, config.loop.grad_accum_steps, data_size)
    else:
        batches_of_step(config, data_size)
    _check_format(config, world_size)


def check_strategy(parallel: ParallelConfig, dtype: Dtype, world_size: int) -> None:
    """Check that the strategy supports `world_size` processes and the precision.

    Raises:
        ConfigError: the strategy is for one process, or does not support the precision or `tensor_size`.
    """
    if parallel.strategy is ParallelStrategy.fsdp:
        if dtype is Dtype.fp16:
            raise ConfigError(
                "parallel.strategy is fsdp, and precision.dtype fp16, whose loss scaling knows no shards",
                location="precision.dtype",
                hint="Choose precision=bf16.",
            )
        return
    if parallel.tensor_size > 1:
        raise ConfigError(
            f"parallel.tensor_size is {parallel.tensor_size}, but parallel.strategy is {parallel.strategy}, which "
            "divides no layers",
            location="parallel.tensor_size",
            hint="Choose parallel=fsdp. With parallel.shard_size equal to tensor_size, nothing else is sharded.",
        )
    if parallel.strategy is ParallelStrategy.single and world_size > 1:
        raise ConfigError(
            f"there are {world_size} processes, but parallel.strategy is {parallel.strategy}",
            location="parallel.strategy",
            hint="Add parallel=ddp or parallel=fsdp to the command, or start one process.",
        )


def _check_format(config: TrainConfig, world_size: int) -> None:
    """Check that the checkpoint format can store the state of `world_size` processes.

    Raises:
        ConfigError: it stores the state of one process only.
    """
    # A CheckpointerCallback under `callbacks` overrides the section.
    subclass = config.callbacks.get(SAVER) or {}
    format = subclass.get("format", config.checkpoint.format)
    if world_size > 1 and format in [choice for choice in CheckpointFormat if choice.one_process]:
        formats = CheckpointFormat.names_where(lambda choice: not choice.one_process)
        raise ConfigError(
            f"checkpoint.format is {format}, which saves the state of one process, and there are {world_size}",
            location="checkpoint.format",
            hint=f"Choose {formats}; train ckpt export writes the others.",
        )


def batches_of_step(config: TrainConfig, data_size: int) -> tuple[int | None, int]:
    """Batch size of each rank, and batches of each rank per step; see `divide_step`.

    Raises:
        ConfigError: the batch size is still to be found, or the batches do not make a step.
    """
    if BATCH_SIZE in auto_keys(config):
        raise undecided_error(BATCH_SIZE)
    return divide_step(config.data or {}, config.loop.grad_accum_steps, data_size)
