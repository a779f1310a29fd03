"""A length of training in steps, epochs, samples, tokens or time, such as `500st` or `1h30m`, or a share of the run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction


class Unit(StrEnum):
    """What a duration counts."""

    STEP = "st"
    EPOCH = "ep"
    SAMPLE = "sp"
    TOKEN = "tok"
    SECOND = "s"
    RUN = "dur"
    """Shares of `loop.max_duration`."""


_WORDS = {
    "st": Unit.STEP, "step": Unit.STEP, "steps": Unit.STEP,
    "ep": Unit.EPOCH, "epoch": Unit.EPOCH, "epochs": Unit.EPOCH,
    "sp": Unit.SAMPLE, "sample": Unit.SAMPLE, "samples": Unit.SAMPLE,
    "tok": Unit.TOKEN, "token": Unit.TOKEN, "tokens": Unit.TOKEN,
    "dur": Unit.RUN,
}  # fmt: skip
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1, "sec": 1}
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d{1,3})?)\s*([a-z]+)", re.IGNORECASE)
_CLOCK = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|sec|s)", re.IGNORECASE)
_LARGEST = 10**18
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
        if isinstance(text, bool) or not isinstance(text, int | str):
            raise ValueError(f"{text!r} is not a duration; expected {EXAMPLES}")
        value, unit = (Fraction(text), Unit.STEP) if isinstance(text, int) else _read(text)
        if not 0 < value <= _LARGEST:
            raise ValueError(f"{text!r} is not a duration: it must be more than zero and at most 1e18")
        if unit in (Unit.STEP, Unit.SAMPLE, Unit.TOKEN) and value.denominator != 1:
            raise ValueError(f"{text!r} is not a duration: steps, samples and tokens are whole numbers")
        if unit is Unit.RUN and value > 1:
            raise ValueError(f"{text!r} is not a duration: a share of the run is at most 1dur")
        return cls(value, unit)

    def within(self, run: Duration) -> Duration:
        """The same in the unit of the whole run, if it is a share of the run; steps may then be a fraction."""
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
        name = {Unit.STEP: "step", Unit.EPOCH: "epoch", Unit.SAMPLE: "sample", Unit.TOKEN: "token"}[self.unit]
        return f"{number} {name}{'' if self.value == 1 else 's'}"


def _read(text: str) -> tuple[Fraction, Unit]:
    stripped = text.strip()
    if match := _COUNT.fullmatch(stripped):
        number, word = match.groups()
        if unit := _WORDS.get(word.lower()):
            return Fraction(number), unit
    parts = _CLOCK.findall(stripped)
    if parts and "".join(n + u for n, u in parts) == re.sub(r"\s+", "", stripped):
        return sum((Fraction(n) * _SECONDS[u.lower()] for n, u in parts), Fraction(0)), Unit.SECOND
    raise ValueError(f"{text!r} is not a duration; expected {EXAMPLES}")
