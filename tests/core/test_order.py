"""The order of samples: a permutation, the same for ever, and as good as random."""

import math
from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given, strategies as st

from trainer_cli.data.order import ORDER_VERSION, sample_indices, sample_position, sample_seed

GOLDEN_SMALL = [1, 7, 3, 9, 6, 4, 5, 2, 8, 0]
GOLDEN_LARGE = [618510, 626280, 780844, 300031, 789416, 935800, 868986, 687773]
GOLDEN_SEEDS = [17435949255671970386, 6879203281744459190]
SEEDS = st.integers(0, 2**64 - 1)


@given(SEEDS, st.integers(0, 1000), st.integers(1, 300))
def test_an_epoch_visits_every_sample_once(seed: int, epoch: int, length: int) -> None:
    assert sorted(sample_indices(seed, epoch, 0, length, length)) == list(range(length))


def test_an_epoch_of_a_large_dataset_visits_every_sample_once() -> None:
    for length in (1023, 1024, 1025, 4096, 40_001):
        assert sorted(sample_indices(3, 1, 0, length, length)) == list(range(length))


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 10**15), st.data())
def test_any_position_is_known_without_those_before(seed: int, epoch: int, length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1))
    stop = min(length, start + 5)
    indices = sample_indices(seed, epoch, start, stop, length)
    alone = [sample_indices(seed, epoch, position, position + 1, length) for position in range(start, stop)]
    assert alone == [[index] for index in indices]
    assert all(0 <= index < length for index in indices)
    assert len(set(indices)) == len(indices)


def test_order_and_seeds_are_what_they_were_when_this_version_was_made() -> None:
    assert ORDER_VERSION == "feistel-1"
    assert sample_indices(0, 0, 0, 10, 10) == GOLDEN_SMALL
    assert sample_indices(7, 3, 100, 108, 1_000_003) == GOLDEN_LARGE
    assert [sample_seed(0, 0, 0), sample_seed(7, 3, 1437)] == GOLDEN_SEEDS


@pytest.mark.parametrize("length", [1, 2, 7, 1000, 1024, 5003])
def test_the_position_of_an_index_is_the_inverse_of_the_order(length: int) -> None:
    order = sample_indices(3, 2, 0, length, length)
    assert [sample_position(3, 2, index, length) for index in order] == list(range(length))
    with pytest.raises(IndexError):
        sample_position(3, 2, length, length)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(sample_indices(seed, epoch, 0, 50, 50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_positions_outside_the_length_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="10 samples"):
        sample_indices(0, 0, start, stop, 10)


def test_an_empty_range_is_empty() -> None:
    assert sample_indices(0, 0, 0, 0, 0) == []
    assert sample_indices(0, 0, 10, 10, 10) == []


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_permutation_of_a_few_samples_is_equally_likely(length: int) -> None:
    epochs = 6000
    seen = Counter(tuple(sample_indices(11, epoch, 0, length, length)) for epoch in range(epochs))
    expected = epochs / math.factorial(length)
    counts = [seen[order] for order in permutations(range(length))]
    assert _deviation(counts, expected, math.factorial(length) - 1) < 4


@pytest.mark.parametrize(("length", "epochs"), [(10, 4000), (37, 2000), (100, 1000), (1100, 30)])
def test_neither_positions_nor_neighbours_show_a_pattern(length: int, epochs: int) -> None:
    cells = 10 if length % 10 == 0 else length
    places: Counter[tuple[int, int]] = Counter()
    steps: Counter[int] = Counter()
    for epoch in range(epochs):
        order = sample_indices(5, epoch, 0, length, length)
        for position, index in enumerate(order):
            places[position * cells // length, index * cells // length] += 1
        steps.update((after - before) % length for before, after in pairwise(order))
    counts = [places[row, column] for row in range(cells) for column in range(cells)]
    assert _deviation(counts, epochs * length / cells**2, (cells - 1) ** 2) < 4
    counts = [steps[step] for step in range(1, length)]
    assert _deviation(counts, epochs, length - 2) < 4


def test_seeds_of_an_epoch_are_distinct_and_balanced() -> None:
    seeds = [sample_seed(1, 2, index) for index in range(20_000)]
    assert len(set(seeds)) == len(seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 19_990
    for bit in range(64):
        assert abs(sum(seed >> bit & 1 for seed in seeds) - 10_000) < 400


def test_seeds_of_other_epochs_and_runs_do_not_overlap() -> None:
    seeds = {sample_seed(s, epoch, index) for s in range(10) for epoch in range(10) for index in range(100)}
    assert len(seeds) == 10_000


def _deviation(counts: list[int], expected: float, freedom: int) -> float:
    """How many standard deviations chi-square lies above what chance gives."""
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    return (chi_square - freedom) / math.sqrt(2 * freedom)
