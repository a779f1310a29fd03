"""Find a learning rate and a batch size by short trials of a trainer, which is afterwards as it was before."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_cli.checkpoint import model_state
from trainer_cli.core.load_options import WHOLE
from trainer_cli.data.adapt import as_loader
from trainer_cli.data.loader import Loader
from trainer_cli.data.user_loader import generators_of
from trainer_cli.errors import UserError
from trainer_cli.trainer.hooks import Hooks
from trainer_cli.trainer.metrics import read_outputs, sample_count, to_device
from trainer_cli.trainer.setup import settings_of
from trainer_cli.trainer.state import capture, load_all
from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_SMOOTHING = 0.98
_SKIPPED = (10, 1)
"""Points at the beginning and at the end that are not suggested."""


@dataclass(frozen=True, slots=True)
class LearningRates:
    """The rates that were tried, the smoothed loss at each, and the one at which the loss falls fastest."""

    rates: list[float]
    losses: list[float]
    suggestion: float | None


def find_learning_rate(
    trainer: Trainer, train_loader: Any, *, min_lr: float = 1e-7, max_lr: float = 1.0, steps: int = 100
) -> LearningRates:
    """Train some steps with a rate that rises exponentially, and suggest the one where the smoothed loss falls fastest
    (the range test of Smith, 2015, arXiv:1506.01186). Model, optimizers, schedules, loss scale and random numbers are
    afterwards as they were. Callbacks are not called.

    Args:
        train_loader: as of `Trainer.fit`.
        min_lr, max_lr: the first and last rate of the group with the largest; others keep their ratio to it.
        steps: how many rates; a loss four times the smallest ends the trial.

    Raises:
        UserError: the trainer has no optimizer, or the range is none.
    """
    if not 0 < min_lr < max_lr or steps < 2:
        raise UserError(f"the rates go from {min_lr} to {max_lr} in {steps} steps, which is no range")
    rates: list[float] = []
    losses: list[float] = []
    with _trial(trainer), closing(_batches(trainer, train_loader, steps)) as batches:
        groups = [group for one in trainer.optimizers.values() for group in one.param_groups]
        largest = max(float(group["lr"]) for group in groups) or 1.0
        shares = [float(group["lr"]) / largest or 1.0 for group in groups]
        mean, smallest = 0.0, math.inf
        for number, (batch, samples) in enumerate(batches):
            rate = min_lr * (max_lr / min_lr) ** (number / (steps - 1))
            for group, share in zip(groups, shares, strict=True):
                group["lr"] = rate * share
            mean = _SMOOTHING * mean + (1 - _SMOOTHING) * float(_step(trainer, batch, samples))
            smoothed = mean / (1 - _SMOOTHING ** (number + 1))
            smallest = min(smallest, smoothed)
            if not math.isfinite(smoothed) or smoothed > 4 * smallest:
                break
            rates.append(rate)
            losses.append(smoothed)
    inner = slice(_SKIPPED[0], len(losses) - _SKIPPED[1])
    slopes = np.gradient(losses)[inner] if len(losses) > 1 else np.array([])
    suggestion = rates[inner][int(slopes.argmin())] if len(slopes) else None
    log.info("tried %d learning rates; suggested: %s", len(rates), suggestion)
    return LearningRates(rates, losses, suggestion)


def find_batch_size(
    trainer: Trainer, train_loader: Any, *, start: int = 2, max_size: int = 8192, steps: int = 2
) -> int:
    """The largest of `start`, twice that, four times that, … up to `max_size` and the number of samples, with which
    `steps` steps fit into the memory. Everything is afterwards as after `find_learning_rate`.

    On the CPU a system may end a process that needs too much memory, so that no error can be caught: choose `max_size`.

    Raises:
        UserError: no batch of `start` fits, or the data has no map-style dataset.
    """
    loader = as_loader(train_loader, shuffle=True, seed=trainer.seed or 0)
    if not isinstance(loader, Loader):
        raise UserError(
            f"a batch size is found for a map-style dataset, and not for a {type(train_loader).__name__}",
            cure="Give the dataset itself.",
        )
    found, size = None, start
    while size <= min(max_size, loader.length):
        try:
            with _trial(trainer):
                for _ in range(steps):
                    with model_state_kept():
                        batch = to_device(loader.source.fetch((0, 0, size)), trainer.device)
                    _step(trainer, batch, size)
        except (torch.OutOfMemoryError, MemoryError):
            break
        finally:
            if trainer.device.type == "cuda":
                torch.cuda.empty_cache()
        found, size = size, size * 2
    if found is None:
        raise UserError(f"no batch of {start} samples fits: there are {loader.length}, or the memory is too small")
    log.info("a batch of %d samples fits", found)
    return found


@contextmanager
def model_state_kept() -> Iterator[None]:
    """The random numbers inside are drawn from a copy of the generators."""
    before = model_state.capture_rng()
    try:
        yield
    finally:
        model_state.restore_rng(before)


@contextmanager
def _trial(trainer: Trainer) -> Iterator[None]:
    """Steps inside call no callback, and are undone: everything that a checkpoint holds is restored, and buffers."""
    if not trainer.optimizers:
        raise UserError("this trainer has no optimizer, so it cannot train", cure="Give it an optimizer.")
    hooks, rng, training = trainer.hooks, trainer.rng, trainer.model.training
    saved = copy.deepcopy(dict(capture(trainer, None)))
    buffers = [(one, one.clone()) for one in trainer.model.buffers()]
    settings = {name: settings_of(one) for name, one in trainer.optimizers.items()}
    trainer.hooks = Hooks({}, families={"validate"})
    try:
        with model_state_kept():
            trainer.train_mode()
            trainer.modes.train()
            trainer.step.bind(trainer)
            yield
    finally:
        trainer.hooks = hooks
        trainer.modes.eval()
        for name, optimizer in trainer.optimizers.items():
            optimizer.zero_grad()
            for group, before in zip(optimizer.param_groups, settings[name], strict=True):
                group.update(before)
            # A state that was not there before would stay.
            optimizer.state.clear()
        load_all(trainer, None, saved, WHOLE, (), Path("the state before the trial"))
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        trainer.loading.keep_rng(rng)
        trainer.model.train(training)
        trainer.step.bind(trainer)


def _batches(trainer: Trainer, train_loader: Any, steps: int) -> Generator[tuple[Any, int | None], None, None]:
    """So many batches on the device, each with its number of samples, epoch after epoch from the first; the generators
    of a DataLoader are kept."""
    generators = generators_of(train_loader)
    states = [generator.get_state() for generator in generators]
    try:
        yield from _first_batches(trainer, as_loader(train_loader, shuffle=True, seed=trainer.seed or 0), steps)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _first_batches(trainer: Trainer, loader: Any, steps: int) -> Iterator[tuple[Any, int | None]]:
    epoch, given = 0, 0
    while given < steps:
        before = given
        with closing(loader.iterate(epoch)) as batches:
            for batch in batches:
                yield to_device(batch, trainer.device), loader.batch_samples
                given += 1
                if given == steps:
                    return
        if given == before:
            raise UserError("the train loader has no batches", cure="Check data and data.batch_size.")
        epoch += 1


def _step(trainer: Trainer, batch: Any, samples: int | None) -> torch.Tensor:
    """One optimizer step over a batch; the loss before it."""
    step = trainer.step
    step.batch_size = sample_count(batch, samples)
    if step.evaluates_again:
        step.batches.append((batch, step.batch_size))
    loss, _ = read_outputs(step.train_batch(batch))
    step.end_step()
    return loss.detach()
