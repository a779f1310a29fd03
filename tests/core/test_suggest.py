"""Which name is nearest to a misspelt one."""

from __future__ import annotations

import pytest

from trainer_cli.core.patterns import did_you_mean, nearest


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
    assert nearest(word, choices) == ours
    assert nearest(word, ["elsewhere.entirely"]) is None
