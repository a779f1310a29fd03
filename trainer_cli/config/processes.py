"""What a config says of several processes: refused, where it cannot be, before one of them is started."""

from __future__ import annotations

from trainer_cli.config.arguments import SAVER
from trainer_cli.config.fields import GLOBAL_BATCH_SIZE
from trainer_cli.core.checkpoint_config import CheckpointFormat
from trainer_cli.core.ranks import check_shards, check_tensor_size
from trainer_cli.core.schema import Dtype, ParallelConfig, ParallelStrategy, TrainConfig
from trainer_cli.errors import ConfigError

_FORMATS_OF_ONE_PROCESS = (CheckpointFormat.torch_file, CheckpointFormat.huggingface)


def check_processes(config: TrainConfig, world_size: int) -> None:
    """Check all that follows from the config and the number of processes.

    Raises:
        ConfigError: they cannot train so.
    """
    parallel = config.parallel
    check_strategy(parallel, config.precision.dtype, world_size)
    check_tensor_size(parallel.tensor_size, world_size)
    if parallel.strategy is ParallelStrategy.fsdp:
        check_shards(parallel.shard_size, parallel.tensor_size, world_size)
    batches_of_step(config, world_size // parallel.tensor_size)
    _check_format(config, world_size)


def check_strategy(parallel: ParallelConfig, dtype: Dtype, world_size: int) -> None:
    """Check that so many processes can train one model by this strategy.

    Raises:
        ConfigError: there are several, but the config says single; or it says what cannot be.
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
    """Check that so many processes can save by the format of the checkpoints.

    Raises:
        ConfigError: they cannot.
    """
    subclass = config.callbacks.get(SAVER) or {}
    format = subclass.get("format", config.checkpoint.format)
    if world_size > 1 and format in _FORMATS_OF_ONE_PROCESS:
        raise ConfigError(
            f"checkpoint.format is {format}, which saves the state of one process, and there are {world_size}",
            location="checkpoint.format",
            hint="Choose tensors or archive; train ckpt export writes the others.",
        )


def batches_of_step(config: TrainConfig, data_size: int) -> tuple[int | None, int]:
    """The batch of each rank (None: the default), and how many of them make a step.

    `data.global_batch_size` decides the second if `data.batch_size` is given, too, else the first.

    Args:
        data_size: into how many parts the samples are divided.

    Raises:
        ConfigError: no whole number does.
    """
    node, accumulated = config.data or {}, config.loop.grad_accum_steps
    whole, batch_size = node.get(GLOBAL_BATCH_SIZE), node.get("batch_size")
    if whole is None:
        return batch_size, accumulated
    if batch_size is None:
        return _batch_of_rank(whole, data_size, accumulated), accumulated
    return batch_size, _accumulation(whole, batch_size, data_size, accumulated)


def _accumulation(whole: int, batch_size: int, world_size: int, given: int) -> int:
    """How many batches of each rank make a step of `whole` samples.

    Raises:
        ConfigError: no whole number does, or another number is `given`.
    """
    at_once = batch_size * world_size
    ranks = "" if world_size == 1 else f" on each of {world_size} ranks"
    if whole % at_once:
        fit = [size for size in range(batch_size, 0, -1) if whole % (size * world_size) == 0]
        raise ConfigError(
            f"data.global_batch_size is {whole}, which is no multiple of batches of {batch_size}{ranks}",
            location="data.global_batch_size",
            hint=f"Set data.batch_size={fit[0]}." if fit else f"Use a multiple of {world_size}.",
        )
    if given not in (1, whole // at_once):
        raise ConfigError(
            f"data.global_batch_size of {whole} takes {whole // at_once} batches of {batch_size}{ranks}, but "
            f"loop.grad_accum_steps is {given}",
            location="loop.grad_accum_steps",
            hint="Leave loop.grad_accum_steps out.",
        )
    return whole // at_once


def _batch_of_rank(whole: int, world_size: int, accumulated: int) -> int:
    """The batch of each rank, `accumulated` of which make a step of `whole` samples.

    Raises:
        ConfigError: no whole number of samples does.
    """
    batch_size, rest = divmod(whole, world_size * accumulated)
    if batch_size and not rest:
        return batch_size
    batches = "" if accumulated == 1 else f" of {accumulated} batches each"
    raise ConfigError(
        f"data.global_batch_size is {whole}, which cannot be divided between {world_size} ranks{batches}",
        location="data.global_batch_size",
        hint=f"Use a multiple of {world_size * accumulated}. To accumulate gradients, set data.batch_size, too.",
    )
