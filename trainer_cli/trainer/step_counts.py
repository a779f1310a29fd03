"""How far each step goes, in steps, epochs, samples, tokens and seconds: the counts of a step that is still to come."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from trainer_cli.trainer.duration import Unit
from trainer_cli.trainer.intervals import Interval
from trainer_cli.trainer.progress import Progress

_FARTHEST = 2**63
Counts = tuple[int, int, int, int, int, float]
"""Epoch, batches and samples of it, samples, tokens, seconds."""
_PLACE = {Unit.EPOCH: 0, Unit.SAMPLE: 3, Unit.TOKEN: 4, Unit.SECOND: 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """How far each step goes, in every unit that can be told, from where the training goes on."""

    start: Progress = field(default_factory=Progress)
    grad_accum_steps: int = 1
    epoch_batches: int | None = None
    """Batches of an epoch; None where the train loader has no length."""
    steps_per_epoch: int | None = None
    """Optimizer steps of an epoch, told by the config where the loader cannot."""
    batch_size: int | None = None
    epoch_samples: int | None = None
    """Samples of the whole dataset."""
    step_tokens: float | None = None
    step_time_s: float | None = None

    def knows(self, cadence: Interval) -> bool:
        """True where it can be told beforehand when a cadence is due."""
        return (
            cadence.steps is not None
            or {
                Unit.STEP: True,
                Unit.EPOCH: self.epoch_batches is not None,
                Unit.SAMPLE: self._knows_samples,
                Unit.TOKEN: self.step_tokens is not None,
                Unit.SECOND: self.step_time_s is not None,
            }[cadence.interval.unit]
        )

    def at(self, step: int) -> Progress:
        """All counts at the end of a step, those that cannot be told standing still."""
        if step == self.start.step:
            return self.start
        before, now = self._counts(step - 1), self._counts(step)
        epoch, batch, epoch_samples, samples, tokens, seconds = now
        return Progress(
            step, epoch, batch, epoch_samples, samples, tokens, seconds,
            last_samples=before[3], last_tokens=before[4], last_seconds=before[5], last_epoch=before[0],
        )  # fmt: skip

    def next_due(self, cadence: Interval, after: int) -> int | None:
        """The earliest step after this one at which a cadence is due; None where it cannot be told."""
        if not self.knows(cadence):
            return None
        if cadence.steps is not None:
            return cadence.next_step(self.at(after))
        place, interval = _PLACE[cadence.interval.unit], cadence.interval.value
        aim = (math.floor(Fraction(self._counts(after)[place]) / interval) + 1) * interval
        whole = aim.numerator if aim.denominator == 1 else aim
        return first_step(lambda step: self._counts(step)[place] >= whole, after + 1)

    def process_s(self, step: int) -> float:
        """Seconds that this process has run, as far as they can be told."""
        return (step - self.start.step) * (self.step_time_s or 0.0)

    @property
    def _knows_samples(self) -> bool:
        return self.epoch_batches is not None and self.batch_size is not None and self.epoch_samples is not None

    def _counts(self, step: int) -> Counts:
        made, start = step - self.start.step, self.start
        tokens = start.tokens + int(made * (self.step_tokens or 0))
        seconds = start.seconds + made * (self.step_time_s or 0.0)
        if self.epoch_batches is None:
            per_epoch = self.steps_per_epoch
            epoch = start.epoch if per_epoch is None else step // per_epoch
            return epoch, 0, 0, start.samples, tokens, seconds
        left = self.epoch_batches - start.batch
        here = math.ceil(left / self.grad_accum_steps)
        if made < here:
            batches = made * self.grad_accum_steps
            taken = self._samples(start.epoch_samples, batches)
            place = start.epoch, start.batch + batches, start.epoch_samples + taken
            return (*place, start.samples + taken, tokens, seconds)
        an_epoch = math.ceil(self.epoch_batches / self.grad_accum_steps)
        epochs, rest = divmod(made - here, an_epoch)
        batches = rest * self.grad_accum_steps
        taken = self._samples(0, batches)
        samples = start.samples + self._samples(start.epoch_samples, left)
        samples += epochs * self._samples(0, self.epoch_batches) + taken
        return start.epoch + 1 + epochs, batches, taken, samples, tokens, seconds

    def _samples(self, offset: int, batches: int) -> int:
        """Samples in so many batches of an epoch, from a sample on."""
        if self.batch_size is None or self.epoch_samples is None:
            return 0
        return max(0, min(self.epoch_samples - offset, batches * self.batch_size))


def first_step(holds: Callable[[int], bool], low: int) -> int | None:
    """The first step from `low` on at which something holds that goes on holding; None where it never does."""
    reach = 1
    while not holds(low + reach - 1):
        reach *= 2
        if reach > _FARTHEST:
            return None
    first, last = low, low + reach - 1
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if holds(middle) else (middle + 1, last)
    return first
