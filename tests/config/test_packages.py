"""GROUP@PACKAGE=OPTION merges an option into the package, over experiments and recovered configs alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.config.check import to_plain
from trainer_cli.config.compose import compose, from_yaml, to_yaml
from trainer_cli.errors import ConfigError

Write = Callable[[str, str], Path]
EXPERIMENT = """# @package _global_
defaults:
  - small
  - /callbacks@callbacks.first: mine
  - /parts@param_groups.head: slow
  - _self_
"""


@pytest.fixture(autouse=True)
def _groups(project: Path, write: Write) -> None:
    write("callbacks/mine.yaml", "_target_: mine.Net\nwidth: 1\n")
    write("callbacks/other.yaml", "_target_: mine.CNN\nwidth: 2\n")
    write("parts/slow.yaml", "lr: 0.1\nweight_decay: 0.0\n")
    write("parts/fast.yaml", "lr: 9.0\n")
    write("experiment/slots.yaml", EXPERIMENT)
    write("experiment/own.yaml", "# @package _global_\nmodel: {_target_: mine.Net}\n")


MINE, OTHER = {"_target_": "mine.Net", "width": 1}, {"_target_": "mine.CNN", "width": 2}
CASES: list[tuple[list[str], str, Any]] = [
    (["+experiment=small", "+callbacks@callbacks.two=mine"], "callbacks.two", MINE),
    (["+experiment=small", "+callbacks@callbacks.two=mine", "callbacks.two.width=7"], "callbacks.two.width", 7),
    (["+experiment=slots"], "callbacks.first", MINE),
    (["+experiment=slots", "callbacks@callbacks.first=other"], "callbacks.first", OTHER),
    (["+experiment=slots", "parts@param_groups.head=fast"], "param_groups.head", {"lr": 9.0}),
    (["+experiment=slots", "parts@param_groups.head=fast", "+callbacks@callbacks.two=other"], "callbacks.two", OTHER),
    (["+scheduler@scheduler.a=warmup_cosine", "+experiment=own"],
     "scheduler.a._target_", "trainer_cli.WarmupCosine"),
    (["+parts@param_groups.x=slow", "+experiment=small"], "param_groups.x.weight_decay", 0.0),
]  # fmt: skip


def value_at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize(("overrides", "key", "expected"), CASES, ids=str)
def test_an_option_stands_at_its_package(overrides: list[str], key: str, expected: Any) -> None:
    composed = compose(overrides, sections=())
    assert value_at(to_plain(composed.raw), key) == expected


@pytest.mark.parametrize("key", ["callbacks.two", "callbacks.first"])
def test_an_option_replaces_the_node_of_a_recovered_config(key: str) -> None:
    text = to_yaml(compose(["+experiment=slots", "callbacks.first.width=5"], sections=()))
    again = from_yaml(text, [f"+callbacks@{key}=other", "param_groups.head.lr=3"], trusted=True, sections=())
    assert value_at(to_plain(again.raw), key) == OTHER
    assert value_at(to_plain(again.raw), "param_groups.head") == {"lr": 3, "weight_decay": 0.0}
    assert again.where(f"{key}.width") == "configs/callbacks/other.yaml:2"
    assert again.where("callbacks.first.width" if key.endswith("two") else "seed").startswith("the recovered config:")


@pytest.mark.parametrize("off", ["~scheduler", "scheduler=null"])
def test_an_option_within_a_component_that_is_switched_off_is_refused(off: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=small", off, "+scheduler@scheduler.a=warmup_cosine"])
    assert str(caught.value) == (
        f"+scheduler@scheduler.a=warmup_cosine has no effect: {off} switches off what it is merged into (command "
        "line). Write its node out: 'scheduler={a: {_target_: …}}'."
    )


def test_an_option_that_an_experiment_writes_over_is_refused_with_its_package(write: Write) -> None:
    write("experiment/over.yaml", EXPERIMENT + "callbacks:\n  first: {_target_: mine.Text}\n")
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=over", "callbacks@callbacks.first=other"], sections=())
    assert str(caught.value).startswith(
        "callbacks@callbacks.first=other has no effect: configs/experiment/over.yaml:8 sets callbacks.first._target_"
    )
