"""Whether a mean difference is clear: an interval that may be looked at after every pair, and the verdict by it.

The interval is the confidence sequence of the t test whose effect size has a normal prior: for differences with a
normal distribution of any variance, the probability that the mean is ever outside, after whatever number of pairs, is
at most 5 %. T. L. Lai, "On confidence sequences", Annals of Statistics 4 (1976); H. Wang and A. Ramdas, "Anytime-valid
t-tests and confidence sequences for Gaussian means with unknown variance", Sequential Analysis 44 (2025).

Of a skewed distribution the mean is most often missed on the side of its longer tail, of which few pairs show little.
The interval is wider on that side, by the skewness of the sample. There is no proof of how often it errs then:
`scripts/bench/compared.py` simulates it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

ALPHA = 0.05
"""Most probable share of comparisons whose interval ever misses the mean."""
_PRIOR_VARIANCE = 2.0
"""Of the mean in units of the standard deviation. A larger one finds large differences earlier, small ones later, and
errs more often for skewed differences."""
_SKEWNESS_WEIGHT = 5.0
"""By how much the side of the longer tail is wider, as a multiple of the skewness of the mean. With it, 5 % hold for
exponential differences."""
_MOST_EQUAL = 8
"""So many differences that are all equal count as a sample without spread. Fewer are chance: an accuracy has few
values."""
_ROUNDING = 1e-4
"""A smaller spread, as a share of the mean difference, may be that of rounded metrics."""


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
    """The mean of some differences, and the ends of the interval; infinite ones: nothing is known yet."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> MeanInterval:
        """The interval after these differences."""
        count = len(differences)
        mean = math.fsum(differences) / count if count else 0.0
        spread = standard_deviation(differences)
        if spread == 0 and count >= _MOST_EQUAL:
            return cls(mean, mean, mean)
        # |t| stays below this bound with probability 1 - ALPHA: the mixture of likelihood ratios, solved for t².
        shrunk = 1 + count * _PRIOR_VARIANCE
        ratio = (shrunk / ALPHA**2) ** (1 / max(1, count))
        are_equal = spread <= _ROUNDING * abs(mean)
        if (are_equal and count < _MOST_EQUAL) or ratio >= shrunk:
            return cls(mean, -math.inf, math.inf)
        t_squared = (count - 1) * (ratio - 1) / (1 - ratio / shrunk)
        radius = spread * math.sqrt(t_squared / count)
        cubes = math.fsum(((difference - mean) / spread) ** 3 for difference in differences)
        # That of a mean is less by the root of the number of pairs.
        skewness = cubes * count / (count - 1) / (count - 2) / math.sqrt(count)
        low, high = (1 + max(0, side * _SKEWNESS_WEIGHT * skewness) for side in (-1, 1))
        return cls(mean, mean - radius * low, mean + radius * high)

    def as_dict(self) -> dict[str, float | None]:
        """The mean and the ends; null while there are none."""
        known = math.isfinite(self.low)
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
