"""What an experiment's own component takes from the default choice: nothing, unless it asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from trainer_cli.config.experiments import own_nodes

DEFAULT = {"_target_": "a.Default", "width": 1, "depth": 2}
WHOLE = "model: {_target_: mine.Net, width: 3}"


@pytest.mark.parametrize(
    ("experiments", "given", "chosen", "expected"),
    [
        pytest.param([WHOLE], [], [], {"_target_": "mine.Net", "width": 3}, id="a whole node replaces"),
        pytest.param(["model: {width: 3}"], [], [], {**DEFAULT, "width": 3}, id="a value alone is merged"),
        pytest.param(
            [f"defaults: [{{override /model: cnn}}]\n{WHOLE}"], [], [],
            {**DEFAULT, "_target_": "mine.Net", "width": 3}, id="what it chose itself, it keeps",
        ),
        pytest.param(
            [WHOLE], [], ["model"], {**DEFAULT, "_target_": "mine.Net", "width": 3}, id="so with the command line"
        ),
        pytest.param(
            [WHOLE], [("model", "depth")], [], {"_target_": "mine.Net", "width": 3, "depth": 2},
            id="what the command line gives stays",
        ),
        pytest.param(
            [WHOLE, "model: {depth: 2}"], [], [], {"_target_": "mine.Net", "width": 3, "depth": 2},
            id="a later experiment adds to it",
        ),
        pytest.param(["model: {depth: 5}", WHOLE], [], [], {"_target_": "mine.Net", "width": 3}, id="the last wins"),
    ],
)  # fmt: skip
def test_a_node_written_out_takes_nothing_from_the_default_choice(
    experiments: list[str], given: list[tuple[str, ...]], chosen: list[str], expected: dict[str, Any]
) -> None:
    composed = dict(DEFAULT)
    for text in experiments:
        if "_target_" in text:
            composed |= {"_target_": "mine.Net", "width": 3}
        elif "width" in text:
            composed["width"] = 3
    documents = [yaml.safe_load(text) for text in experiments]
    assert own_nodes({"model": composed, "seed": 0}, documents, given, chosen) == {"model": expected, "seed": 0}


def test_several_schedulers_written_out_take_nothing_from_the_default_choice() -> None:
    default = {"_target_": "a.Default", "warmup": 1}
    written = {"first": {"_target_": "b.First"}, "second": None}
    composed = {"scheduler": default | written}
    assert own_nodes(composed, [{"scheduler": written}], [], []) == {"scheduler": written}
