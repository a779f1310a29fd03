"""What stands in a component that an experiment, or the command line, writes out: all that is given to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.config.check import to_plain
from trainer_cli.config.compose import compose

Write = Callable[[str, str], Path]
NET = {"_target_": "mine.Net", "width": 3}
MLP = {"_target_": "mine.MLP", "hidden": [64]}


@pytest.fixture(autouse=True)
def _experiments(project: Path, write: Write) -> None:
    write("experiment/own.yaml", "# @package _global_\nmodel: {_target_: mine.Net, width: 3}\n")
    write("experiment/more.yaml", "# @package _global_\ndefaults: [own]\nmodel: {depth: 2}\n")
    write("experiment/later.yaml", "# @package _global_\nmodel: {depth: 5}\n")
    write("experiment/wide.yaml", "# @package _global_\nmodel: {hidden: [8]}\n")
    chosen = "# @package _global_\ndefaults:\n  - override /model: cnn\nmodel: {_target_: mine.Net, width: 3}\n"
    write("experiment/chosen.yaml", chosen)
    write("size/big.yaml", "# @package _global_\nmodel: {width: 64, depth: 4}\n")
    write("model/of_parts.yaml", "defaults:\n  - part: small\n  - _self_\n_target_: mine.MLP\n")
    write("model/part/small.yaml", "size: 1\n")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(["+experiment=own"], NET, id="the default choice is dropped"),
        pytest.param(["+experiment=wide"], {**MLP, "hidden": [8]}, id="a value alone is merged"),
        pytest.param(["+experiment=chosen"], {"channels": 8, **NET}, id="its own choice is kept"),
        pytest.param(["+experiment=own", "model=cnn", "model._target_=mine.CNN"],
                     {**NET, "_target_": "mine.CNN", "channels": 8}, id="so is that of the command line"),
        pytest.param(["+experiment=more"], {**NET, "depth": 2}, id="another experiment adds"),
        pytest.param(["+experiment=[later,own]"], {**NET, "depth": 5}, id="another experiment before it adds"),
        pytest.param(["+experiment=own", "+size=big"], {**NET, "width": 64, "depth": 4}, id="a global option adds"),
        pytest.param(["+experiment=own", "+model.depth=3"], {**NET, "depth": 3}, id="+key"),
        pytest.param(["+experiment=own", "model={width: 4}"], {**NET, "width": 4}, id="a mapping"),
        pytest.param(["+experiment=own", "+model={_target_: mine.Net, depth: 3}"], {**NET, "depth": 3}, id="+mapping"),
        pytest.param(["+experiment=own", "++model={depth: {a: 3}}"], {**NET, "depth": {"a": 3}}, id="++mapping"),
        pytest.param(["+experiment=own", "model=null", "model={depth: 3}"], {"depth": 3}, id="null, then a mapping"),
        pytest.param(["+experiment=own", "~model", "+model.depth=3"], {"depth": 3}, id="~, then a key"),
        pytest.param(["model=of_parts", "+size=big"],
                     {"_target_": "mine.MLP", "part": {"size": 1}, "width": 64, "depth": 4}, id="nested groups"),
    ],
)  # fmt: skip
def test_what_is_given_stands_in_the_component(overrides: list[str], expected: dict[str, Any]) -> None:
    composed = compose(overrides, sections=())
    assert to_plain(composed.raw)["model"] == expected


@pytest.mark.parametrize("off", ["~scheduler", "scheduler=null"])
@pytest.mark.parametrize(
    "node", ["scheduler={_target_: mine.Net, size: 2}", "+scheduler={_target_: mine.Net, size: 2}"]
)
def test_a_component_that_is_switched_off_may_be_written_anew(off: str, node: str) -> None:
    for line in ([off, node], [node, off]):
        assert compose(["+experiment=small", *line], sections=()).config.scheduler == {
            "_target_": "mine.Net",
            "size": 2,
        }
    assert compose(["+experiment=small", off]).config.scheduler is None


def test_several_schedulers_written_out_take_nothing_from_the_default_choice(write: Write) -> None:
    write(
        "config.yaml", "defaults:\n  - train_schema\n  - model: mlp\n  - data: digits\n  - scheduler: warmup_cosine\n"
    )
    several = {"first": {"_target_": "mine.Net"}, "second": None}
    write("experiment/several.yaml", f"# @package _global_\nscheduler: {several}\n".replace("None", "null"))
    assert compose(["+experiment=several"], sections=()).config.scheduler == several
