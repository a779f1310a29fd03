"""The claims of the tests of torch.distributed.checkpoint's experimental Checkpointer: loads."""

from __future__ import annotations

import functools
import inspect
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_checkpoints import MAKERS, closing
from peer_checkpoints import save as save_and_wait
from states import same
from torch import nn

from trainer_cli import (
    AsyncCheckpointer,
    Checkpointer,
    SyncCheckpointer,
    make_sync_checkpointer,
)
from trainer_cli.errors import UserError


@functools.cache
def saved(kind: str = "sync") -> Path:
    """A checkpoint that no row changes."""
    path = Path(tempfile.mkdtemp(prefix="peers-")) / "step1"
    checkpointer = MAKERS[kind]()
    with closing(checkpointer):
        save_and_wait(checkpointer, tree(), path)
    return path


@pytest.fixture(autouse=True, scope="module")
def _saved_is_removed() -> Any:
    yield
    for kind in MAKERS:
        shutil.rmtree(saved(kind).parent)


def tree() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([1.0, 2.0])},
        "lists": [torch.ones(2), [torch.zeros(1), torch.tensor(7)], {"deep": torch.full((2,), 5)}],
        "optimizer": {"lr": 0.5, "name": "adam"},
        "epoch": 10,
    }


def assert_same(loaded: Any, expected: Any) -> None:
    assert same(dict(loaded) if isinstance(loaded, dict) else loaded, expected), loaded


def load(path: Path, *arguments: Any, **named: Any) -> Any:
    return make_sync_checkpointer().load(path, *arguments, **named)


def save(folder: Path, state: Any, **made: Any) -> Path:
    make_sync_checkpointer(**made).save(state, folder / "step1")
    return folder / "step1"


def test_a_tree_with_lists_of_tensors_comes_back_whole_and_nothing_is_missing() -> None:
    loaded = load(saved())
    assert_same(dict(loaded), tree())
    assert loaded.missing == []


def test_a_target_takes_sub_trees_and_single_tensors() -> None:
    """None stands for the sub-tree as it was saved; a tensor is filled; what is not named stays out."""
    weight = torch.zeros(2, 3)
    target: dict[str, Any] = {"model": {"weight": weight}, "lists": None}
    loaded = load(saved(), target)
    assert_same(dict(loaded), {"model": {"weight": tree()["model"]["weight"]}, "lists": tree()["lists"]})
    assert loaded["model"]["weight"] is weight


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_nested_names_are_loaded_alone(kind: str) -> None:
    loaded = MAKERS[kind]().load(saved(kind), {"model": {"bias": None}, "optimizer": {"lr": None}})
    assert_same(dict(loaded), {"model": {"bias": tree()["model"]["bias"]}, "optimizer": {"lr": 0.5}})


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_only_the_targets_keys_are_loaded(kind: str) -> None:
    target = {"model": {"bias": torch.zeros(2)}, "epoch": None}
    loaded = MAKERS[kind]().load(saved(kind), target)
    assert_same(target, {"model": {"bias": tree()["model"]["bias"]}, "epoch": 10})
    assert dict(loaded) == target
    assert loaded.missing == []


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        (
            {"nonexistent_key": None, "another_missing_key": {"deep": None}, "epoch": None},
            ["nonexistent_key", "another_missing_key"],
        ),
        ({"model": {"weight": None, "scale": None}, "epoch": None}, ["model/scale"]),
    ],
)
def test_missing_names_are_listed(target: dict[str, Any], missing: list[str]) -> None:
    loaded = load(saved(), target)
    assert loaded.missing == missing
    assert_same(loaded["epoch"], 10)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_missing_key_is_an_error_if_strict(kind: str) -> None:
    target = {"epoch": None, "other": None}
    with pytest.raises(RuntimeError, match="lacks other"):
        MAKERS[kind]().load(saved(kind), dict(target), strict=True)
    assert MAKERS[kind]().load(saved(kind), target, strict=False)["epoch"] == 10


@pytest.mark.parametrize("dtype", [torch.complex128])
def test_a_type_without_a_name_in_safetensors_needs_a_torch_file(folder: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(4).to(dtype)
    with pytest.raises(UserError, match=str(dtype)):
        save(folder, {"a": tensor})
    assert not (folder / "step1").exists()
    assert_same(load(save(folder, {"a": tensor}, format="torch_file"), {"a": None})["a"], tensor)


@pytest.mark.parametrize("tensor", [torch.tensor(3.5), torch.zeros(0, 3), torch.arange(6.0).reshape(2, 3).t()])
def test_odd_shapes_are_read_in_part(folder: Path, tensor: torch.Tensor) -> None:
    path = save(folder, {"a": tensor, "b": 1})
    assert_same(load(path, {"a": torch.zeros_like(tensor)})["a"], tensor)
    assert_same(load(path, {"a": None})["a"], tensor)


def test_load_takes_the_arguments_of_torchs_own() -> None:
    for kind in (Checkpointer, SyncCheckpointer, AsyncCheckpointer):
        parameters = inspect.signature(kind.load).parameters
        assert list(parameters)[:5] == ["self", "path", "state_dict", "default_map_location", "strict"]
        assert parameters["strict"].default is False
    loaded = load(saved(), {"epoch": None}, default_map_location="cpu", strict=False)
    assert dict(loaded) == {"epoch": 10}


def test_a_module_state_dict_as_the_target_changes_the_module() -> None:
    module = nn.Linear(3, 2)
    weight = module.weight
    load(saved(), {"model": module.state_dict()})
    assert module.weight is weight
    assert_same(dict(module.state_dict()), tree()["model"])


def test_a_list_of_tensors_in_the_target_is_filled() -> None:
    first = torch.zeros(2)
    target = {"lists": [first, [torch.zeros(1), torch.tensor(0)], {"deep": torch.zeros(2, dtype=torch.int64)}]}
    assert_same(load(saved(), target)["lists"], tree()["lists"])


def test_the_state_of_an_optimizer_comes_back(folder: Path) -> None:
    def trained() -> torch.optim.Optimizer:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer

    state = trained().state_dict()
    path = save(folder, {"optimizer": state})
    loaded = load(path)["optimizer"]
    assert_same(loaded, state)
    fresh = trained()
    fresh.load_state_dict(loaded)
    assert_same(fresh.state_dict(), state)


def test_load_reads_a_folder_with_checkpoint_0_pt_as_a_state(folder: Path) -> None:
    (folder / "other").mkdir()
    state = {"model": {"weight": torch.ones(2)}, "epoch": 3}
    torch.save(state, folder / "other" / "checkpoint_0.pt")
    assert_same(load(folder / "other"), state)
