"""Provenance: the place that is named for a value really is what set it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from omegaconf import OmegaConf

from trainer_cli.config import override_values
from trainer_cli.config.composing import Composed, compose, from_yaml
from trainer_cli.config.overrides import read_overrides
from trainer_cli.config.search_path import SearchPath, addon_folders
from trainer_cli.config.tree import DEFAULT, ConfigTree, Node, merge
from trainer_cli.config.yaml import read_text
from trainer_cli.keys.config_keys import defaults

Write = Callable[[str, str], Path]
SHIPPED = Path(__file__).parents[2] / "configs"
EXPERIMENTS = list(SearchPath([SHIPPED, *addon_folders()], SHIPPED, SHIPPED, "").options("experiment"))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    else:
        yield path, value


def origin(composed: Composed, key: str) -> str:
    return str(composed.tree.exact(tuple(key.split("."))))


def line_at(place: str, folder: Path) -> str:
    file, _, number = place.rpartition(":")
    return (folder / file).read_text().splitlines()[int(number) - 1]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_line_that_is_named_for_a_shipped_experiment_holds_that_key_and_value(name: str) -> None:
    composed = compose([f"experiment={name}"], cwd=SHIPPED.parent, missing_ok=True)
    standard = dict(leaves(defaults()))
    named = 0
    for path, value in leaves(composed.raw):
        said = composed.tree.exact(path)
        if said.source == DEFAULT:
            assert value == standard[path]
        elif said.words:
            assert path == ("name",) or value in (None, {})
        else:
            line = OmegaConf.to_container(OmegaConf.create(line_at(said.source, SHIPPED.parent).strip()))
            assert (path[-1], value) in [(key[-1], found) for key, found in leaves(line)]
            named += 1
    assert named > 20


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_line_that_is_named_for_a_choice_of_a_shipped_experiment_makes_it(name: str) -> None:
    composed = compose([f"experiment={name}"], cwd=SHIPPED.parent, missing_ok=True)
    assert str(composed.tree.choices["experiment",].origin) == f"command line: experiment={name}"
    for section in ("model", "data", "optimizer", "scheduler", "precision", "checkpoint", "loggers"):
        choice = composed.tree.choices[section,]
        group, _, option = choice.origin.words.partition("=")
        assert group == section
        assert f"{group}: {option}" in line_at(choice.origin.source, SHIPPED.parent)
        assert choice.label.endswith(f"configs/{group}/{option}.yaml")
        assert (SHIPPED.parent / choice.label).is_file()


RICH = {
    "config.yaml": (
        "defaults:\n  - train_schema\n  - model: mlp\n  - data: digits\n  - _self_\n  - optimizer: late\n"
        "  - scheduler: null\n  - checkpoint: default\nseed: 1\nmodel:\n  hidden: 2\noptimizer:\n  lr: 3\n"
    ),
    "model/mlp.yaml": "_target_: mine.MLP\nhidden: 4\nwidth: 5\ndepth: 6\n",
    "model/cnn.yaml": "_target_: mine.CNN\nchannels: 8\nwidth: 9\n",
    "optimizer/late.yaml": "_target_: mine.SGD\nlr: 6\nmomentum: 7\n",
    "data/digits.yaml": "defaults:\n  - parts\n  - _self_\n_target_: mine.Digits\nsize: 10\n",
    "data/parts.yaml": "size: 11\nworkers: &few\n  count: 12\n  depth: 13\nothers:\n  <<: *few\n  depth: 14\n",
    "experiment/base.yaml": "# @package _global_\nmodel:\n  width: 15\nloop:\n  log_interval: 16\n  eval_steps: 17\n",
    "experiment/child.yaml": (
        "# @package _global_\ndefaults:\n  - base\n  - override /model: cnn\n  - _self_\nloop:\n  log_interval: 18\n"
    ),
    "experiment/same.yaml": "# @package _global_\ndefaults:\n  - override /model: mlp\n",
    "experiment/own.yaml": (
        "# @package _global_\nmodel:\n  _target_: mine.Net\n  width: 19\noptimizer:\n  momentum: 20\nseed: 21\n"
    ),
}


@pytest.fixture
def rich(project: Path, write: Write) -> Path:
    for name, text in RICH.items():
        write(name, text)
    classes = ("MLP", "CNN", "Digits", "SGD", "Net")
    (project / "mine.py").write_text(
        "".join(f"class {c}:\n    def __init__(self, *parts, **settings): ...\n" for c in classes)
    )
    return project


@pytest.mark.parametrize("overrides", [[], ["experiment=base"], ["experiment=child"], ["experiment=own"]], ids=str)
def test_changing_the_line_that_is_named_changes_the_value(rich: Path, overrides: list[str]) -> None:
    composed = compose(overrides)
    numbers = {path for path, value in leaves(composed.raw) if type(value) is int}
    named = {path: str(said) for path in numbers if (said := composed.tree.exact(path)).source != DEFAULT}
    assert len(named) >= 8
    new = {place: 900 + index for index, place in enumerate(sorted(set(named.values())))}
    for place, number in new.items():
        file, _, line = place.rpartition(":")
        lines = (rich / file).read_text().splitlines(keepends=True)
        lines[int(line) - 1] = re.sub(r": \d+", f": {number}", lines[int(line) - 1])
        (rich / file).write_text("".join(lines))
    changed = dict(leaves(compose(overrides).raw))
    assert {path: changed[path] for path in named} == {path: new[place] for path, place in named.items()}


def test_the_order_of_the_defaults_list_decides_who_is_named(rich: Path) -> None:
    composed = compose([])
    assert origin(composed, "model.hidden") == "configs/config.yaml:11"  # _self_ stands after the model ...
    assert origin(composed, "optimizer.lr") == "configs/optimizer/late.yaml:2"  # ... and before the optimizer
    assert origin(composed, "data.others.count") == "configs/data/parts.yaml:3"
    assert origin(composed, "data.others.depth") == "configs/data/parts.yaml:7"


def test_a_key_that_only_its_section_names_is_a_default(rich: Path) -> None:
    composed = compose(["experiment=base"])
    assert origin(composed, "loop.log_interval") == "configs/experiment/base.yaml:5"
    assert origin(composed, "loop.hard_stop") == DEFAULT


def chosen(composed: Composed, section: str) -> str:
    return str(composed.tree.chosen((section,)))


def test_a_choice_is_named_with_who_made_it(rich: Path) -> None:
    assert chosen(compose([]), "model") == "configs/config.yaml:3: model=mlp"
    assert chosen(compose(["experiment=child"]), "model") == "configs/experiment/child.yaml:4: model=cnn"
    assert chosen(compose(["experiment=same"]), "model") == "configs/experiment/same.yaml:3: model=mlp"
    assert chosen(compose(["experiment=child", "model=mlp"]), "model") == "command line: model=mlp"
    assert origin(compose([]), "scheduler") == "configs/config.yaml:7: scheduler=null"
    assert origin(compose(["scheduler=null"]), "scheduler") == "command line: scheduler=null"
    assert origin(compose(["experiment=child"]), "name") == "command line: experiment=child"


def test_a_choice_of_which_nothing_is_left_is_not_named(rich: Path) -> None:
    composed = compose(["experiment=own"])
    assert composed.raw["model"] == {"_target_": "mine.Net", "width": 19, "hidden": 2}
    assert chosen(composed, "model") == "None"
    assert chosen(composed, "optimizer") == "configs/config.yaml:6: optimizer=late"
    assert origin(composed, "model.width") == "configs/experiment/own.yaml:4"


GIVEN = {
    "optimizer.lr": (["optimizer.lr=1", "optimizer.lr=2"], "command line: optimizer.lr=2"),
    "data.others.count": (["data.others={count: 3}"], "command line: data.others={count: 3}"),
    "data.others.depth": (["data.others={count: 3}"], "configs/data/parts.yaml:7"),
    "model.extra": (["+model.extra=[1, 2]"], "command line: +model.extra=[1, 2]"),
    "seed": (["~seed"], "command line: ~seed"),
    "ckpt": (["ckpt=runs/x@latest"], "command line: ckpt=runs/x@latest"),
    "checkpoint.fixed_steps": (
        ["checkpoint.fixed_steps=[1]", "checkpoint.fixed_steps+=2"],
        "command line: checkpoint.fixed_steps+=2, after command line: checkpoint.fixed_steps=[1]",
    ),
    "checkpoint.remove": (
        ["checkpoint.remove=never", "++checkpoint.remove=never"],
        "command line: ++checkpoint.remove=never",
    ),
}


@pytest.mark.parametrize("key", GIVEN)
def test_the_override_that_set_a_value_is_shown(rich: Path, key: str) -> None:
    overrides, expected = GIVEN[key]
    assert origin(compose(overrides), key) == expected


NUMBERS = {"seed": 1, "optimizer.lr": 3, "model.hidden": 2, "loop.eval_steps": 1, "loop.log_interval": 1}


@given(st.lists(st.tuples(st.sampled_from(sorted(NUMBERS)), st.integers(1, 9)), max_size=8))
def test_of_overrides_of_one_key_the_last_is_named(pairs: list[tuple[str, int]]) -> None:
    lines = [f"{key}={value}" for key, value in pairs]
    tree = ConfigTree(Node.of({"seed": 0, "optimizer": {"lr": 0}, "model": {"hidden": 0}, "loop": {}}))
    signed = [f"++{line}" for line in lines]
    assert not override_values.apply(
        tree, read_overrides(signed).overrides, SearchPath.of(None, "config", SHIPPED.parent)
    )
    last = {key: line for (key, _), line in zip(pairs, lines, strict=True)}
    for key in NUMBERS:
        shown = str(tree.exact(tuple(key.split("."))))
        assert shown == (f"command line: ++{last[key]}" if key in last else DEFAULT)


def tree_of(*texts: str) -> ConfigTree:
    """What files called a, b, … with these texts are merged into."""
    tree = ConfigTree()
    for label, text in zip("abc", texts, strict=False):
        merge(tree.root, read_text(text, label).tree)
    return tree


def test_what_takes_the_place_of_a_section_is_named_for_all_of_it() -> None:
    tree = tree_of("model:\n  x: {y: 1}\n", "model:\n  x: ${other}\n")
    assert str(tree.exact(("model", "x", "y"))) == "b:2"


def test_an_item_of_a_list_is_reported_with_its_own_line() -> None:
    assert tree_of("steps:\n  - 1\n  - 2\n").source(("steps", "1")) == "a:3"


def work_of_origins(items: int) -> int:
    """Number of instructions that are run to find the origins of a list that two files set."""
    text = f"steps: [{', '.join(map(str, range(items)))}]\n"
    instructions, before = 0, sys.gettrace()

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal instructions
        frame.f_trace_opcodes = True
        instructions += event == "opcode"
        return count

    sys.settrace(count)
    try:
        assert str(tree_of(text, text).exact(("steps",))) == "b:1"
    finally:
        sys.settrace(before)
    return instructions


def test_the_work_for_the_origins_of_a_list_grows_with_its_length_alone() -> None:
    assert work_of_origins(400) < 2.5 * work_of_origins(200)


def test_a_recovered_config_is_named_with_what_is_put_on_top(rich: Path) -> None:
    (rich / "run.yaml").write_text(compose(["experiment=child", "seed=5", "resume=must"]).to_yaml())
    composed = from_yaml(rich / "run.yaml", ["seed=6", "model=mlp", "model.width=7"])
    assert line_at(origin(composed, "loop.log_interval"), rich) == "  log_interval: 18"
    assert origin(composed, "loop.log_interval").startswith("run.yaml:")
    assert origin(composed, "seed") == "command line: seed=6"
    assert chosen(composed, "model") == "command line: model=mlp"
    assert origin(composed, "model.hidden") == "configs/config.yaml:11"
    assert origin(composed, "model.width") == "command line: model.width=7"
    assert origin(composed, "resume") == DEFAULT, "it counts for one command, and is not recovered"
    assert chosen(composed, "optimizer") == "None"


def test_a_section_that_is_swapped_into_a_recovered_config_owes_it_nothing(rich: Path) -> None:
    (rich / "run.yaml").write_text(compose(["checkpoint.digest=sha256"]).to_yaml())
    composed = from_yaml(rich / "run.yaml", ["checkpoint=default"])
    assert composed.config.checkpoint.digest == "xxh3_128"
    assert origin(composed, "checkpoint.digest") == DEFAULT
    assert origin(from_yaml(rich / "run.yaml"), "checkpoint.digest").startswith("run.yaml:")
