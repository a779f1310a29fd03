"""Globs with alternatives, and which name is nearest to a misspelt one."""

from __future__ import annotations

import pytest

from trainer_cli.patterns import did_you_mean, expand_braces, find_nearest, matches


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
    assert list(expand_braces(pattern)) == expected


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
    assert find_nearest(word, choices) == expected


def test_without_a_near_name_nothing_is_suggested() -> None:
    assert did_you_mean("zebra", ["sgd"]) == ""
    assert did_you_mean("sdg", ["sgd"]) == " Did you mean 'sgd'?"


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("loop.max_steps", "loop.max_duration"),
        ("loop.max_epochs", "loop.max_duration"),
        ("loop.accumulate_grad_batches", "loop.grad_accum_steps"),
        ("checkpoint.save_total_limit", "checkpoint.max_checkpoints"),
        ("precision.max_grad_norm", "precision.clip_norm"),
        ("optimizer.learning_rate", "optimizer.lr"),
    ],
)
def test_what_other_trainers_call_it_is_known(word: str, ours: str) -> None:
    section = word.partition(".")[0]
    choices = [
        f"{section}.{name}"
        for name in ("max_time", "max_duration", "grad_accum_steps", "max_checkpoints", "clip_norm", "lr", "eval_steps")
    ]
    assert find_nearest(word, choices) == ours
    assert find_nearest(word, ["elsewhere.entirely"]) is None
