"""Components of a config against what their targets take: with key and place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import EXPERIMENTS

from trainer_cli.components.nodes import EVALUATED, SECTIONS
from trainer_cli.components.targets import Trust
from trainer_cli.config import composing
from trainer_cli.config.composing import compose, from_yaml
from trainer_cli.config.tree import ConfigTree
from trainer_cli.errors import ConfigError
from trainer_cli.keys.config_keys import DATA_KEYS
from trainer_cli.schema.sections import TrainConfig

Write = Callable[[str, str], Path]
PARTS = """
from trainer_cli.callbacks.checkpointer import CheckpointerCallback

class Net:
    def __init__(self, width: int, inner=None, layers=(), vocab: int = 3, path: str | None = None): ...
    @classmethod
    def small(cls, depth: int = 1): ...
class Data:
    def __init__(self, size: int = 4, seed: int = 0): ...
class Batches:
    def __init__(self, size: int, batch_size: int): ...
class Plateau:
    def __init__(self, optimizer, total_steps: int, warmup: int = 0, ratio: float = 0.0, name: str = "a"): ...
class Saver(CheckpointerCallback): ...
class Narrow:
    def __init__(self, folder, identity): ...
def join(batch): ...
SIZE = 3
"""
NET = {"_target_": "parts.Net", "width": 8}
DATA = {"_target_": "parts.Data", "batch_size": 4}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}
PLATEAU = {"_target_": "parts.Plateau"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("root")
    (root / "parts.py").write_text(PARTS)
    (root / "broken.py").write_text("def f(:\n")
    sys.path.insert(0, str(root))
    yield root
    sys.path.remove(str(root))
    sys.modules.pop("parts", None)


def wrong(root: Path, trust: Trust | None = None, **sections: Any) -> list[str]:
    config = TrainConfig(**{"model": NET, "data": DATA, "optimizer": SGD, **sections})
    return [
        str(error)
        for error in composing._check_components(config, ConfigTree(), trust or Trust(), SECTIONS, imports=True)
    ]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": None, "optimizer": None},
        {"model": {**NET, "vocab": "from_data", "path": None}},
        {"model": {**NET, "inner": {"_target_": "parts.Net", "width": "from_data"}}},
        {"model": {**NET, "layers": [{"deep": {"_target_": "parts.Net", "width": "from_data"}}]}},
        {"model": {**NET, "width": "???"}},
        {"model": {**NET, "inner": {"_target_": "parts.Net", "_args_": [3]}}},
        {"model": {"_target_": "parts.Net", "_partial_": True}},
        {"model": {"_target_": "parts.Net.small", "depth": 3}},
        {"data": {**DATA, **dict.fromkeys(DATA_KEYS), "collate_fn": "parts.join"}},
        {"data": {**DATA, "collate_fn": {"_target_": "parts.join", "_partial_": True}}},
        {"optimizer": {**SGD, "lr": 1, "momentum": 0}},
        {"scheduler": {"_target_": "parts.Plateau", "warmup": "1ep"}},
        {"scheduler": {"one": {"_target_": "parts.Plateau", "warmup": "50st"}, "off": None}},
        {"scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": "2ep"}},
        {"scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "interval": "epoch"}},
        {"scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "metric": "val/loss"}},
        {"callbacks": {"off": None, "checkpoint": {"_target_": "parts.Saver", "save_interval": 3}}},
        {"model": {"_target_": "time.sleep", "_args_": [0]}},
    ],
)
def test_what_is_right_is_let_through(root: Path, sections: dict[str, Any]) -> None:
    assert wrong(root, **sections) == []


STEP_LR = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2}
PLATEAU = {"_target_": "parts.Plateau"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": {**NET, "widht": 1}}, "Net takes no argument 'widht' (model.widht, default). Did you mean 'width'?"),
    (
        {"model": {**NET, "target": "a.B"}},
        "no argument 'target' (model.target, default). Did you mean '_target_'?",
    ),
    (
        {"callbacks": {"stop": {"_target_": "trainer_cli.EarlyStopping", "patience": 3.5}}},
        "Write a whole number, or a string, such as the duration 3.5ep.",
    ),
    ({"model": {"_target_": "parts.Net"}}, "Net: missing a required argument: 'width' (model._target_, default)"),
    ({"model": {**NET, "width": "from_dat"}}, "model.width is 'from_dat'"),
    (
        {"model": {"_target_": "parts.Nett"}},
        "module parts has no 'Nett' (model._target_, default). Did you mean 'Net'?",
    ),
    ({"model": {"_target_": "broken.Net"}}, "broken.py:1: "),
    ({"model": {**NET, "_recursive_": False}}, "model._recursive_ is not known"),
    ({"model": {**NET, "layers": [NET, {**NET, "width": "x"}]}}, "model.layers.1.width is 'x'"),
    ({"model": {**NET, "inner": {"deep": [{"_target_": "parts.Net"}]}}}, "(model.inner.deep.0._target_, default)"),
    (
        {"data": {"_target_": "parts.Batches", "size": 4, "batch_size": 8}},
        "Batches requires 'batch_size', but data.batch_size is for the loader and is not passed to it (data._target_",
    ),
    ({"data": {"_target_": "parts.Batches"}}, "Batches: missing a required argument: 'size' (data._target_, default)"),
    ({"data": {**DATA, "batch_size": 0}}, "data.batch_size is 0, but it must be a whole number of at least 1"),
    ({"data": {**DATA, "drop_last": 1}}, "data.drop_last is 1, but it must be true or false"),
    ({"data": {**DATA, "collate_fn": "parts.jion"}}, "module parts has no 'jion' (data.collate_fn"),
    ({"data": {**DATA, "collate_fn": {"_target_": "parts.jion"}}}, "(data.collate_fn._target_"),
    ({"optimizer": {**SGD, "lr": "from_data"}}, "optimizer.lr is 'from_data', but it must be a number"),
    ({"step": {**NET, "inner": {**NET, "width": "from_data"}}}, "step.inner.width is 'from_data'"),
    ({"optimizer": {**SGD, "params": 3}}, "SGD gets its 'params' from train"),
    ({"param_groups": {"*bias": {"lrr": 0}}}, "SGD takes no argument 'lrr' (param_groups.*bias.lrr, default)"),
    ({"param_groups": {"*bias": {"lr": "high"}}}, "param_groups.*bias.lr is 'high', but it must be a number"),
    (
        {"scheduler": {**STEP_LR, "interval": "batch"}},
        "is 'batch', but it must be one of step, epoch, evaluation",
    ),
    (
        {"scheduler": {**STEP_LR, "metric": 3}},
        "it must be a string (default). It takes the name of a metric",
    ),
    ({"scheduler": {**PLATEAU, "warmup": 1.5}}, "scheduler.warmup is 1.5"),
    ({"scheduler": {**PLATEAU, "warmup": "5%"}}, "scheduler.warmup is '5%', but it must be a whole number"),
    ({"scheduler": {**PLATEAU, "warmup": "1 epoc"}}, "Or a duration, such as 500st or 1ep."),
    ({"scheduler": {"a": {**PLATEAU, "ratio": "x"}}}, "scheduler.a.ratio is 'x'"),
    ({"callbacks": {"x": {"_target_": "parts.No"}}}, "(callbacks.x._target_"),
    ({"callbacks": {"checkpoint": {"_target_": "parts.Narrow"}}}, "Narrow takes no argument 'enabled'"),
    ({"loggers": {"x": {"_target_": "trainer_cli.JsonlLogger", "pth": "a"}}}, "takes no argument 'pth'"),
    (
        {"optimizer": {**SGD, "first": SGD}},
        "merged into the default node: write `defaults: [{override /optimizer: null}]` in their file",
    ),
    (
        {"scheduler": {**PLATEAU, "x": PLATEAU}},
        "merged into the default node: write `defaults: [{override /scheduler: null}]` in their file",
    ),
]


@pytest.mark.parametrize(("sections", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_reported_with_its_key(root: Path, sections: dict[str, Any], message: str) -> None:
    assert any(message in error for error in wrong(root, **sections)), wrong(root, **sections)


def test_all_of_it_is_reported_at_once(root: Path) -> None:
    assert len(wrong(root, model={**NET, "a": 1, "width": "x"}, optimizer={**SGD, "b": 1}, data={**DATA, "c": 1})) == 4


def test_a_recovered_config_is_refused_by_name_before_anything_is_imported(root: Path) -> None:
    trust = Trust.recovered(root, [])
    assert wrong(root, trust) == []
    for target in ("json.loads", "torch.nn.init.ones_", "torch.nn.Module.apply", "trainer_cli.Trainer"):
        (error,) = wrong(root, trust, model={"_target_": target, "odd": 1})
        assert f"_target_ {target}" in error
        assert "comes from a config on disk" in error


def test_mistakes_have_their_place_and_stand_beside_others(project: Path, write: Write) -> None:
    write("model/mlp.yaml", "_target_: Modle\nhidden: [64]\n")
    with pytest.raises(ConfigError) as caught:
        compose(["optimizer.lr=fast", "loop.grad_accum_steps=0"])
    message = str(caught.value)
    assert "_target_ 'Modle' is not a dotted name (model._target_, configs/model/mlp.yaml:1)" in message
    assert "loop.grad_accum_steps is 0" in message
    with pytest.raises(ConfigError) as caught:
        compose(["optimizer.lr=fast", "model=cnn"]).check_targets()
    assert str(caught.value) == "optimizer.lr is 'fast', but it must be a number (command line)."


def test_a_missing_argument_is_reported_where_the_target_stands(project: Path, write: Write) -> None:
    (project / "mine.py").write_text(
        (project / "mine.py").read_text() + "class Deep:\n    def __init__(self, width, depth): ...\n"
    )
    write("experiment/m.yaml", "# @package _global_\nseed: 1\nmodel:\n  _target_: mine.Deep\n")
    write("model/deep.yaml", "width: 4\n_target_: mine.Deep\n")
    lacks = "Deep: missing a required argument: 'depth' (model._target_, "
    for overrides, place in {
        ("experiment=m", "+model.width=5"): "configs/experiment/m.yaml:4",
        ("model=deep", "model.width=5"): "configs/model/deep.yaml:2",
        ("model=deep",): "configs/model/deep.yaml:2",
        ("~model.hidden", "model._target_=mine.Deep", "+model.width=5"): "command line",
    }.items():
        with pytest.raises(ConfigError) as caught:
            compose(overrides).check_targets()
        assert str(caught.value) == f"{lacks}{place})."


def test_a_run_whose_class_is_gone_can_still_be_compared_with(project: Path) -> None:
    text = compose(["model=mlp"]).to_yaml()
    (project / "mine.py").write_text((project / "mine.py").read_text().replace("class MLP", "class Renamed"))
    assert from_yaml(text, trusted=True, missing_ok=True).config.model["_target_"] == "mine.MLP"
    with pytest.raises(ConfigError, match="module mine has no 'MLP'"):
        from_yaml(text).check_targets()


def test_what_a_command_does_not_make_does_not_stop_it(project: Path) -> None:
    text = compose(["model=mlp"]).to_yaml().replace("torch.optim.AdamW", "gone.Optimizer")
    assert from_yaml(text, sections=EVALUATED).config.optimizer["_target_"] == "gone.Optimizer"
    with pytest.raises(ConfigError, match=r"gone\.Optimizer"):
        from_yaml(text)


def test_the_shipped_experiments_are_right_and_need_no_torch_to_know_it(empty_folder: Path) -> None:
    code = (
        "import sys\nfrom trainer_cli.config.composing import compose\n"
        f"for experiment in {EXPERIMENTS}:\n"
        "    compose([f'experiment={experiment}'], missing_ok=True)\n"
        "assert not {'torch', 'numpy', 'trainer_cli.models.cnn'} & set(sys.modules)\n"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
