"""`trainer_cli.load_model`: a model from a checkpoint alone, under the rules of trust of a recovered config."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from trainer_cli import CheckpointError, ConfigError, UserError, load_model, make_sync_checkpointer
from trainer_cli.commands.command_line import main

EXPERIMENT = """# @package _global_
model: {_target_: shapes.Net, sizes: {inputs: from_data}, dropout: 0.5}
data: {_target_: shapes.Data, batch_size: 4}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
callbacks: {mean: {_target_: trainer_cli.EMA, decay: 0.5}}
loop: {max_duration: 4, eval_interval: 2}
checkpoint: {save_interval: 2, keep_best: {metric: val/loss, mode: max}}
device: cpu
"""
MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, sizes, dropout=0.0, width=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(sizes["inputs"], width), nn.Dropout(dropout), nn.BatchNorm1d(width))

    def forward(self, batch):
        return self.layers(batch).square().mean() + self.layers(batch).mean()

class Data:
    inputs = 2
    def __init__(self):
        self.train = self.val = [torch.tensor([float(index), index % 3.0]) for index in range(8)]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of four steps whose evaluations saw an average."""
    root = tmp_path_factory.mktemp("project")
    (root / "configs/experiment").mkdir(parents=True)
    (root / "configs/experiment/net.yaml").write_text(EXPERIMENT)
    (root / "shapes.py").write_text(MODULE)
    before = Path.cwd()
    os.chdir(root)
    try:
        assert main(["fit", "experiment=net"]) == 0
    finally:
        os.chdir(before)
    return root


@pytest.fixture
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    return project / "runs/net"


def saved(run: Path, name: str) -> dict[str, Any]:
    return make_sync_checkpointer().read(run / "checkpoints" / name)


def differ(model: torch.nn.Module, weights: dict[str, Any]) -> list[str]:
    state = model.state_dict()
    assert state.keys() == weights.keys()
    return [name for name, value in weights.items() if not torch.equal(value, state[name])]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("runs/net", "step4"),
        ("runs/net@latest", "step4"),
        ("runs/net@step2", "step2"),
        ("runs/net/checkpoints/step2", "step2"),
    ],
)
def test_a_model_is_made_from_its_checkpoint_alone(run: Path, name: str, step: str) -> None:
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    model = load_model(name, average="none")
    assert (type(model).__qualname__, model.training, cast("nn.Dropout", model.get_submodule("layers.1")).p) == (
        "Net",
        False,
        0.5,
    )
    assert differ(model, saved(run, step)["model"]) == []
    assert torch.equal(generator, torch.get_rng_state())
    assert threads == torch.get_num_threads()
    assert model(torch.ones(2, 2)).ndim == 0


def test_the_weights_are_those_that_evaluations_saw_and_arguments_of_the_model_may_change(run: Path) -> None:
    average = saved(run, "step4")["callbacks"]["mean"]["average"]
    assert set(differ(load_model("runs/net"), saved(run, "step4")["model"])) == set(average)
    state = load_model("runs/net", average="mean").state_dict()
    assert all(torch.equal(state[name], value.to(state[name].dtype)) for name, value in average.items())
    assert (
        cast("nn.Dropout", load_model("runs/net", overrides=["model.dropout=0.0"]).get_submodule("layers.1")).p == 0.0
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": "runs/none"}, CheckpointError, "matches nothing"),
        ({"path": "runs/net", "average": "swa"}, CheckpointError, "no averaged weights of a callback 'swa'"),
        ({"path": "runs/net", "overrides": ["+model.width=4"]}, UserError, r"layers.0.weight: has shape \(4, 2\)"),
        ({"path": "runs/net", "overrides": ["+model.widht=4"]}, ConfigError, "widht"),
        ({"path": "runs/net", "overrides": ["model={_target_: os.system}"]}, ConfigError, "os.system"),
        ({"path": "runs/net", "device": "toaster"}, UserError, "device"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    run: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_model(**arguments)


def test_the_key_of_the_commands_is_refused_with_the_argument(run: Path) -> None:
    with pytest.raises(UserError, match="Give average='none'"):
        load_model(f"{run}@latest", overrides=["load.average=false"])


def test_a_class_of_another_place_is_trusted_only_when_named_and_another_class_of_its_name_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"shapes.*trust"):
        load_model(run)
    assert type(load_model(run, trust=["shapes"])).__name__ == "Net"
    assert type(load_model(run, config_dir=run.parents[1] / "configs")).__name__ == "Net"
    shutil.copytree(run.parents[1] / "configs", tmp_path / "configs")
    (tmp_path / "shapes.py").write_text(MODULE.replace("width=3", "width=3, other=1"))
    monkeypatch.delitem(sys.modules, "shapes", raising=False)
    with pytest.raises(ConfigError, match=r"shapes\.Net of .* is not the class that .* was trained with"):
        load_model(run)


def test_a_checkpoint_without_config_needs_an_experiment(run: Path, tmp_path: Path) -> None:
    weights = saved(run, "step4")["model"]
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"holds no config.yaml.*overrides=\['experiment=NAME'\]"):
        load_model(tmp_path / "weights.pt")
    assert differ(load_model(tmp_path / "weights.pt", overrides=["experiment=net"]), weights) == []
