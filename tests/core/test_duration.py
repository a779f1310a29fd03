"""Durations: what can be written, what is refused, and what each comes to in steps."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from trainer_cli.core.intervals import Duration, Unit


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        (500, 500, Unit.STEP),
        ("500", None, None),
        ("500st", 500, Unit.STEP),
        ("1 step", 1, Unit.STEP),
        ("3ep", 3, Unit.EPOCH),
        ("0.25ep", Fraction(1, 4), Unit.EPOCH),
        ("0.1 epochs", Fraction(1, 10), Unit.EPOCH),
        ("1e9tok", 10**9, Unit.TOKEN),
        ("1.5e3 Tokens", 1500, Unit.TOKEN),
        ("2048sp", 2048, Unit.SAMPLE),
        ("90s", 90, Unit.SECOND),
        ("0.5s", Fraction(1, 2), Unit.SECOND),
        ("30min", 1800, Unit.SECOND),
        ("1h30m", 5400, Unit.SECOND),
        ("1d 2h", 93600, Unit.SECOND),
        ("0.25dur", Fraction(1, 4), Unit.RUN),
        ("1 dur", 1, Unit.RUN),
        ("1.5dur", None, None),
        ("0dur", None, None),
        ("", None, None),
        ("ep", None, None),
        ("0ep", None, None),
        (0, None, None),
        (-3, None, None),
        ("-3ep", None, None),
        ("1.5st", None, None),
        ("2.5sp", None, None),
        ("3 parsecs", None, None),
        ("1h30", None, None),
        ("nan ep", None, None),
        ("1e30tok", None, None),
        (True, None, None),
        (2.0, None, None),
        (None, None, None),
    ],
)
def test_a_duration_is_a_positive_exact_amount_of_a_known_unit(text: Any, value: Any, unit: Any) -> None:
    if unit is None:
        with pytest.raises(ValueError, match="is not a duration"):
            Duration.parse(text)
    else:
        assert Duration.parse(text) == Duration(Fraction(value), unit)


def test_a_duration_is_its_own_parse() -> None:
    assert Duration.parse(Duration(Fraction(3), Unit.STEP)) == Duration.parse(3)


@pytest.mark.parametrize(
    ("text", "run", "amount"),
    [
        ("0.25dur", 150, Duration(Fraction(75, 2), Unit.STEP)),
        ("0.1dur", "3ep", Duration(Fraction(3, 10), Unit.EPOCH)),
        ("1dur", "90s", Duration(Fraction(90), Unit.SECOND)),
        ("2ep", 150, Duration(Fraction(2), Unit.EPOCH)),
    ],
)
def test_a_share_is_counted_in_the_unit_of_the_run(text: str, run: Any, amount: Duration) -> None:
    assert Duration.parse(text).within(Duration.parse(run)) == amount


@pytest.mark.parametrize(
    ("text", "steps_per_epoch", "steps"),
    [
        ("7st", None, 7),
        ("2ep", 5, 10),
        ("0.25ep", 10, 3),
        ("2ep", None, None),
        ("8sp", 5, None),
        ("8tok", 5, None),
        ("8s", 5, None),
    ],
)
def test_steps_are_reported_only_where_they_can_be(text: str, steps_per_epoch: int | None, steps: int | None) -> None:
    assert Duration.parse(text).steps(steps_per_epoch) == steps


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1st", "1 step"),
        ("5ep", "5 epochs"),
        ("0.25ep", "0.25 epochs"),
        ("1h30m", "5400s"),
        ("8tok", "8 tokens"),
        ("0.25dur", "0.25dur"),
    ],
)
def test_a_duration_says_itself_in_words(text: str, said: str) -> None:
    assert str(Duration.parse(text)) == said
