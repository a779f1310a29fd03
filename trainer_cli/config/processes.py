"""Check what a config says about processes and batch sizes, before any process is started."""

from __future__ import annotations

from trainer_cli.config.arguments import SAVER
from trainer_cli.config.fields import GLOBAL_BATCH_SIZE
from trainer_cli.core.checkpoint_config import FORMATS_OF_SEVERAL_PROCESSES, CheckpointFormat
from trainer_cli.core.ranks import check_shards, check_tensor_size
from trainer_cli.core.schema import Dtype, ParallelConfig, ParallelStrategy, TrainConfig
from trainer_cli.errors import ConfigError


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
    batches_of_step(config, world_size // parallel.tensor_size)
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
            hint="Choose parallel=ddp or parallel=fsdp, or start one process.",
        )


def _check_format(config: TrainConfig, world_size: int) -> None:
    """Check that the checkpoint format can store the state of `world_size` processes.

    Raises:
        ConfigError: it stores the state of one process only.
    """
    # A CheckpointerCallback under `callbacks` overrides the section.
    subclass = config.callbacks.get(SAVER) or {}
    format = subclass.get("format", config.checkpoint.format)
    if world_size > 1 and format in [known for known in CheckpointFormat if known.one_process]:
        raise ConfigError(
            f"checkpoint.format is {format}, which saves the state of one process, and there are {world_size}",
            location="checkpoint.format",
            hint=f"Choose {FORMATS_OF_SEVERAL_PROCESSES}; train ckpt export writes the others.",
        )


def batches_of_step(config: TrainConfig, data_size: int) -> tuple[int | None, int]:
    """Batch size of each rank (None: the loader's default), and batches of each rank per step.

    With `data.global_batch_size` and `data.batch_size`, the number of batches follows from both; with the first
    alone, the batch size does.

    Args:
        data_size: number of ranks among which the samples are divided.

    Raises:
        ConfigError: `data.global_batch_size` cannot be divided into whole batches.
    """
    node, accumulated = config.data or {}, config.loop.grad_accum_steps
    global_batch_size, batch_size = node.get(GLOBAL_BATCH_SIZE), node.get("batch_size")
    if global_batch_size is None:
        return batch_size, accumulated
    if batch_size is None:
        return _batch_of_rank(global_batch_size, data_size, accumulated), accumulated
    return batch_size, _accumulation(global_batch_size, batch_size, data_size, accumulated)


def _accumulation(global_batch_size: int, batch_size: int, world_size: int, configured: int) -> int:
    """Number of batches of each rank in a step of `global_batch_size` samples.

    Raises:
        ConfigError: the quotient is not whole, or `loop.grad_accum_steps` is `configured` to another number.
    """
    at_once = batch_size * world_size
    ranks = "" if world_size == 1 else f" on each of {world_size} ranks"
    if global_batch_size % at_once:
        # The largest that fits, which is the nearest to what was asked for.
        divisors = [size for size in range(batch_size, 0, -1) if global_batch_size % (size * world_size) == 0]
        raise ConfigError(
            f"data.global_batch_size is {global_batch_size}, which is no multiple of batches of {batch_size}{ranks}",
            location="data.global_batch_size",
            hint=f"Set data.batch_size={divisors[0]}." if divisors else f"Use a multiple of {world_size}.",
        )
    if configured not in (1, global_batch_size // at_once):
        raise ConfigError(
            f"data.global_batch_size of {global_batch_size} takes {global_batch_size // at_once} batches of "
            f"{batch_size}{ranks}, but loop.grad_accum_steps is {configured}",
            location="loop.grad_accum_steps",
            hint="Leave loop.grad_accum_steps out.",
        )
    return global_batch_size // at_once


def _batch_of_rank(global_batch_size: int, world_size: int, accumulated: int) -> int:
    """Batch size of each rank, where `accumulated` batches make a step of `global_batch_size` samples.

    Raises:
        ConfigError: the quotient is not whole.
    """
    batch_size, remainder = divmod(global_batch_size, world_size * accumulated)
    if batch_size and not remainder:
        return batch_size
    batches = "" if accumulated == 1 else f" of {accumulated} batches each"
    raise ConfigError(
        f"data.global_batch_size is {global_batch_size}, which cannot be divided between {world_size} ranks{batches}",
        location="data.global_batch_size",
        hint=f"Use a multiple of {world_size * accumulated}. To accumulate gradients, set data.batch_size, too.",
    )
