"""Durations, intervals and step counts: at which steps something is due, as pure arithmetic.

A `Duration` is a length of training in steps, epochs, samples, tokens or time, such as `500st` or `1h30m`, or a share
of the run. An `Interval` repeats one, counted from the start of the run, so that it is due at the same steps with and
without a resume. `StepCounts` predicts the counts of future steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from fractions import Fraction
from operator import attrgetter
from typing import Any, NamedTuple

from trainer_cli.errors import ConfigError
from trainer_cli.steps.progress import Progress


class Unit(StrEnum):
    """What a duration counts."""

    STEP = "st"
    EPOCH = "ep"
    SAMPLE = "sp"
    TOKEN = "tok"
    SECOND = "s"
    RUN = "dur"
    """Shares of `loop.max_duration`."""


COUNTERS = {
    Unit.STEP: "step", Unit.EPOCH: "epoch", Unit.SAMPLE: "samples", Unit.TOKEN: "tokens", Unit.SECOND: "seconds",
}  # fmt: skip
"""Unit -> the field of `Progress`, and of `Counts`, that counts it. `last_FIELD` has the count one step earlier."""
_WORDS = {
    "st": Unit.STEP, "step": Unit.STEP, "steps": Unit.STEP,
    "ep": Unit.EPOCH, "epoch": Unit.EPOCH, "epochs": Unit.EPOCH,
    "sp": Unit.SAMPLE, "sample": Unit.SAMPLE, "samples": Unit.SAMPLE,
    "tok": Unit.TOKEN, "token": Unit.TOKEN, "tokens": Unit.TOKEN,
    "dur": Unit.RUN,
}  # fmt: skip
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1, "sec": 1}
_OTHER_WORDS = {
    "second": "s", "seconds": "s", "minute": "min", "minutes": "min", "hour": "h", "hours": "h", "day": "d",
    "days": "d", "iteration": "st", "iterations": "st", "iter": "st", "iters": "st", "batches": "st",
}  # fmt: skip
"""Words that are no units -> the unit that they mean."""
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d{1,3})?)\s*([a-z]+)", re.IGNORECASE)
_CLOCK = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|sec|s)", re.IGNORECASE)
# Exponents of any size would make fractions of thousands of digits, slow at every step.
_MAX_AMOUNT = 10**18
_LAST_STEP = 2**63
EXAMPLES = "a number of steps, or a string such as 500st, 3ep, 0.25ep, 1e9tok, 2048sp, 90s, 30min, 1h30m"


@dataclass(frozen=True, slots=True)
class Duration:
    """A positive amount of one unit. Amounts are exact fractions."""

    value: Fraction
    unit: Unit

    @classmethod
    def parse(cls, text: int | str | Duration) -> Duration:
        """Read an int (optimizer steps) or a string with a unit.

        Raises:
            ValueError: for anything else, for zero, and for less than one whole step, sample or token.
        """
        if isinstance(text, Duration):
            return text
        # True is an int, and would be one step.
        if isinstance(text, bool) or not isinstance(text, int | str):
            raise ValueError(f"{text!r} is not a duration; expected {EXAMPLES}")
        value, unit = (Fraction(text), Unit.STEP) if isinstance(text, int) else _parse_text(text)
        if not 0 < value <= _MAX_AMOUNT:
            raise ValueError(f"{text!r} is not a duration: it must be more than zero and at most 1e18")
        if unit in (Unit.STEP, Unit.SAMPLE, Unit.TOKEN) and value.denominator != 1:
            raise ValueError(f"{text!r} is not a duration: steps, samples and tokens are whole numbers")
        if unit is Unit.RUN and value > 1:
            raise ValueError(f"{text!r} is not a duration: a share of the run is at most 1dur")
        return cls(value, unit)

    @classmethod
    def read(
        cls, key: str, value: Any, *, units: tuple[Unit, ...] = tuple(Unit), words: tuple[str, ...] = ()
    ) -> Duration:
        """The duration that a key of a config holds, which may not be null.

        Args:
            words: what the key may hold besides, for the message.

        Raises:
            ConfigError: it is not a duration, or not in one of `units`.
        """
        try:
            duration = cls.parse(value)
        except ValueError as error:
            suggestion = _suggest_duration(value)
            hint = None if suggestion is None else f"Did you mean '{suggestion}'?"
            raise ConfigError(f"{key}: {', or '.join((str(error), *words))}", location=key, hint=hint) from None
        if duration.unit not in units:
            names = ", ".join(unit.name.lower() + "s" for unit in units)
            hint = f"Write {key}={value}s." if isinstance(value, int) and units == (Unit.SECOND,) else None
            raise ConfigError(f"{key} is {value!r}, but it must be counted in {names}", location=key, hint=hint)
        return duration

    def within(self, run: Duration) -> Duration:
        """A share of the run converted to the unit of the whole run (steps may then be a fraction), or itself."""
        return Duration(self.value * run.value, run.unit) if self.unit is Unit.RUN else self

    def steps(self, steps_per_epoch: int | None) -> int | None:
        """The number of optimizer steps that reach this duration, or None if unknown."""
        if self.unit is Unit.STEP:
            return math.ceil(self.value)
        if self.unit is Unit.EPOCH and steps_per_epoch is not None:
            return math.ceil(self.value * steps_per_epoch)
        return None

    def __str__(self) -> str:
        if self.unit is Unit.SECOND:
            return f"{float(self.value):g}s"
        if self.unit is Unit.RUN:
            return f"{float(self.value):g}dur"
        number = str(self.value) if self.value.denominator == 1 else f"{float(self.value):g}"
        return f"{number} {self.unit.name.lower()}{'' if self.value == 1 else 's'}"


def _parse_text(text: str) -> tuple[Fraction, Unit]:
    """The amount and unit in a text: a number with a unit, or times such as `1h30m`.

    Raises:
        ValueError: it is neither.
    """
    stripped = text.strip()
    if match := _COUNT.fullmatch(stripped):
        number, word = match.groups()
        if word_unit := _WORDS.get(word.lower()):
            return Fraction(number), word_unit
    parts = _CLOCK.findall(stripped)
    # Joined again and compared, so that text between the parts is an error.
    is_complete = "".join(number + word_unit for number, word_unit in parts) == re.sub(r"\s+", "", stripped)
    if parts and is_complete:
        seconds = sum((Fraction(number) * _SECONDS[word_unit.lower()] for number, word_unit in parts), Fraction(0))
        return seconds, Unit.SECOND
    raise ValueError(f"{text!r} is not a duration; expected {EXAMPLES}")


def _suggest_duration(text: object) -> str | None:
    """The duration that a text with a misspelt unit means, such as `10ep` for `10 epochz`; None if it is unclear."""
    match = _COUNT.fullmatch(str(text).strip())
    units = {**_OTHER_WORDS, **{word: str(unit) for word, unit in _WORDS.items()}}
    similar = get_close_matches(match[2].lower(), units, n=1, cutoff=0.7) if match else []
    duration = f"{match[1]}{units[similar[0]]}" if match and similar else ""
    try:
        Duration.parse(duration)
    except ValueError:
        return None
    return duration


class Counts(NamedTuple):
    """The fields of `Progress` of these names."""

    epoch: int
    batch: int
    epoch_samples: int
    samples: int
    tokens: int
    seconds: float


@dataclass(slots=True, unsafe_hash=True)
class Interval:
    """A duration that repeats, counted from the start of the run.

    `steps_per_epoch` turns epochs into steps; without it only the ends of whole epochs are known. The loop that made an
    interval changes both fields if later epochs have another length. `offset` then is the number of steps by which the
    run would be further if all epochs had had the present length.
    """

    duration: Duration
    steps_per_epoch: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.duration.unit is Unit.EPOCH and self.steps_per_epoch is None and self.duration.value.denominator != 1:
            raise ValueError(
                f"{self.duration} needs to know how many steps an epoch has: "
                "the train loader has no length, so set loop.steps_per_epoch"
            )

    @property
    def steps(self) -> Fraction | None:
        """The interval in optimizer steps (a fraction for part epochs), or None if it is unknown."""
        if self.duration.unit is Unit.STEP:
            return self.duration.value
        if self.duration.unit is Unit.EPOCH and self.steps_per_epoch is not None:
            return self.duration.value * self.steps_per_epoch
        return None

    def due(self, now: Progress) -> bool:
        """Whether the step just finished reached or crossed a multiple of the interval."""
        # Before the first step nothing was crossed; 0 is a multiple of everything.
        if now.step == 0:
            return False
        # If epochs had another length before, whole epochs are counted instead of computed from the step.
        counts_epochs = self.offset and self.duration.value.denominator == 1
        if (steps := self.steps) is not None and not counts_epochs:
            step = now.step + self.offset
            return _count_intervals(step, steps) > _count_intervals(step - 1, steps)
        before, after = self._counts(now)
        return math.floor(after / self.duration.value) > math.floor(before / self.duration.value)

    def next_step(self, now: Progress) -> int:
        """The earliest step after `now` at which the interval may be due; exact if its length in steps is known."""
        if (steps := self.steps) is not None:
            return math.ceil((_count_intervals(now.step + self.offset, steps) + 1) * steps) - self.offset
        return now.step + 1

    def reached(self, now: Progress) -> bool:
        """Whether the whole duration has passed at `now`."""
        if (steps := self.steps) is not None:
            return now.step + self.offset >= steps
        return self._counts(now)[1] >= self.duration.value

    def passed(self, now: Progress) -> bool:
        """Whether the whole duration had passed one step before `now`."""
        if (steps := self.steps) is not None:
            return now.step - 1 + self.offset >= steps
        return self._counts(now)[0] >= self.duration.value

    def share(self, now: Progress) -> float:
        """The fraction of the duration that has passed at `now`."""
        if (steps := self.steps) is not None:
            return float((now.step + self.offset) / steps)
        return float(self._counts(now)[1] / self.duration.value)

    @property
    def end(self) -> int | None:
        """The step at which the whole duration has passed, or None if unknown."""
        steps = self.duration.steps(self.steps_per_epoch)
        return None if steps is None else steps - self.offset

    def _counts(self, now: Progress) -> tuple[Fraction, Fraction]:
        """The counts in the interval's unit: one step before `now`, and at `now`."""
        counter = COUNTERS[self.duration.unit]
        # Exact: the quotient of floats may fall on the other side of a multiple.
        return Fraction(getattr(now, f"last_{counter}")), Fraction(getattr(now, counter))

    def __str__(self) -> str:
        is_one = self.duration.value == 1 and self.duration.unit is not Unit.SECOND
        return f"every {str(self.duration).removeprefix('1 ') if is_one else self.duration}"


