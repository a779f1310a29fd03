"""Globs with alternatives."""

from __future__ import annotations

import pytest

from trainer_cli.core.patterns import alternatives, matches


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("step*", ["step*"]),
        ("step{1,2}", ["step1", "step2"]),
        ("{a,b}/{c,d}", ["a/c", "a/d", "b/c", "b/d"]),
        ("{a,b{c,d}}", ["a", "bc", "a", "bd"]),
        ("{single}", ["{single}"]),
        ("open{a,b", ["open{a,b"]),
    ],
)
def test_a_pattern_stands_for_its_alternatives(pattern: str, expected: list[str]) -> None:
    assert list(alternatives(pattern)) == expected


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("blocks.0.norm_1.weight", "*{norm,bias}*", True),
        ("blocks.0.mlp.out.bias", "*{norm,bias}*", True),
        ("blocks.0.mlp.out.weight", "*{norm,bias}*", False),
        ("Norm.weight", "*norm*", False),
    ],
)
def test_a_name_matches_one_of_them(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected
