"""Find the values of a config that are `auto`, before the first step of a run.

Data, model and optimizer are built for the trials alone, and again for the training: so the training is, bit for bit,
that of a config with the numbers that were found.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer_cli.auto_values import (
    BATCH_SIZE,
    LR,
    WORKERS,
    AutoDecision,
    auto_keys,
    largest_batch_size,
    numbers_instead,
)
from trainer_cli.config import Composed, batches_of_step
from trainer_cli.environment import usable_cores
from trainer_cli.errors import UserError
from trainer_cli.parallel import ALONE, ProcessGroup
from trainer_cli.running import Start
from trainer_cli.steps import GLOBAL_BATCH_SIZE
from trainer_cli.terminal import format_bytes, format_count

if TYPE_CHECKING:
    from trainer_cli.addons.auto.find import BatchSizeTrial
    from trainer_cli.addons.auto.trial_memory import TrialMemory

log = logging.getLogger(__name__)

_TRIAL_S = 1.0
"""Seconds for which the batches of a number of workers are counted."""
_GAIN = 1.1
"""Ratio of rates from which on more workers are worth it."""


def batch_sizes(data: Mapping[str, Any], samples: int, data_size: int) -> list[int]:
    """The batch sizes to try: 2 and its doubles, up to the limit and the samples of a rank.

    With `data.global_batch_size`, sizes of which a whole number makes a step: each is the smallest that is at least
    twice the one before.

    Args:
        data: the section `data` of a config.
        samples: number of training samples.
        data_size: number of ranks among which these are divided.
    """
    largest = min(largest_batch_size(data["batch_size"]), samples // data_size)
    global_batch_size = data.get(GLOBAL_BATCH_SIZE)
    if global_batch_size is None:
        return [2**power for power in range(1, largest.bit_length()) if 2**power <= largest] or [1]
    per_rank = global_batch_size // data_size
    sizes: list[int] = []
    for size in range(2, min(largest, per_rank) + 1):
        if per_rank % size == 0 and (not sizes or size >= 2 * sizes[-1]):
            sizes.append(size)
    # Batch norms refuse a single sample, so it is tried only if there is no other size.
    return sizes or [1]


def find_values(
    composed: Composed, start: Start, group: ProcessGroup = ALONE
) -> tuple[Composed, dict[str, AutoDecision]]:
    """Find the values that are `auto`. Collective.

    Returns:
        The config with the values, and the decision for each key that was `auto`; the same on all ranks.

    Raises:
        UserError: no value was found.
    """
    decisions: dict[str, AutoDecision] = {}
    composed.check_targets()
    for key in auto_keys(composed.config):
        log.info("%s is auto: short trials are made and undone", key)
        decision = _DECIDERS[key](composed, group, start)
        # Otherwise the objects of the training would be built beside those of the trials.
        gc.collect()
        decisions[key] = decision
        composed = composed.with_values({key: decision.value})
    return composed, decisions


def _decide_batch_size(composed: Composed, group: ProcessGroup, start: Start) -> AutoDecision:
    """The batch size that fits on every rank.

    Each rank measures alone, without collectives: none waits for another that runs out of memory.
    """
    phase = "while a batch size was searched"
    with group.checking(phase):
        trials, memory = _measure_batch_sizes(composed, group)
        fitting = [trial.size for trial in trials if trial.fits]
        if not fitting:
            raise UserError(
                f"no batch of {format_count(trials[0].size, 'sample')} fits into {memory}",
                where=BATCH_SIZE,
                cure="Use a smaller model, precision=bf16, or a larger device.",
            )
    of_ranks = group.gather((fitting[-1], trials, str(memory)))
    size, trials, limit = min(of_ranks, key=lambda rank: rank[0])
    last = trials[-1]
    if last.fits:
        reason = "the largest that was to be tried"
    elif last.peak_bytes is None:
        reason = f"{last.size} would not fit into {limit}"
    else:
        reason = f"{last.size} took {format_bytes(last.peak_bytes)} of {limit}"
    if group.world_size > 1:
        reason = f"{reason} (the smallest of {group.world_size} ranks)"
    measured = {
        "sizes": [trial.size for trial in trials],
        "peak_bytes": [trial.peak_bytes for trial in trials],
        "fits": [trial.fits for trial in trials],
    }
    return AutoDecision(size, reason, measured)


def _measure_batch_sizes(composed: Composed, group: ProcessGroup) -> tuple[list[BatchSizeTrial], TrialMemory]:
    """Try batch sizes on this rank alone. Returns the trials, and the memory that they could take."""
    from trainer_cli.addons.auto.find import try_batch_sizes
    from trainer_cli.addons.auto.trial_memory import TrialMemory
    from trainer_cli.running import Builder

    config = composed.config
    data = {**config.data, "batch_size": 1, GLOBAL_BATCH_SIZE: None, "overfit_batches": None, "drop_last": False}
    optimizer = {**config.optimizer, "lr": numbers_instead(data)[LR]} if LR in auto_keys(config) else config.optimizer
    loop = replace(config.loop, grad_accum_steps=1)
    trial = replace(config, data=data, optimizer=optimizer, loop=loop)
    trial_trainer, trial_data = Builder(trial, composed.trust).trial()
    sizes = batch_sizes(config.data, getattr(trial_data.train, "length", None) or 1, group.data_size)
    memory = TrialMemory(trial_trainer.device, processes=-(-group.world_size // group.machines))
    return try_batch_sizes(trial_trainer, trial_data.train, sizes, memory), memory


def _decide_workers(composed: Composed, group: ProcessGroup, start: Start) -> AutoDecision:
    """The smallest number of workers that loads batches about as fast as any. Rank 0 measures its own share."""
    decision = None
    with group.checking("while a number of workers was searched"):
        if group.is_main:
            decision = _measure_workers(composed, group)
    decision = group.broadcast(decision)
    assert decision is not None
    return decision


def _measure_workers(composed: Composed, group: ProcessGroup) -> AutoDecision:
    """Load batches with 0, 1, 2, 4 and so on workers, up to the cores of a rank, as long as that is faster."""
    from trainer_cli.running import Builder

    cores = usable_cores() * group.machines // group.world_size
    rates: dict[int, float] = {}
    for count in (0, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)):
        data = {**composed.config.data, "num_workers": count}
        loader = Builder(replace(composed.config, data=data), composed.trust, group).data().train
        rates[count] = _measure_rate(loader, count)
        # One worker may be no faster than none, where two are.
        if count > 1 and rates[count] < _GAIN * max(list(rates.values())[:-1]):
            break
    best = next(count for count, rate in rates.items() if rate * _GAIN > max(rates.values()))
    listed = ", ".join(f"{count}: {rate:.3g}" for count, rate in rates.items())
    measured = {"workers": list(rates), "batches_per_s": list(rates.values())}
    return AutoDecision(best, f"batches a second by workers: {listed}", measured)


def _measure_rate(loader: Any, workers: int) -> float:
    """Batches a second, from the second batch on: workers start before the first."""
    count, began = -1, 0.0
    try:
        for epoch in itertools.count():
            with closing(loader.iterate(epoch)) as batches:
                for _ in batches:
                    count += 1
                    began = began if count else time.monotonic()
                    # Of each worker at least one more: their first batches are ready together.
                    if time.monotonic() - began > _TRIAL_S and count > workers:
                        return count / (time.monotonic() - began)
    finally:
        loader.close()
    raise AssertionError


def _decide_rate(composed: Composed, group: ProcessGroup, start: Start) -> AutoDecision:
    """The learning rate that a range test suggests.

    Rank 0 makes the test alone, with the batches of all ranks: without collectives, and with the steps of the training.
    """
    decision = None
    with group.checking("while a learning rate was searched"):
        if group.is_main:
            decision = _test_rates(composed, group, start)
    decision = group.broadcast(decision)
    assert decision is not None
    return decision


def _test_rates(composed: Composed, group: ProcessGroup, start: Start) -> AutoDecision:
    """Make the range test in this process, from the checkpoint with which the run starts, if it has one.

    Raises:
        UserError: the test found no learning rate.
    """
    from trainer_cli.addons.auto.find import find_learning_rate
    from trainer_cli.running import Builder

    config = composed.config
    batch_size, accumulated = batches_of_step(config, group.data_size)
    trial = replace(
        config,
        data={**config.data, "batch_size": batch_size, GLOBAL_BATCH_SIZE: None},
        # With 1.0, a group's rate is its `lr_scale`.
        optimizer={**config.optimizer, "lr": 1.0},
        loop=replace(config.loop, grad_accum_steps=accumulated * group.data_size),
    )
    trainer, data = Builder(trial, composed.trust).trial()
    if (fork := start.fork(composed)) is not None:
        trainer.loading.load(fork, config.load.options(), (), data.train)
    largest = max(float(entry["lr"]) for optimizer in trainer.optimizers.values() for entry in optimizer.param_groups)
    result = find_learning_rate(trainer, data.train)
    if result.suggestion is None:
        raise UserError(
            f"the range test found no learning rate: after {len(result.rates)} steps the loss was not finite, or four "
            "times its minimum",
            where=LR,
            cure="Set a number.",
        )
    # Rates are those of the group with the largest; two digits are as exact as the test.
    value = float(f"{result.suggestion / largest:.2g}")
    rates = [rate / largest for rate in result.rates]
    reason = (
        f"the loss fell fastest there, in a range test of {len(rates)} steps from {rates[0]:.2g} to {rates[-1]:.2g}"
    )
    return AutoDecision(value, reason, {"rates": rates, "losses": result.losses})


# The key of the config -> decides its value, from the config, the ranks and the start of the run.
_DECIDERS = {BATCH_SIZE: _decide_batch_size, WORKERS: _decide_workers, LR: _decide_rate}