def _count_intervals(count: int, interval: Fraction) -> int:
    """Number of whole intervals in a count."""
    # Integers alone: this runs at every step, and a quotient of Fractions is slow.
    return count * interval.denominator // interval.numerator


def limit_batches(batches: int | None, limit: int | float | None) -> int | None:
    """Batches of an epoch under `limit_train_batches`: a number, or a fraction rounded up."""
    if limit is None:
        return batches
    if isinstance(limit, float):
        if batches is None:
            raise ValueError("loop.limit_train_batches is a fraction, but the train loader has no length")
        # The text is converted: 0.1 as a float is a little above a tenth, and would be rounded up to one batch more.
        return math.ceil(batches * Fraction(str(limit)))
    return limit if batches is None else min(batches, limit)


def count_epoch_steps(epoch_batches: int | None, grad_accum_steps: int, configured: int | None) -> int | None:
    """Optimizer steps of an epoch; remaining batches at its end make one more step.

    An epoch without a known number of batches has the `configured` number of steps, which may be None.
    """
    return configured if epoch_batches is None else math.ceil(epoch_batches / grad_accum_steps)


def count_steps(
    length: Duration,
    *,
    epoch_batches: int | None,
    grad_accum_steps: int,
    steps_per_epoch: int | None,
    batch_size: int | None,
    epoch_samples: int | None,
) -> int | None:
    """Optimizer steps of a training of this length, or None if unknown."""
    epoch_steps = count_epoch_steps(epoch_batches, grad_accum_steps, steps_per_epoch)
    steps = length.steps(epoch_steps)
    if steps is not None or length.unit is not Unit.SAMPLE:
        return steps
    if epoch_steps is None or batch_size is None or epoch_samples is None or epoch_batches is None:
        return None
    # The last batch of an epoch may be smaller, and a limit on batches may end the epoch earlier.
    used_samples = min(epoch_samples, epoch_batches * batch_size)
    epochs, remaining_samples = divmod(int(length.value), used_samples)
    return epochs * epoch_steps + math.ceil(remaining_samples / (batch_size * grad_accum_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The counts of each future step, in every unit that is known."""

    start: Progress = field(default_factory=Progress)
    grad_accum_steps: int = 1
    epoch_batches: int | None = None
    """Batches of an epoch; None if the train loader has no length."""
    steps_per_epoch: int | None = None
    """Optimizer steps of an epoch, from the config where the loader has no length."""
    batch_size: int | None = None
    epoch_samples: int | None = None
    """Samples of the whole dataset."""
    step_tokens: float | None = None
    step_time_s: float | None = None

    def knows(self, interval: Interval) -> bool:
        """Whether it is known when an interval is due."""
        knows_unit = {
            Unit.STEP: True,
            Unit.EPOCH: self.epoch_batches is not None,
            Unit.SAMPLE: self._knows_samples,
            Unit.TOKEN: self.step_tokens is not None,
            Unit.SECOND: self.step_time_s is not None,
        }
        return interval.steps is not None or knows_unit[interval.duration.unit]

    def at(self, step: int) -> Progress:
        """All counts at the end of a step; unknown ones stay as at the start."""
        # The `last_*` counts of the start are those of an earlier step, which cannot be computed.
        if step == self.start.step:
            return self.start
        before, now = self._counts(step - 1), self._counts(step)
        return Progress(
            step, *now, last_samples=before.samples, last_tokens=before.tokens, last_seconds=before.seconds,
            last_epoch=before.epoch,
        )  # fmt: skip

    def next_due(self, interval: Interval, after: int) -> int | None:
        """The earliest step after this one at which an interval is due; None if unknown."""
        if not self.knows(interval):
            return None
        if interval.steps is not None:
            return interval.next_step(self.at(after))
        count, length = attrgetter(COUNTERS[interval.duration.unit]), interval.duration.value
        multiple = (math.floor(Fraction(count(self._counts(after))) / length) + 1) * length
        # Compared many times: an int is faster than a Fraction.
        target = multiple.numerator if multiple.denominator == 1 else multiple
        return find_first_step(lambda step: count(self._counts(step)) >= target, after + 1)

    def process_s(self, step: int) -> float:
        """Seconds that this process has run, as far as they are known."""
        return (step - self.start.step) * (self.step_time_s or 0.0)

    @property
    def _knows_samples(self) -> bool:
        """Whether the samples of each step are known."""
        return self.epoch_batches is not None and self.batch_size is not None and self.epoch_samples is not None

    def _counts(self, step: int) -> Counts:
        """The counts at the end of a step from the start on; those of an unknown unit stay as at the start."""
        steps, start = step - self.start.step, self.start
        tokens = start.tokens + int(steps * (self.step_tokens or 0))
        seconds = start.seconds + steps * (self.step_time_s or 0.0)
        if self.epoch_batches is None:
            per_epoch = self.steps_per_epoch
            epoch = start.epoch if per_epoch is None else step // per_epoch
            return Counts(epoch, 0, 0, start.samples, tokens, seconds)
        # The first epoch began before `start`; its remaining batches are fewer than those of the others.
        first_batches = self.epoch_batches - start.batch
        first_steps = math.ceil(first_batches / self.grad_accum_steps)
        if steps < first_steps:
            batches = steps * self.grad_accum_steps
            consumed = self._count_samples(start.epoch_samples, batches)
            position = start.epoch, start.batch + batches, start.epoch_samples + consumed
            return Counts(*position, start.samples + consumed, tokens, seconds)
        steps_per_epoch = math.ceil(self.epoch_batches / self.grad_accum_steps)
        whole_epochs, last_steps = divmod(steps - first_steps, steps_per_epoch)
        batches = last_steps * self.grad_accum_steps
        consumed = self._count_samples(0, batches)
        samples = start.samples + self._count_samples(start.epoch_samples, first_batches)
        samples += whole_epochs * self._count_samples(0, self.epoch_batches) + consumed
        return Counts(start.epoch + 1 + whole_epochs, batches, consumed, samples, tokens, seconds)

    def _count_samples(self, offset: int, batches: int) -> int:
        """Samples in a number of batches that begin at sample `offset` of an epoch."""
        if self.batch_size is None or self.epoch_samples is None:
            return 0
        return max(0, min(self.epoch_samples - offset, batches * self.batch_size))


def find_first_step(holds: Callable[[int], bool], low: int) -> int | None:
    """The first step from `low` on at which a monotonic condition holds; None if it never does."""
    # Double the range until it contains the step, then bisect: about 2 * log2(step) calls.
    length = 1
    while not holds(low + length - 1):
        length *= 2
        if length > _LAST_STEP:
            return None
    first, last = low, low + length - 1
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if holds(middle) else (middle + 1, last)
    return first
