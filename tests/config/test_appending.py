"""`key+=value`: what is added to which list, in what order, and where that is said to come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainer_cli.config import override_values
from trainer_cli.config.compose import compose, from_yaml, to_yaml
from trainer_cli.config.overrides import Append, parse_overrides

STEPS = "checkpoint.fixed_steps"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ([f"{STEPS}+=2"], [f"{STEPS}+=2"]),
        ([f"{STEPS}=[1]", f"{STEPS}+=2"], [f"{STEPS}+=2"]),
        ([f"{STEPS}+=2", f"{STEPS}=[1]"], []),
        ([f"{STEPS}+=2", f"{STEPS}=[1]", f"{STEPS}+=3"], [f"{STEPS}+=3"]),
        ([f"{STEPS}+=2", "checkpoint={fixed_steps:[1]}"], []),
        ([f"{STEPS}+=2", "checkpoint={max_checkpoints:1}"], [f"{STEPS}+=2"]),
        ([f"{STEPS}+=2", f"~{STEPS}"], []),
        ([f"{STEPS}+=2", "checkpoint.max_checkpoints=1"], [f"{STEPS}+=2"]),
    ],
)
def test_what_is_set_later_takes_the_place_of_what_was_added(arguments: list[str], kept: list[str]) -> None:
    assert [append.line for append in parse_overrides(arguments).appends] == kept


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a.list+=3", [1, 2, 3]),
        ("a.list+=[3,4]", [1, 2, 3, 4]),
        ("a.list+=[[3]]", [1, 2, [3]]),
        ("a.list+={x: 1}", [1, 2, {"x": 1}]),
        ("a.list+='3'", [1, 2, "3"]),
        ("a.list+=null", [1, 2, None]),
    ],
)
def test_a_value_goes_to_the_end_and_a_list_item_by_item(argument: str, expected: list[Any]) -> None:
    values: dict[str, Any] = {"a": {"list": [1, 2]}}
    (append,) = parse_overrides([argument]).appends
    assert override_values.append(values, append) is None
    assert values["a"]["list"] == expected


def test_null_begins_a_list_and_a_list_in_a_list_is_found_by_its_number() -> None:
    values: dict[str, Any] = {"none": None, "deep": [{"inner": [1]}, [2]]}
    for path in (("none",), ("deep", "0", "inner"), ("deep", "1")):
        assert override_values.append(values, Append(path, [9], "")) is None
    assert values == {"none": [9], "deep": [{"inner": [1, 9]}, [2, 9]]}


def test_lists_of_sections_and_of_components_grow(project: Path) -> None:
    composed = compose([f"{STEPS}=[1]", f"{STEPS}+=2", f"{STEPS}+=[3]", "model.hidden+=32", "trust+=json"])
    assert composed.config.checkpoint.fixed_steps == [1, 2, 3]
    assert composed.config.model["hidden"] == [64, 32]
    assert composed.config.trust == ["json"]
    assert composed.where(STEPS) == composed.where("model.hidden") == "command line"


def test_a_recovered_list_grows(project: Path) -> None:
    text = to_yaml(compose([f"{STEPS}=[1]"]))
    assert from_yaml(text, [f"{STEPS}+=2"]).config.checkpoint.fixed_steps == [1, 2]
    assert from_yaml(text, ["model=mlp", "model.hidden+=8", f"{STEPS}=[5]"]).config.model["hidden"] == [64, 8]


def test_an_experiments_list_grows(project: Path, write: Callable[[str, str], Path]) -> None:
    write("experiment/listed.yaml", "# @package _global_\ncheckpoint:\n  fixed_steps: [10]\n")
    assert compose(["experiment=listed", f"{STEPS}+=20"]).config.checkpoint.fixed_steps == [10, 20]


def test_checkpoints_add_up() -> None:
    line = parse_overrides(["ckpt=a", "ckpt+=b*"])
    assert line.ckpt == ["a", "b*"]


@pytest.mark.parametrize(
    ("line", "section", "expected"),
    [
        ("scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}", "scheduler",
         {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3}),
        ("data={batch_size: 7}", "data", {"_target_": "mine.Digits", "batch_size": 7}),
        ("callbacks={es: {_target_: mine.Net}}", "callbacks", {"es": {"_target_": "mine.Net"}}),
    ],
)  # fmt: skip
def test_a_mapping_for_a_group_sets_its_values(
    line: str, section: str, expected: dict[str, Any], project: Path
) -> None:
    raw = compose([line, "data=digits"] if section != "data" else ["data=digits", line]).raw
    assert OmegaConf.to_container(raw[section]) == expected
