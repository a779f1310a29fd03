"""Refuse values of a config that contradict each other, or the number of processes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from trainer_cli.auto_values import BATCH_SIZE, auto_keys
from trainer_cli.components import SAVER
from trainer_cli.errors import Code, ConfigError
from trainer_cli.keys import OPEN, SOURCE, list_keys, unknown_key
from trainer_cli.loads import LEAVE_OUT, can_resume, check_leave_out, describe_left_out, find_left_out
from trainer_cli.patterns import did_you_mean, expand_braces
from trainer_cli.policy import SaveRules
from trainer_cli.ranks import check_shards, check_tensor_size
from trainer_cli.schema import CheckpointFormat, Dtype, ParallelConfig, ParallelStrategy, TrainConfig
from trainer_cli.steps import Duration, Interval, StepCounts, divide_step


def find_contradictions(config: TrainConfig) -> Iterator[ConfigError]:
    """Mistakes in several values together, each with the key to change."""
    yield from _check_resume_allow(config.resume_allow)
    yield from _check_left_out(config)
    yield from _check_ephemeral_interval(config)


def check_processes(config: TrainConfig, world_size: int) -> None:
    """Check the config against the number of processes.

    Raises:
        ConfigError: the config cannot be trained by this number of processes.
    """
    parallel = config.parallel
    if ":" in config.device and world_size > 1:
        raise ConfigError(
            f"device is {config.device}, but each of {world_size} processes trains on a GPU of its own",
            location="device",
            hint="Set device=cuda; CUDA_VISIBLE_DEVICES before the command chooses the GPUs.",
        )
    check_strategy(parallel, config.precision.dtype, world_size)
    check_tensor_size(parallel.tensor_size, world_size)
    if parallel.strategy is ParallelStrategy.fsdp:
        check_shards(parallel.shard_size, parallel.tensor_size, world_size)
    # Ranks of one tensor group train on the same samples.
    data_size = world_size // parallel.tensor_size
    if BATCH_SIZE in auto_keys(config):
        # While the batch size is still to be found, only the samples of a step are known.
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
    callback = config.callbacks.get(SAVER) or {}
    format = callback.get("format", config.checkpoint.format)
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
        raise ConfigError(
            f"{BATCH_SIZE} is auto: its value is found before the first step of a run",
            location=BATCH_SIZE,
            hint="Give a number, or the run that has found one.",
        )
    return divide_step(config.data or {}, config.loop.grad_accum_steps, data_size)


def _check_resume_allow(allowed: Iterable[str]) -> Iterator[ConfigError]:
    """Refuse keys and globs of `resume_allow` that match no key: a misspelt one would silently allow nothing."""
    for pattern in allowed:
        if pattern != SOURCE and not any(map(_may_match, expand_braces(pattern))):
            hint = did_you_mean(pattern, [config_key.key for config_key in list_keys()]).strip()
            message = f"resume_allow names {pattern!r}, and there is no such key"
            hint = hint or "It takes keys, sections and globs of them."
            yield ConfigError(message, location="resume_allow", code=Code.unknown_key, hint=hint)


def _may_match(pattern: str) -> bool:
    """Whether a key or glob without braces can match a key of a config."""
    glob = re.search(r"[*?\[]", pattern)
    if glob is None:
        parts = tuple(pattern.split("."))
        return all(parts) and unknown_key(parts) is None
    # A star also matches dots, so a glob that reaches into an open section may match an unknown key there.
    start = pattern[: glob.start()]
    keys = [config_key.key for config_key in list_keys()]
    open_prefixes = [f"{key}." for key in keys if key in OPEN]
    reaches_open = any(prefix.startswith(start) or start.startswith(prefix) for prefix in open_prefixes)
    return reaches_open or any(fnmatchcase(key, pattern) for key in keys)


def _check_left_out(config: TrainConfig) -> Iterator[ConfigError]:
    """Refuse names in `checkpoint.leave_out` that are not state of the run, and restarts that would lack state."""
    callbacks = [name for name, node in config.callbacks.items() if node is not None]
    if config.sparsity is not None:
        callbacks.append("sparsity")
    try:
        check_leave_out(LEAVE_OUT, config.checkpoint.leave_out, callbacks)
    except ConfigError as error:
        yield error
    lacking = find_left_out(config.checkpoint.leave_out, callbacks)
    if lacking and config.restarts.max and not can_resume(lacking, config.load.states):
        yield ConfigError(
            f"restarts.max is {config.restarts.max}, but {describe_left_out(lacking)}", location=LEAVE_OUT
        )


def _check_ephemeral_interval(config: TrainConfig) -> Iterator[ConfigError]:
    """Refuse ephemeral saves that are not more frequent than regular ones, as far as the config alone shows it.

    An epoch has a known number of steps here if `loop.steps_per_epoch` is set; policy/rules.py compares the others.
    """
    settings, loop = config.checkpoint, config.loop
    if settings.ephemeral_save_interval is None or settings.is_automatic:
        return
    run = Duration.parse(loop.max_duration)

    def interval(text: Any) -> Interval | None:
        return None if text is None else Interval(Duration.parse(text).within(run), loop.steps_per_epoch)

    try:
        rules = SaveRules(interval(settings.save_interval), interval(settings.ephemeral_save_interval))
        rules.check_ephemeral(Interval(run, loop.steps_per_epoch), StepCounts(steps_per_epoch=loop.steps_per_epoch))
    except ConfigError as error:
        yield error
    except ValueError:
        return  # A part of an epoch whose length is not known yet.
