"""Settings of callbacks: wrong ones are refused, and docs/callbacks.md has a row with an example for each callback."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tiny import Line, loader, trainer

import trainer_cli
import trainer_cli as t
from trainer_cli import Callback, CheckpointerCallback
from trainer_cli.callbacks.validation_callback import ValidationCallback
from trainer_cli.config.composing import compose
from trainer_cli.config.search_path import SearchPath
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.schema.sections import SYSTEM

FLAG = "torch.backends.cudnn.benchmark"


def _fit(model: Any = Line, **more: Any) -> None:
    trainer(model, **more).fit(loader(12))


def _attach(*callbacks: Any) -> None:
    trainer(callbacks=list(callbacks))


# The call, and words of its error.
MADE: list[tuple[Callable[[], Any], str]] = [
    (partial(t.EMA, decay=1.0), "decay is 1.0"),
    (partial(t.EMA, decay=math.nan), "decay is nan"),
    (partial(t.EMA, every=0), "every is 0"),
    (partial(cast("Any", t.EMA), every=2.5), r"every is 2\.5"),
    (partial(t.EMA, start="soon"), "start: 'soon' is not a duration"),
    (partial(t.EarlyStopping, mode="least"), "mode is 'least', but it must be auto, min or max"),
    (partial(t.EarlyStopping, min_delta=-1), "min_delta is -1"),
    (partial(t.EarlyStopping, min_delta=math.nan), "min_delta is nan"),
    (partial(t.EarlyStopping, patience="soon"), "'soon' is not a duration; expected a number of evaluations"),
    (partial(t.EarlyStopping, patience=0), "must be at least 1"),
    (partial(t.EarlyStopping, patience="0ep"), "more than zero"),
    (partial(t.ThresholdStopper, "val/loss", 1.0, "most"), "mode is 'most'"),
    (partial(t.ThresholdStopper, "val/loss", math.nan), "threshold is nan"),
    (partial(t.ThresholdStopper, "val/loss", True), "threshold is true"),
    (partial(cast("Any", t.EarlyExit), [3]), "3 is not a function of the trainer"),
    (partial(t.CheckFinite, policy="stop"), "policy is 'stop'"),
    (partial(t.CheckFinite, max_times=-1), "max_times is -1"),
    (partial(t.CheckFinite, max_times=True), "max_times is true"),
    (partial(t.SaveCheckpointState, states=["modle"]), "states"),
    (partial(t.SaveCheckpointState, states="all"), "states"),
    (partial(t.SaveCheckpointState, states=[]), "states"),
    (partial(t.SaveCheckpointState, every="often"), "every"),
    (partial(type("Evaluates", (ValidationCallback,), {}), 0), "every is 0"),
    (partial(t.ParameterTable, -1), "depth is -1"),
    (partial(t.SkipSamples, -1), "samples is -1, but it must be a whole number of at least 0"),
    (partial(t.ScopedFlags, fit={"os.sep": "x"}), "'os.sep' is not an attribute of torch"),
    (partial(t.ScopedFlags, fit={f"{FLAG}s": True}), f"there is no '{FLAG}s'"),
    (partial(t.ScopedFlags, fit={"torch.nowhere.flag": True}), "there is no 'torch.nowhere.flag'"),
    (partial(t.ScopedFlags, fit={"torch.load": 1}), "is a function or a class"),
    (partial(t.ScopedFlags, fit={FLAG: 1}), "is False, so it cannot be 1"),
]
USED: list[tuple[Callable[[], Any], str]] = [
    (lambda: _fit(callbacks=[t.EMA(start="10s")]), r"start is 10s, which is not a number of steps"),
    (lambda: _fit(callbacks=[t.SaveCheckpointState()]), "this trainer saves none"),
    (lambda: _attach(t.LearningRateMonitor("rate")), "no parameter group has 'rate'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), [*MADE, *USED], ids=[words for _, words in [*MADE, *USED]])
def test_it_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ConfigError, UserError), match=words):
        call()


# The pages have a row for each callback, whose example can be made. That of an add-on may have been deleted with it.


ROOT = Path(__file__).parents[2]
PAGES = [page for name in ("callbacks", "sparsity") if (page := ROOT / "docs" / f"{name}.md").exists()]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```yaml\n(callbacks:\n.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
]
NODES = [node for block in BLOCKS for node in yaml.safe_load(block)["callbacks"].values()]
ROWS = [node for node in NODES if node["_target_"].rpartition(".")[2] in trainer_cli.__all__]
"""Examples of the callbacks that are there: those of an add-on may have been deleted."""
OPTIONS = [option for option in SearchPath.without_own(cwd=ROOT).options("callbacks") if option != "default"]


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
