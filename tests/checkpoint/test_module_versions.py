"""The versions of modules in a checkpoint: a module that migrates an older state is loaded as by `load_state_dict`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import compiled
from torch import nn

from trainer_cli import load_checkpoint, load_model, make_sync_checkpointer, save_checkpoint
from trainer_cli.commands.command_line import main
from trainer_cli.loads.options import WHOLE, LoadOptions
from trainer_cli.state.model_state import capture_model, find_versions, fit_model

EXPERIMENT = """# @package _global_
model: {_target_: migrating.Net}
data: {_target_: migrating.Data}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loop: {max_duration: 2, eval_interval: 2}
device: cpu
"""
MODULE = """
import torch
from torch import nn
from trainer_cli import Callback

class First(nn.Linear):
    pass

class Second(nn.Linear):
    # Its first version had the transposed weight.
    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *arguments):
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].T.contiguous()
        super()._load_from_state_dict(state, prefix, metadata, *arguments)

class Net(nn.Module):
    def __init__(self, layer=Second, width=3):
        super().__init__()
        self.layers = nn.Sequential(layer(3, width), nn.BatchNorm1d(width))

    def forward(self, batch):
        return (self.layers(batch) - batch.sum()).square().mean() + self.layers[0](batch).square().mean()

class WithoutVersions(Callback):
    # Makes checkpoints such as were saved before versions were.
    def postprocess_checkpoint(self, trainer, state):
        del state["model_versions"]

class RollBackOnce(Callback):
    asked = False

    def on_train_step_end(self, trainer, model, outputs, batch):
        if trainer.progress.step == 1 and not self.asked:
            self.asked = True
            trainer.ask_to_roll_back()

class Data:
    def __init__(self):
        self.train = self.val = [torch.tensor([float(index), index % 3.0, 1.0]) for index in range(8)]
