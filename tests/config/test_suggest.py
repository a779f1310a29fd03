"""Which name is nearest to a misspelt one."""

from __future__ import annotations

import pytest

from trainer_cli.config.suggest import did_you_mean, nearest


@pytest.mark.parametrize(
    ("word", "choices", "expected"),
    [
        ("adamv", ["adamw", "sgd"], "adamw"),
        ("experimant", ["experiment", "name"], "experiment"),
        ("LR", ["lr", "eps"], "lr"),
        ("max-duration", ["max_duration"], "max_duration"),
        ("zebra", ["adamw", "sgd"], None),
        ("x", [], None),
    ],
)
def test_the_nearest_name_is_the_one_a_person_meant(word: str, choices: list[str], expected: str | None) -> None:
    assert nearest(word, choices) == expected


def test_without_a_near_name_nothing_is_suggested() -> None:
    assert did_you_mean("zebra", ["sgd"]) == ""
    assert did_you_mean("sdg", ["sgd"]) == " Did you mean 'sgd'?"
