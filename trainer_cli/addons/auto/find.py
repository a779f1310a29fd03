"""Find a learning rate and a batch size by short trials of a trainer, which are undone."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_cli.addons.auto.trial_memory import TrialMemory
from trainer_cli.batches import sample_count, to_device
from trainer_cli.data import Loader, as_loader, generators_of
from trainer_cli.errors import UserError
from trainer_cli.loads import WHOLE
from trainer_cli.outputs import ForwardState, modes_kept
from trainer_cli.state import inner_optimizers, rng_kept
from trainer_cli.terminal import format_count
from trainer_cli.trainer import Trainer, capture, load_all

log = logging.getLogger(__name__)

CountedBatch = tuple[Any, int]
"""A batch on the device, and its number of samples; None if the loader does not know it."""

_OUT_OF_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory")
"""In the messages of devices that have no error of their own for it."""
_SMOOTHING = 0.98
_SKIPPED = (10, 1)
"""Number of points at the beginning and at the end that are not suggested."""


@dataclass(frozen=True, slots=True)
class LearningRates:
    """The tried rates, the smoothed loss at each, and the rate at which the loss falls fastest."""

    rates: list[float]
    losses: list[float]
    suggestion: float | None


def find_learning_rate(
    trainer: Trainer, train_loader: Any, *, min_lr: float = 1e-7, max_lr: float = 1.0, steps: int = 100
) -> LearningRates:
    """Train with an exponentially rising learning rate, and suggest the one where the smoothed loss falls fastest.

    This is the range test of Smith, 2015, arXiv:1506.01186. Model, optimizers, schedules, loss scale and random numbers
    are restored afterwards. Callbacks are not called.

    Args:
        train_loader: see `Trainer.fit`.
        min_lr, max_lr: first and last rate of the group with the largest rate; others keep their ratio to it.
        steps: number of rates, each for an optimizer step of `grad_accum_steps` batches. A loss above four times the
            smallest ends the trial.

    Raises:
        UserError: the trainer has no optimizer, or the rates do not rise.
    """
    if not 0 < min_lr < max_lr or steps < 2:
        raise UserError(
            f"the rates go from {min_lr} to {max_lr} in {format_count(steps, 'step')}, which is not a range"
        )
    rates: list[float] = []
    losses: list[float] = []
    accumulated, group = trainer.loop.settings.grad_accum_steps, trainer.strategy.group
    # As the run begins: the rate is for what it trains then.
    with (
        _trial(trainer),
        trainer.freezing.applied(trainer),
        closing(_batches(trainer, train_loader, steps * accumulated)) as batches,
    ):
        # The strategy may train another module while parameters are frozen.
        trainer.step.bind(trainer)
        param_groups = [entry for optimizer in trainer.optimizers.values() for entry in optimizer.param_groups]
        largest = max(float(entry["lr"]) for entry in param_groups) or 1.0
        # A group whose rate is 0 now, as at the start of a warm-up, is tried like that with the largest.
        ratios = [float(entry["lr"]) / largest or 1.0 for entry in param_groups]
        mean, smallest = 0.0, math.inf
        for number, batches_of_step in enumerate(_divide(batches, accumulated)):
            rate = min_lr * (max_lr / min_lr) ** (number / (steps - 1))
            for entry, ratio in zip(param_groups, ratios, strict=True):
                entry["lr"] = rate * ratio
            # The mean over the ranks, so that all end the trial at the same step.
            loss = float(group.sum(trainer.step.train_batches(batches_of_step).cpu().double())) / group.world_size
            mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
            # The mean starts at 0, which is a bias of the first steps.
            smoothed = mean / (1 - _SMOOTHING ** (number + 1))
            smallest = min(smallest, smoothed)
            if not math.isfinite(smoothed) or smoothed > 4 * smallest:
                break
            rates.append(rate)
            losses.append(smoothed)
    suggestable = slice(_SKIPPED[0], len(losses) - _SKIPPED[1])
    slopes = np.gradient(losses)[suggestable] if len(losses) > 1 else np.array([])
    suggestion = rates[suggestable][int(slopes.argmin())] if len(slopes) else None
    log.info("tried %d learning rates; suggested: %s", len(rates), suggestion)
    return LearningRates(rates, losses, suggestion)


@dataclass(frozen=True, slots=True)
class BatchSizeTrial:
    """A batch size that was tried, or that was not because the one before it shows that it would not fit."""

    size: int
    fits: bool
    peak_bytes: int | None
    """Memory that the trial took; None if unknown."""


def find_batch_size(
    trainer: Trainer, train_loader: Any, *, start: int = 2, max_size: int = 8192, steps: int = 2
) -> int:
    """Find the largest batch size with which `steps` steps fit into memory, with a margin of a tenth.

    The sizes tried are `start` and its doubles, up to `max_size` and the number of samples. Everything is restored as
    by `find_learning_rate`. On the CPU a size is tried only if twice the memory of the one before is free.

    Raises:
        UserError: no batch of `start` fits, or the data is not a map-style dataset.
    """
    loader = as_loader(train_loader, shuffle=True, seed=trainer.seed or 0)
    largest = min(max_size, getattr(loader, "length", None) or max_size)
    sizes = itertools.takewhile(lambda size: size <= largest, (start * 2**power for power in itertools.count()))
    trials = try_batch_sizes(trainer, loader, sizes, TrialMemory(trainer.device), steps=steps)
    fitting = [trial.size for trial in trials if trial.fits]
    if not fitting:
        raise UserError(
            f"no batch of {format_count(start, 'sample')} fits: there are {largest}, or the memory is too small"
        )
    log.info("a batch of %s fits", format_count(fitting[-1], "sample"))
    return fitting[-1]


def try_batch_sizes(
    trainer: Trainer, loader: Any, sizes: Iterable[int], memory: TrialMemory, *, steps: int = 2
) -> list[BatchSizeTrial]:
    """Make `steps` steps with batches of each size, up to the first size that does not fit.

    Args:
        loader: a loader of `trainer_cli.data`.
        sizes: rising batch sizes.

    Raises:
        UserError: the data is not a map-style dataset.
    """
    if not isinstance(loader, Loader):
        raise UserError(
            f"a batch size is found for a map-style dataset, and not for a {type(loader).__name__}",
            cure="Give the dataset itself, or set the batch size.",
        )
    trials: list[BatchSizeTrial] = []
    for size in sizes:
        # An error is safe on a GPU. On the CPU the system would kill this process.
        if memory.is_cpu and trials and trials[-1].peak_bytes:
            expected_bytes = trials[-1].peak_bytes * size / trials[-1].size
            if memory.exceeds(expected_bytes):
                trials.append(BatchSizeTrial(size, fits=False, peak_bytes=None))
                break
        memory.start_trial()
        fits = _try_batch_size(trainer, loader, size, steps)
        peak_bytes = memory.end_trial()
        trials.append(BatchSizeTrial(size, fits and not memory.exceeds(peak_bytes), peak_bytes if fits else None))
        if not trials[-1].fits:
            break
    return trials


def _try_batch_size(trainer: Trainer, loader: Loader, size: int, steps: int) -> bool:
    """Whether `steps` steps with batches of a size are possible without an out-of-memory error."""
    try:
        with _trial(trainer):
            for _ in range(steps):
                with rng_kept():
                    batch = to_device(loader.source.fetch((0, 0, size)), trainer.device)
                trainer.step.train_batches([(batch, size)])
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or _OUT_OF_MEMORY.search(str(error)):
            return False
        raise
    return True


@contextmanager
def _trial(trainer: Trainer) -> Iterator[None]:
    """Undo the steps inside the block: restore all that a checkpoint holds, and buffers. Callbacks are not called."""
    if not trainer.optimizers:
        raise UserError("this trainer has no optimizer, so it cannot train", cure="Give it an optimizer.")
    rng = trainer.loading.rng
    # A copy, because the tensors of a state are the live ones.
    saved = copy.deepcopy(dict(capture(trainer, with_data=False)))
    # Including buffers that are not persistent, which a checkpoint does not hold, and those that a forward replaces.
    forward_state = ForwardState(trainer.model)
    # Of each parameter group all but the parameters: the learning rate is changed in a trial.
    settings = {
        name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for name, optimizer in trainer.optimizers.items()
    }
    try:
        # Callbacks would count, log or save steps that are undone.
        with rng_kept(), modes_kept(trainer.model), trainer.hooks.silenced():
            trainer.loading.restore_generators()
            trainer.train_mode()
            trainer.modes.train()
            trainer.step.bind(trainer)
            yield
    finally:
        trainer.modes.eval()
        for name, optimizer in trainer.optimizers.items():
            optimizer.zero_grad()
            for group, saved_settings in zip(optimizer.param_groups, settings[name], strict=True):
                group.update(saved_settings)
            # Loading the saved state would not remove the state of parameters that had none.
            for holder in (optimizer, *inner_optimizers(optimizer)):
                holder.state.clear()
        forward_state.restore()
        load_all(trainer, None, saved, WHOLE, (), Path("the state before the trial"))
        trainer.loading.keep_rng(rng)
        trainer.step.bind(trainer)


def _batches(trainer: Trainer, train_loader: Any, steps: int) -> Generator[CountedBatch, None, None]:
    """Yield `steps` batches on the device with their numbers of samples, from the first epoch on.

    The generators of a DataLoader are restored.
    """
    generators = generators_of(train_loader)
    states = [generator.get_state() for generator in generators]
    try:
        yield from _first_batches(trainer, as_loader(train_loader, shuffle=True, seed=trainer.seed or 0), steps)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _first_batches(trainer: Trainer, loader: Any, steps: int) -> Iterator[CountedBatch]:
    """Yield `steps` batches of a loader, of as many epochs as that takes."""
    count = 0
    for epoch in itertools.count():
        count_before = count
        with closing(loader.iterate(epoch)) as batches:
            for batch in batches:
                yield to_device(batch, trainer.device), sample_count(batch, loader.batch_samples)
                count += 1
                if count == steps:
                    return
        if count == count_before:
            raise UserError("the train loader has no batches", cure="Check data and data.batch_size.")


def _divide(batches: Iterable[CountedBatch], count: int) -> Iterator[list[CountedBatch]]:
    """Yield `count` batches at a time."""
    iterator = iter(batches)
    while batches_of_step := list(itertools.islice(iterator, count)):
        yield batches_of_step
