"""The interval of a mean difference is right whenever it is looked at, and the verdict is that of the interval."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist, stdev

import numpy as np
import pytest

from trainer_cli.addons.compare import confidence
from trainer_cli.addons.compare.confidence import MeanInterval, PairedVerdict, decide_in_order, standard_deviation

DRAWS: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda chance: chance.gauss(),
    "heavy tails: Student's t with 5 degrees of freedom": lambda chance: (
        chance.gauss() / math.sqrt(sum(chance.gauss() ** 2 for _ in range(5)) / 5)
    ),
    "skewed metrics: the difference of two lognormal values": lambda chance: (
        math.exp(chance.gauss()) - math.exp(chance.gauss())
    ),
    "coarse accuracies: whole numbers": lambda chance: float(round(0.5 * chance.gauss())),
    "skewed differences: exponential": lambda chance: chance.expovariate(1) - 1,
    "skewed to the other side: lognormal": lambda chance: math.exp(0.125) - math.exp(0.5 * chance.gauss()),
}


def mixture_of(differences: Sequence[float], mean: float) -> float:
    """The likelihood ratio of the mixture against this mean, integrated numerically over effect size and scale."""
    x = np.array(differences) - mean
    log_scale = np.linspace(-12, 12, 801)[:, None]
    effect = np.linspace(-60, 60, 8001)[None, :]
    prior = np.exp(-(effect**2) / (2 * confidence._PRIOR_VARIANCE))

    def of(effects: np.ndarray) -> np.ndarray:
        scale = np.exp(log_scale)
        squares = (x**2).sum() / scale**2 - 2 * x.sum() / scale * effects + len(x) * effects**2
        density: np.ndarray = np.exp(-squares / 2 - len(x) * log_scale).sum(axis=0)
        return density

    alternative = sum(
        float((of(effect[:, part]) * prior[0, part]).sum()) for part in np.array_split(np.arange(effect.size), 50)
    )
    return float(alternative / prior.sum() / of(np.zeros((1, 1)))[0])


@pytest.mark.parametrize("differences", [(1.0, 1.2, 1.4, 1.6), (-0.3, 0.1, 0.2, 0.4, 0.5, 0.9)])
def test_the_ends_of_the_interval_are_where_the_mixture_of_likelihood_ratios_is_20(
    differences: tuple[float, ...],
) -> None:
    # Their skewness is 0, up to rounding.
    interval = MeanInterval.of(differences)
    for end in (interval.low, interval.high):
        assert mixture_of(differences, end) == pytest.approx(1 / confidence.ALPHA, rel=0.01)


def test_the_interval_is_wider_on_the_side_of_the_longer_tail_by_the_skewness() -> None:
    differences = np.array([0.1, 0.2, 0.4, 0.3, 1.5, 0.2])
    moments = [((differences - differences.mean()) ** power).mean() for power in (2, 3)]
    # That of Fisher and Pearson, adjusted to the size of the sample.
    skewness = math.sqrt(6 * 5) / 4 * moments[1] / moments[0] ** 1.5
    mean, low, high = MeanInterval.of(differences.tolist())
    assert (high - mean) / (mean - low) == pytest.approx(1 + 5 * skewness / math.sqrt(6))
    assert MeanInterval.of((-differences).tolist()) == pytest.approx((-mean, -high, -low))


@pytest.mark.parametrize("name", DRAWS)
def test_at_most_one_of_twenty_comparisons_of_equals_ever_finds_a_difference(name: str) -> None:
    trials, pairs = 400, 60
    chance = random.Random(name)
    wrong = 0
    for _ in range(trials):
        verdict, _ = decide_in_order([DRAWS[name](chance) for _ in range(pairs)], 0.0)
        wrong += verdict is not PairedVerdict.not_decided
    # Two standard errors of such a share above it.
    assert wrong / trials <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / trials)


@pytest.mark.parametrize(("effect", "pairs", "least"), [(10.0, 6, 0.95), (2.0, 12, 0.85), (1.0, 22, 0.7)])
def test_a_difference_that_is_there_is_found(effect: float, pairs: int, least: float) -> None:
    chance = random.Random(3)
    found = [decide_in_order([effect + chance.gauss() for _ in range(pairs)], 0.0)[0] for _ in range(300)]
    assert found.count(PairedVerdict.better) / len(found) >= least
    assert found.count(PairedVerdict.worse) == 0


def test_it_needs_more_pairs_than_a_t_test_whose_number_was_fixed_before() -> None:
    differences = [NormalDist(1, 1).inv_cdf((index + 0.5) / 12) for index in range(12)]
    fixed = 2.201 * stdev(differences) / math.sqrt(12)
    mean, low, high = MeanInterval.of(differences)
    assert fixed < mean - low < 2 * fixed
    assert fixed < high - mean < 2 * fixed


@pytest.mark.parametrize(
    ("low", "high", "margin", "verdict"),
    [
        (0.5, 1.5, 0.0, PairedVerdict.better),
        (-1.5, -0.5, 0.0, PairedVerdict.worse),
        (-0.1, 0.9, 0.0, PairedVerdict.not_decided),
        (0.5, 1.5, 0.6, PairedVerdict.not_decided),  # Better, but perhaps by less than what matters.
        (0.5, 1.5, 0.4, PairedVerdict.better),
        (-0.1, 0.3, 0.4, PairedVerdict.no_difference),
        (0.1, 0.5, 0.4, PairedVerdict.not_decided),
        (0.0, 0.0, 0.0, PairedVerdict.not_decided),  # Without a margin nothing is small enough.
        (0.0, 0.0, 0.1, PairedVerdict.no_difference),
        (-math.inf, math.inf, 0.1, PairedVerdict.not_decided),
    ],
)
def test_the_verdict_is_where_the_whole_interval_lies(
    low: float, high: float, margin: float, verdict: PairedVerdict
) -> None:
    assert MeanInterval((low + high) / 2, low, high).decide(margin) is verdict


def test_exit_codes_are_as_documented() -> None:
    assert [verdict.exit_code for verdict in PairedVerdict] == [0, 1, 2, 3]
    assert [verdict.value for verdict in PairedVerdict] == ["better", "worse", "no_difference", "not_decided"]


def test_the_first_pairs_that_decide_do_so_whatever_follows() -> None:
    clear = [1.0, 1.01, 0.99, 1.0]
    verdict, count = decide_in_order([*clear, -100.0, -100.0], 0.0)
    assert verdict is PairedVerdict.better
    assert count <= len(clear)


def test_too_few_pairs_and_few_equal_differences_decide_nothing() -> None:
    for differences in ((), (3.0,), (3.0, 3.1, 3.2), (0.5,) * 7, (0.0,) * 7):
        assert MeanInterval.of(differences)[1:] == (-math.inf, math.inf)
    assert MeanInterval.of((0.5,) * 8) == MeanInterval(0.5, 0.5, 0.5)
    # One sample of 30 more is right in each pair. The metrics are rounded, so their differences are not quite equal.
    rounded = [float(np.float32((right + 1) / 30)) - float(np.float32(right / 30)) for right in range(22, 29)]
    assert len({*rounded}) > 1
    assert MeanInterval.of(rounded)[1:] == (-math.inf, math.inf)
    assert MeanInterval.of([*rounded, rounded[0]]).low == pytest.approx(1 / 30, rel=1e-4)


def test_the_standard_deviation_is_that_of_a_sample() -> None:
    values = [0.1, 0.4, 0.35, 0.9]
    assert standard_deviation(values) == pytest.approx(stdev(values))
    assert standard_deviation([1.0]) == 0.0