"""
SCOPE: dict[str, Any] = {}
exec(MODULE, SCOPE)
Net, First = SCOPE["Net"], SCOPE["First"]


def _net(*arguments: Any, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return Net(*arguments, **settings)


def _loaded(state: Mapping[str, Any], **settings: Any) -> dict[str, torch.Tensor]:
    """What torch makes of a state."""
    model = _net(seed=9, **settings)
    model.load_state_dict(state)
    return dict(model.state_dict())


def _assert_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def _fit(model: nn.Module, state: Mapping[str, Any], versions: Any, options: LoadOptions = WHOLE) -> dict[str, Any]:
    fitting, _ = fit_model(model, state, options, versions=versions)
    assert fitting.faults == []
    fitting.load()
    return capture_model(model)


def _prefixed(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"inner": module})


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module], dict[str, str]]] = {
    "itself": (lambda model: model, lambda model: model, {}),
    "compiled": (lambda model: model, compiled, {}),
    "compiled part": (_prefixed, lambda model: _prefixed(compiled(model)), {}),
    "saved by a parallel wrapper": (lambda model: nn.ModuleDict({"module": model}), lambda model: model, {}),
    "under another name": (_prefixed, lambda model: model, {"inner.*": "*"}),
    "below another name": (lambda model: model, _prefixed, {"*": "inner.*"}),
}


@pytest.mark.parametrize("width", [3, 2])
@pytest.mark.parametrize("layer", [First, None], ids=["version 1", "version 2"])
@pytest.mark.parametrize("case", WRAPPERS)
def test_modules_migrate_a_state_as_in_load_state_dict(case: str, layer: Any, width: int) -> None:
    saved_in, loaded_in, mapping = WRAPPERS[case]
    # Of the first version the weight had the shape (inputs, outputs).
    saved = _net(**({"layer": layer} if layer else {}), width=width, seed=1)
    if layer:
        saved.layers[0].weight = nn.Parameter(torch.randn(3, width))
    expected = _loaded(saved.state_dict(), width=width)
    source = saved_in(saved)
    model = _net(width=width)
    _fit(loaded_in(model), capture_model(source), find_versions(source), LoadOptions(key_mapping=mapping))
    _assert_equal({name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}, expected)


def test_only_versions_other_than_1_are_saved() -> None:
    assert find_versions(_net(First)) == {"layers.1": 2}
    assert find_versions(nn.Linear(1, 1)) == {}


@pytest.mark.parametrize("value", [None, 7, {"": 1}, {"": {"version": "2"}}, {1: {"version": 2}}])
def test_metadata_of_another_kind_are_no_versions(value: Any) -> None:
    state = _net(First).state_dict()
    state._metadata = value
    versions = pytest.importorskip("trainer_cli.addons.formats.files").find_weights(state).versions
    assert not versions
    _assert_equal(_fit(_net(First, seed=1), dict(state), versions), state)


def test_a_loop_of_ones_own_loads_what_it_saved(tmp_path: Path) -> None:
    saved, model = _net(seed=1), _net(seed=2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (saved, model)]
    save_checkpoint(tmp_path / "step1", 1, saved, optimizers[0])
    for finetune in (False, True):
        assert load_checkpoint(tmp_path / "step1", model, optimizers[1], finetune=finetune)[1] == {}
        _assert_equal(model.state_dict(), saved.state_dict())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/net.yaml").write_text(EXPERIMENT)
    (tmp_path / "migrating.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "migrating", raising=False)
    return tmp_path


def _train(line: str) -> None:
    assert main(line.split(" ")) == 0, line


def _saved(path: str) -> dict[str, Any]:
    model: dict[str, Any] = make_sync_checkpointer().read(path)["model"]
    return model


def _trained(path: str) -> dict[str, Any]:
    """The parameters, without the statistics that a forward changes."""
    return {name: value for name, value in _saved(path).items() if name.startswith("layers.0.")}


OLD = " +callbacks.old={_target_:migrating.WithoutVersions}"
FIRST = "runs/parts/checkpoints/step2"


@pytest.mark.parametrize("old", ["", OLD], ids=["present", "old"])
def test_a_run_loads_its_own_weights_as_they_are(old: str, project: Path) -> None:
    _train(f"fit experiment=net name=whole loop.max_duration=4{old}")
    _train(f"fit experiment=net name=parts{old}")
    _assert_equal(dict(load_model("runs/parts").state_dict()), _saved(FIRST))
    _train(f"validate ckpt={FIRST}")
    (record,) = (project / "runs/parts/validation/validation.jsonl").read_text().splitlines()
    evaluated = make_sync_checkpointer().manifest(FIRST).metrics["val/loss"]
    assert json.loads(record)["val/loss"] == evaluated
    _train(f"fit experiment=net name=parts loop.max_duration=4{old}")
    _assert_equal(_saved("runs/parts/checkpoints/step4"), _saved("runs/whole/checkpoints/step4"))


@pytest.mark.parametrize("old", ["", OLD], ids=["present", "old"])
def test_a_roll_back_loads_the_weights_as_they_are(old: str, project: Path) -> None:
    line = f"fit experiment=net optimizer.lr=0.0{old}"
    _train(f"{line} name=plain")
    _train(f"{line} name=back +callbacks.back={{_target_:migrating.RollBackOnce}}")
    assert "went back from step 1" in (project / "runs/back/train.log").read_text()
    _assert_equal(_trained("runs/back/checkpoints/step2"), _trained("runs/plain/checkpoints/step2"))


def test_another_run_loads_the_weights_as_by_load_state_dict(project: Path) -> None:
    for name in ("parts", "again", f"old{OLD}"):
        _train(f"fit experiment=net name={name}")
    sources = {
        FIRST: "",
        "out.pt": f"ckpt export {FIRST} --format torch --output out.pt",
        "stripped/step2": f"ckpt strip {FIRST} --output stripped/step2",
        "mean/step2": f"ckpt average {FIRST} runs/again/checkpoints/step2 --output mean/step2",
    }
    for number, (path, command) in enumerate(sources.items()):
        if command:
            _train(command)
        _train(f"fit experiment=net name=from{number} ckpt={path} optimizer.lr=0.0")
        _assert_equal(_trained(f"runs/from{number}/checkpoints/step2"), _trained(FIRST))
    # As any program reads an export.
    _assert_equal(_loaded(torch.load("out.pt", weights_only=True)), _saved(FIRST))
    # Without versions the modules see none, as in a state dict without metadata.
    _train("fit experiment=net name=from_old ckpt=runs/old@latest optimizer.lr=0.0")
    expected = _loaded(_saved("runs/old/checkpoints/step2"))
    found = _trained("runs/from_old/checkpoints/step2")
    _assert_equal(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("layer", [First, None], ids=["version 1", "version 2"])
@pytest.mark.parametrize("how", ["state dict", "in a mapping", "without metadata", "lightning"])
def test_a_torch_file_is_loaded_as_by_load_state_dict(how: str, layer: Any, project: Path) -> None:
    state: Any = _net(**({"layer": layer} if layer else {}), seed=4).state_dict()
    if how == "without metadata":
        state = dict(state)
    expected = _loaded(state)
    whole = {"in a mapping": {"model": state, "step": 3}, "lightning": {"state_dict": state, LIGHTNING: "2.6"}}
    torch.save(whole.get(how, state), "foreign.pt")
    _train("fit experiment=net name=tuned ckpt=foreign.pt optimizer.lr=0.0")
    found = _trained("runs/tuned/checkpoints/step2")
    _assert_equal(found, {name: expected[name] for name in found})


LIGHTNING = "pytorch-lightning_version"
