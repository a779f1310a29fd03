"""Whether a mean difference is clear: an interval that may be looked at after every pair, and the verdict by it.

The interval is the confidence sequence of the t test whose effect size has a normal prior: for differences with a
normal distribution of any variance, the probability that the mean is ever outside, after whatever number of pairs, is
at most 5 %. T. L. Lai, "On confidence sequences", Annals of Statistics 4 (1976); H. Wang and A. Ramdas, "Anytime-valid
t-tests and confidence sequences for Gaussian means with unknown variance", Sequential Analysis 44 (2025). How it
behaves for other distributions is simulated by `scripts/bench/compared.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

ALPHA = 0.05
"""Most probable share of comparisons whose interval ever misses the mean."""
_PRIOR_VARIANCE = 8.0
"""Of the mean in units of the standard deviation. A larger one finds large differences earlier, small ones later."""
_MOST_EQUAL = 8
"""So many differences that are all equal count as a sample without spread. Fewer are chance: an accuracy has few
values."""


class PairedVerdict(StrEnum):
    """What B is, compared with A."""

    better = "better"
    worse = "worse"
    no_difference = "no_difference"
    not_decided = "not_decided"

    @property
    def exit_code(self) -> int:
        """The exit code of `train compare`."""
        return list(PairedVerdict).index(self)


class MeanInterval(NamedTuple):
    """The mean of some differences, and how far the true mean may be from it; infinite: nothing is known yet."""

    mean: float
    radius: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> MeanInterval:
        """The interval after these differences."""
        count = len(differences)
        mean = math.fsum(differences) / count if count else 0.0
        spread = standard_deviation(differences)
        if spread == 0 and count < _MOST_EQUAL:
            return cls(mean, math.inf)
        # |t| stays below this bound with probability 1 - ALPHA: the mixture of likelihood ratios, solved for t².
        shrunk = 1 + count * _PRIOR_VARIANCE
        ratio = (shrunk / ALPHA**2) ** (1 / max(1, count))
        if count < 2 or ratio >= shrunk:
            return cls(mean, math.inf)
        t_squared = (count - 1) * (ratio - 1) / (1 - ratio / shrunk)
        return cls(mean, spread * math.sqrt(t_squared / count))

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.radius

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.radius

    def as_dict(self) -> dict[str, float | None]:
        """The mean and the ends; null while there are none."""
        known = math.isfinite(self.radius)
        return {"mean": self.mean, "low": self.low if known else None, "high": self.high if known else None}

    def decide(self, margin: float) -> PairedVerdict:
        """The verdict: the interval lies on one side of the margin, or inside it.

        Args:
            margin: the least difference that matters.
        """
        if self.low > margin:
            return PairedVerdict.better
        if self.high < -margin:
            return PairedVerdict.worse
        # Without a margin no interval is inside it, unless all differences are zero.
        inside = -margin <= self.low and self.high <= margin
        return PairedVerdict.no_difference if inside and margin > 0 else PairedVerdict.not_decided


def standard_deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; 0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def decide_in_order(differences: Sequence[float], margin: float) -> tuple[PairedVerdict, int]:
    """The verdict after the first differences that decide, and their number; all of them if none do."""
    for count in range(1, len(differences) + 1):
        if (verdict := MeanInterval.of(differences[:count]).decide(margin)) is not PairedVerdict.not_decided:
            return verdict, count
    return PairedVerdict.not_decided, len(differences)
