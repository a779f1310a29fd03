"""The claims of Composer's own tests about when checkpoints are saved."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
from composer_training import STEPS, saved_by, saver, train_loader
from peer_claims import Claim, claims, each, try_claim

import trainer_cli as tc


def check_number_of_saves(folder: Path, interval: int | str, duration: int | str, count: int) -> None:
    steps = saved_by(duration, save_interval=interval, save_final=False)
    assert len(steps) == count
    # The last interval ends with the run.
    assert {after - before for before, after in zip([0, *steps], steps, strict=False)} == {steps[0]}


def check_shares_of_the_run(folder: Path, share: str) -> None:
    """At the first step at or after each multiple, and at the last."""
    interval = Fraction(share) * 2 * STEPS
    due = {math.ceil(number * interval) for number in range(1, int(1 / Fraction(share)) + 1)}
    assert saved_by("2ep", save_interval=f"{share}dur") == sorted(due | {2 * STEPS})


def check_iterations(folder: Path) -> None:
    with pytest.raises(tc.ConfigError, match=r"save_interval.*not a duration"):
        saver(save_interval="1iter")
    assert saved_by("4ep", save_interval="2ep") == [2 * STEPS, 4 * STEPS]


def check_counted_interval(folder: Path, interval: int, unit: str, batch_size: int, length: int = 1) -> None:
    """A step is saved when its samples or tokens reach a further multiple; and the last step."""
    loader = train_loader(12, batch_size, length)
    counts = [step * batch_size * (length if unit == "tok" else 1) for step in range(12 // batch_size + 1)]
    due = {step for step in range(1, len(counts)) if counts[step] // interval > counts[step - 1] // interval}
    assert saved_by("1ep", loader, save_interval=f"{interval}{unit}") == sorted(due | {len(counts) - 1})


CLAIMS: list[Claim] = [
    *claims(
        "test_checkpoint: _assert_expected_num_checkpoints",
        check_number_of_saves,
        {
            "One for each epoch": ("1ep", "2ep", 2),
            "One for each step": ("1st", 10, 10),
            "One for every second step": ("2st", 10, 5),
        },
    ),
    *claims(
        "test_checkpoint: test_checkpoint_intervals",
        check_number_of_saves,
        {
            f"An interval of {interval} saves {count} times in {duration}": (interval, duration, count)
            for interval, duration, count in (
                ("10st", "8ep", 4),
                ("1ep", "4ep", 4),
                ("1ep", "5ep", 5),
                ("2ep", "8ep", 4),
                (5, "4ep", 4),
                ("5st", "10st", 2),
                ("5st", "4ep", 4),
                ("10sp", "70sp", 7),
            )
        },
    ),
    *claims(
        "test_checkpoint: test_checkpoint_intervals, fractions",
        check_shares_of_the_run,
        {f"An interval may be {share} of the run": (share,) for share in ("0.01", "0.05", "0.10", "0.25", "0.35")},
    ),
    *claims(
        "test_checkpoint: test_checkpoint_intervals, iterations",
        check_iterations,
        {"An interval may be a group of epochs": ()},
        difference="No unit is a group of epochs: it is refused by name, and a number of epochs does the same.",
    ),
    *claims(
        "test_checkpoint: test_checkpoint_save_sample_interval",
        check_counted_interval,
        {
            f"Every {interval} samples, in batches of {batch_size}": (interval, "sp", batch_size)
            for interval in (1, 4, 5)
            for batch_size in (1, 4)
        },
    ),
    *claims(
        "test_checkpoint: test_checkpoint_save_token_interval",
        check_counted_interval,
        {
            f"Every {interval} tokens, in batches of {batch_size} sequences of {length}": (
                interval,
                "tok",
                batch_size,
                length,
            )
            for interval in (1, 64, 65)
            for batch_size in (1, 4)
            for length in (1, 16)
        },
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
