"""docs/callbacks.md has a row for each callback, whose example can be made."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainer_cli
from trainer_cli import Callback, CheckpointerCallback
from trainer_cli.callbacks.validation_callback import ValidationCallback
from trainer_cli.config.composing import compose
from trainer_cli.schema.sections import SYSTEM

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```yaml\n(callbacks:\n.*?)^```$", (ROOT / "docs/callbacks.md").read_text(encoding="utf-8"), re.M | re.S
)
ROWS = [node for block in BLOCKS for node in yaml.safe_load(block)["callbacks"].values()]

OPTIONS = [path.stem for path in sorted((ROOT / "configs/callbacks").glob("*.yaml")) if path.stem != "default"]


def _shipped() -> dict[str, type]:
    """Every public callback of the package, by its name."""
    modules = [
        import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for folder in ("callbacks", "addons/inspect", "addons/sparsity")
        for path in (ROOT / "trainer_cli" / folder).glob("*.py")
        if path.stem not in ("__init__", "sparsity", "sparse_training")  # Of docs/sparsity.md.
    ]
    return {
        name: found
        for module in modules
        for name, found in vars(module).items()
        if isinstance(found, type) and issubclass(found, Callback) and not name.startswith("_")
        if found.__module__ == module.__name__ and found not in (CheckpointerCallback, ValidationCallback)
    }


def _class(node: dict[str, Any]) -> Any:
    module, _, name = node["_target_"].rpartition(".")
    return getattr(import_module(module), name)


def _made(node: Any) -> Any:
    """A node's object, and all that are in it."""
    if not isinstance(node, dict):
        return node
    inner = {key: _made(value) for key, value in node.items() if key != "_target_"}
    return _class(node)(**inner) if "_target_" in node else inner


def test_every_callback_has_an_example_and_a_line() -> None:
    assert sorted(_class(node).__name__ for node in ROWS) == sorted(_shipped())
    explained = re.findall(r"^  # (\w+)", "".join(BLOCKS), re.MULTILINE)
    assert not [name for name in _shipped() if name not in explained]


@pytest.mark.parametrize("node", ROWS, ids=lambda node: node["_target_"].rpartition(".")[2])
def test_an_example_can_be_made(node: dict[str, Any]) -> None:
    assert isinstance(_made(node), Callback)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_the_config_can_be_chosen_and_made(option: str) -> None:
    composed = compose(["experiment=digits_mlp", f"callbacks={option}"])
    composed.check_targets()
    (node,) = (node for name, node in composed.config.callbacks.items() if name != SYSTEM)
    assert isinstance(_made(dict(node)), Callback)


def test_every_callback_has_a_public_name() -> None:
    assert not [name for name in _shipped() if name not in trainer_cli.__all__]
