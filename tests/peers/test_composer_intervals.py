"""The claims of Composer's own tests about when checkpoints are saved."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from composer_training import STEPS, saved_by, saver, train_loader

import trainer_cli as tc


@pytest.mark.parametrize("share", ["0.01", "0.25", "0.35"])
def test_an_interval_may_be_a_share_of_the_run(share: str) -> None:
    """At the first step at or after each multiple, and at the last."""
    interval = Fraction(share) * 2 * STEPS
    due = {math.ceil(number * interval) for number in range(1, int(1 / Fraction(share)) + 1)}
    assert saved_by("2ep", save_interval=f"{share}dur") == sorted(due | {2 * STEPS})


def test_a_group_of_epochs_is_no_unit() -> None:
    with pytest.raises(tc.ConfigError, match=r"save_interval.*not a duration"):
        saver(save_interval="1iter")
    assert saved_by("4ep", save_interval="2ep") == [2 * STEPS, 4 * STEPS]


@pytest.mark.parametrize(
    ("interval", "unit", "batch_size", "length"),
    [
        (1, "sp", 4, 1),
        (4, "sp", 1, 1),
        (5, "sp", 4, 1),
        (1, "tok", 1, 1),
        (64, "tok", 1, 16),
        (64, "tok", 4, 16),
        (65, "tok", 1, 16),
        (65, "tok", 4, 16),
    ],
)
def test_samples_and_tokens_count_saves(interval: int, unit: str, batch_size: int, length: int) -> None:
    """A step is saved when its samples or tokens reach a further multiple; and the last step."""
    loader = train_loader(12, batch_size, length)
    counts = [step * batch_size * (length if unit == "tok" else 1) for step in range(12 // batch_size + 1)]
    due = {step for step in range(1, len(counts)) if counts[step] // interval > counts[step - 1] // interval}
    assert saved_by("1ep", loader, save_interval=f"{interval}{unit}") == sorted(due | {len(counts) - 1})
