"""Hyperparameters: what a config sets, flat, without secrets and without what does not change the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trainer_cli.config.compose import compose
from trainer_cli.config.diff import hparams


def test_values_that_differ_from_the_defaults_are_named_by_their_keys(project: Path) -> None:
    found = hparams(compose(["experiment=small", "seed=3", "name=other", "checkpoint.save_interval=7"]).raw)
    assert {key: found.get(key) for key in ("model._target_", "model.channels", "optimizer.lr", "seed")} == {
        "model._target_": "mine.CNN", "model.channels": 8, "optimizer.lr": 0.5, "seed": 3,
    }  # fmt: skip
    assert found["loop.max_duration"] == "3ep"
    assert not [
        key for key in found if key.partition(".")[0] in ("name", "run_dir", "checkpoint", "loggers", "logging")
    ]
    assert "seed" not in hparams(compose(["experiment=small", "seed=0"]).raw), "a default"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 0.5), (True, True), ("text", "text"), ([1, 2], "[1, 2]"), (float("inf"), "inf"), ([], "[]"),
        (None, None), ("${seed}", None), ("a ${oc.env:SECRET}", None), (["${oc.env:SECRET}"], None),
    ],
)  # fmt: skip
def test_lists_are_texts_and_nulls_and_references_are_left_out(value: object, expected: object) -> None:
    assert hparams(OmegaConf.create({"model": {"a": {"b": value}}})).get("model.a.b") == expected
