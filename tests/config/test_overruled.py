"""An option that the command line chooses has an effect, or is a mistake that names what takes it away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_cli.config.compose import compose
from trainer_cli.errors import ConfigError

EXPERIMENT = """# @package _global_
model:
  _target_: mine.Net
  width: 3
optimizer:
  _target_: torch.optim.AdamW
  lr: 0.05
precision:
  dtype: bf16
loop:
  max_duration: 4
"""


@pytest.fixture(autouse=True)
def _experiment(project: Path, write: Callable[[str, str], Path]) -> None:
    write("experiment/own.yaml", EXPERIMENT)


@pytest.mark.parametrize(
    ("choice", "key", "line"),
    [
        ("optimizer=adam", "optimizer._target_ to torch.optim.AdamW", 6),
        ("model=cnn", "model._target_ to mine.Net", 3),
        ("precision=fp16", "precision.dtype to bf16", 9),
    ],
)
@pytest.mark.parametrize("experiment", ["experiment=own", "+experiment=own"])
def test_a_choice_that_the_experiment_writes_over_is_a_mistake(
    experiment: str, choice: str, key: str, line: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([experiment, choice])
    said = str(caught.value)
    assert said.startswith(f"{choice} has no effect: configs/experiment/own.yaml:{line} sets {key} (command line). ")
    assert said.count("\n") == 0, "what is wrong with the mixture is reported too"


def test_several_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"2 mistakes:\n  - optimizer=adam .*\n  - model=mlp "):
        compose(["+experiment=own", "optimizer=adam", "model=mlp"])


@pytest.mark.parametrize(
    "choices",
    [
        ["optimizer=adamw"],
        ["precision=bf16"],
        ["scheduler=warmup_cosine"],
        ["optimizer=adam", "optimizer._target_=torch.optim.Adam"],
        ["~scheduler"],
        ["scheduler=null"],
    ],
    ids=" ".join,
)
def test_a_choice_that_shows_passes_though_the_experiment_changes_it(choices: list[str]) -> None:
    assert compose(["+experiment=own", *choices]).config.loop.max_duration == 4


def test_values_of_a_chosen_option_may_be_changed_by_the_experiment() -> None:
    config = compose(["+experiment=small", "optimizer=sgd"]).config
    assert (config.optimizer["_target_"], config.optimizer["lr"]) == ("torch.optim.SGD", 0.5)
