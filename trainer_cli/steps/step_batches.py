"""How the samples of an optimizer step are divided into batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_cli.errors import ConfigError
from trainer_cli.terminal import format_count

GLOBAL_BATCH_SIZE = "global_batch_size"


def divide_step(data: Mapping[str, Any], accumulated: int, data_size: int) -> tuple[int | None, int]:
    """Batch size of each rank (None: the loader's default), and batches of each rank per step.

    With `data.global_batch_size` and `data.batch_size`, the number of batches follows from both; with the first
    alone, the batch size does.

    Args:
        data: the section `data` of a config.
        accumulated: `loop.grad_accum_steps`.
        data_size: number of ranks among which the samples are divided.

    Raises:
        ConfigError: `data.global_batch_size` cannot be divided into whole batches.
    """
    global_batch_size, batch_size = data.get(GLOBAL_BATCH_SIZE), data.get("batch_size")
    if global_batch_size is None:
        return batch_size, accumulated
    if batch_size is None:
        return _divide_batch(global_batch_size, data_size, accumulated), accumulated
    return batch_size, _count_batches(global_batch_size, batch_size, data_size, accumulated)


def _count_batches(global_batch_size: int, batch_size: int, world_size: int, configured: int) -> int:
    """Number of batches of each rank in a step of `global_batch_size` samples.

    Raises:
        ConfigError: the quotient is not whole, or `loop.grad_accum_steps` is `configured` to another number.
    """
    samples_at_once = batch_size * world_size
    ranks = "" if world_size == 1 else f" on each of {world_size} ranks"
    if global_batch_size % samples_at_once:
        # The largest one is suggested, which is the nearest to the size that was asked for.
        valid_sizes = [size for size in range(batch_size, 0, -1) if global_batch_size % (size * world_size) == 0]
        raise ConfigError(
            f"data.global_batch_size is {global_batch_size}, which is not a multiple of batches of {batch_size}{ranks}",
            location="data.global_batch_size",
            hint=f"Set data.batch_size={valid_sizes[0]}." if valid_sizes else f"Use a multiple of {world_size}.",
        )
    if configured not in (1, global_batch_size // samples_at_once):
        raise ConfigError(
            f"data.global_batch_size of {global_batch_size} takes "
            f"{format_count(global_batch_size // samples_at_once, 'batch')} of "
            f"{batch_size}{ranks}, but loop.grad_accum_steps is {configured}",
            location="loop.grad_accum_steps",
            hint="Leave loop.grad_accum_steps out.",
        )
    return global_batch_size // samples_at_once


def _divide_batch(global_batch_size: int, world_size: int, accumulated: int) -> int:
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
