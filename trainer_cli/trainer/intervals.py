"""What will happen when: cadences as pure arithmetic over progress, the same after a resume as before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from trainer_cli.trainer.duration import Duration, Unit
from trainer_cli.trainer.progress import Progress


@dataclass(frozen=True, slots=True)
class Interval:
    """Every so much of something, counted from the run's beginning, never from where it was resumed.

    `steps_per_epoch` turns epochs into steps; without it only whole epochs can be told, at their ends. Where epochs
    had another length before a resume, `offset` is by how many steps the run would be further with today's.
    """

    interval: Duration
    steps_per_epoch: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.interval.unit is Unit.EPOCH and self.steps_per_epoch is None and self.interval.value.denominator != 1:
            raise ValueError(
                f"{self.interval} needs to know how many steps an epoch has: "
                "the train loader has no length, so set loop.steps_per_epoch"
            )

    @property
    def steps(self) -> Fraction | None:
        """The interval in optimizer steps (a fraction for part epochs), or None where steps cannot tell."""
        if self.interval.unit is Unit.STEP:
            return self.interval.value
        if self.interval.unit is Unit.EPOCH and self.steps_per_epoch is not None:
            return self.interval.value * self.steps_per_epoch
        return None

    def due(self, now: Progress) -> bool:
        """True where the step just finished reached or crossed a multiple of the interval."""
        if now.step == 0:
            return False
        # Steps made with epochs of another length tell nothing of whole epochs; the count of epochs does.
        by_epochs = self.offset and self.interval.value.denominator == 1
        if (steps := self.steps) is not None and not by_epochs:
            step = now.step + self.offset
            return _whole(step, steps) > _whole(step - 1, steps)
        before, after = self._counts(now)
        return math.floor(after / self.interval.value) > math.floor(before / self.interval.value)

    def next_step(self, now: Progress) -> int:
        """The earliest step after `now` at which it may be due; exact where steps can tell."""
        if (steps := self.steps) is not None:
            return math.ceil((_whole(now.step + self.offset, steps) + 1) * steps) - self.offset
        return now.step + 1

    def reached(self, now: Progress) -> bool:
        """True where the whole interval lies behind `now`: what a duration asks, not a cadence."""
        if (steps := self.steps) is not None:
            return now.step + self.offset >= steps
        return self._counts(now)[1] >= self.interval.value

    @property
    def end(self) -> int | None:
        """The step at which the whole interval has passed, or None where steps cannot tell."""
        steps = self.interval.steps(self.steps_per_epoch)
        return None if steps is None else steps - self.offset

    def _counts(self, now: Progress) -> tuple[Fraction, Fraction]:
        before, after = {
            Unit.EPOCH: (now.last_epoch, now.epoch),
            Unit.SAMPLE: (now.last_samples, now.samples),
            Unit.TOKEN: (now.last_tokens, now.tokens),
            Unit.SECOND: (now.last_seconds, now.seconds),
        }[self.interval.unit]
        return Fraction(before), Fraction(after)

    def __str__(self) -> str:
        single = self.interval.value == 1 and self.interval.unit is not Unit.SECOND
        return f"every {str(self.interval).removeprefix('1 ') if single else self.interval}"


def _whole(count: int, interval: Fraction) -> int:
    """Whole intervals in a count: the floor of their quotient, without making it."""
    return count * interval.denominator // interval.numerator


def limited_batches(batches: int | None, limit: int | float | None) -> int | None:
    """Batches of an epoch under `limit_train_batches`: a number, or a fraction rounded up."""
    if limit is None:
        return batches
    if isinstance(limit, float):
        if batches is None:
            raise ValueError("loop.limit_train_batches is a fraction, but the train loader has no length")
        return max(1, math.ceil(batches * Fraction(str(limit))))
    return limit if batches is None else min(batches, limit)


def epoch_steps(epoch_batches: int | None, grad_accum_steps: int, configured: int | None) -> int | None:
    """Optimizer steps of an epoch; what is left over at its end makes one more step."""
    return configured if epoch_batches is None else math.ceil(epoch_batches / grad_accum_steps)


def total_steps(
    length: Duration,
    *,
    epoch_batches: int | None,
    grad_accum_steps: int,
    steps_per_epoch: int | None,
    batch_size: int | None,
    epoch_samples: int | None,
) -> int | None:
    """Optimizer steps that a training of this length makes, or None where they cannot be told beforehand."""
    an_epoch = epoch_steps(epoch_batches, grad_accum_steps, steps_per_epoch)
    steps = length.steps(an_epoch)
    if steps is not None or length.unit is not Unit.SAMPLE:
        return steps
    if an_epoch is None or batch_size is None or epoch_samples is None or epoch_batches is None:
        return None
    used = min(epoch_samples, epoch_batches * batch_size)
    epochs, rest = divmod(int(length.value), used)
    return epochs * an_epoch + math.ceil(rest / (batch_size * grad_accum_steps))
