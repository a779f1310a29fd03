"""Blocks of the order: the same numbers as those of `core.order`, computed one by one."""

import pytest

from trainer_cli.data.order import sample_indices, sample_seeds
from trainer_cli.data.sample_order import BLOCK, OrderInBlocks


@pytest.mark.parametrize("length", [1, 2, 23, 1023, 1024, 1025, 5000, 1_000_003, 10**12 + 7])
def test_blocks_hold_the_published_order_and_seeds(length: int) -> None:
    order = OrderInBlocks(seed := 7, length, shuffle=True)
    starts = {0, length // 2, max(0, length - 40), min(length, BLOCK - 5), max(0, length // BLOCK * BLOCK - 5)}
    for epoch in (0, 3):
        for start in starts:
            stop = min(start + 40, length)
            indices = sample_indices(seed, epoch, start, stop, length)
            assert order.read(epoch, start, stop) == (indices, sample_seeds(seed, epoch, indices))


def test_a_batch_may_be_larger_than_a_block() -> None:
    assert OrderInBlocks(-1, 5000, shuffle=True).read(2, 700, 4000)[0] == sample_indices(-1, 2, 700, 4000, 5000)


def test_without_shuffle_the_order_is_that_of_the_positions() -> None:
    numbers = list(range(1000, 1050))
    assert OrderInBlocks(7, 5000, shuffle=False).read(1, 1000, 1050) == (numbers, sample_seeds(7, 1, numbers))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (8, 11)])
def test_a_position_beyond_the_length_is_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="do not lie within 10 samples"):
        OrderInBlocks(0, 10, shuffle=True).read(0, start, stop)
