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
from peer_claims import Claim, claims, each, try_claim
from states import same
from torch import nn

from trainer_cli import (
    AsyncCheckpointer,
    Checkpointer,
    SyncCheckpointer,
    make_sync_checkpointer,
)
from trainer_cli.checkpoint.reader import CheckpointReader
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


def check_whole(folder: Path) -> None:
    loaded = load(saved())
    assert_same(dict(loaded), tree())
    assert loaded.missing == []


def check_in_part(folder: Path) -> None:
    """None stands for the sub-tree as it was saved; a tensor is filled; what is not named stays out."""
    weight = torch.zeros(2, 3)
    target: dict[str, Any] = {"model": {"weight": weight}, "lists": None}
    loaded = load(saved(), target)
    assert_same(dict(loaded), {"model": {"weight": tree()["model"]["weight"]}, "lists": tree()["lists"]})
    assert loaded["model"]["weight"] is weight


def check_nested_in_part(folder: Path, kind: str) -> None:
    loaded = MAKERS[kind]().load(saved(kind), {"model": {"bias": None}, "optimizer": {"lr": None}})
    assert_same(dict(loaded), {"model": {"bias": tree()["model"]["bias"]}, "optimizer": {"lr": 0.5}})


def check_target_is_filled(folder: Path, kind: str) -> None:
    target = {"model": {"bias": torch.zeros(2)}, "epoch": None}
    loaded = MAKERS[kind]().load(saved(kind), target)
    assert_same(target, {"model": {"bias": tree()["model"]["bias"]}, "epoch": 10})
    assert dict(loaded) == target
    assert loaded.missing == []


def check_missing(folder: Path, target: dict[str, Any], missing: list[str]) -> None:
    loaded = load(saved(), target)
    assert loaded.missing == missing
    assert_same(loaded["epoch"], 10)


def check_strict(folder: Path, kind: str) -> None:
    target = {"epoch": None, "other": None}
    with pytest.raises(RuntimeError, match="lacks other"):
        MAKERS[kind]().load(saved(kind), dict(target), strict=True)
    assert MAKERS[kind]().load(saved(kind), target, strict=False)["epoch"] == 10


def check_type(folder: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0]) if dtype is torch.bool else torch.arange(4)
    tensor = values.to(dtype)
    path = save(folder, {"a": tensor, "b": 1})
    for target in ({"a": None}, {"a": torch.zeros(4).to(dtype)}):
        loaded = load(path, target)["a"]
        assert loaded.dtype == dtype
        assert loaded.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def check_type_in_a_torch_file(folder: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(4).to(dtype)
    with pytest.raises(UserError, match=str(dtype)):
        save(folder, {"a": tensor})
    assert not (folder / "step1").exists()
    assert_same(load(save(folder, {"a": tensor}, format="torch_file"), {"a": None})["a"], tensor)


def check_shape(folder: Path, tensor: torch.Tensor) -> None:
    path = save(folder, {"a": tensor, "b": 1})
    assert_same(load(path, {"a": torch.zeros_like(tensor)})["a"], tensor)
    assert_same(load(path, {"a": None})["a"], tensor)


def check_nothing_there(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load(folder / "step1")


class Reader(CheckpointReader):
    def read(self, *arguments: Any, extra: str = "", **named: Any) -> dict[str, Any]:
        self.extra = extra
        return super().read(*arguments, **named)


def check_further_arguments(folder: Path) -> None:
    reader = Reader()
    SyncCheckpointer(reader=reader).load(saved(), extra="value")
    assert reader.extra == "value"
    with pytest.raises(TypeError, match="extra"):
        load(saved(), extra="value")


LOCATIONS: dict[str, Any] = {
    "name": "meta",
    "device": torch.device("meta"),
    "mapping": {"cpu": "meta"},
    "function": lambda storage, location: storage.cpu().clone().fill_(1) if location == "cpu" else None,
    "cpu": "cpu",
}


def check_location(folder: Path, kind: str) -> None:
    weight = load(saved(), default_map_location=LOCATIONS[kind])["model"]["weight"]
    assert weight.shape == (2, 3)
    assert weight.device.type == ("cpu" if kind in ("cpu", "function") else "meta")
    if kind == "function":
        assert weight.view(torch.uint8).eq(1).all(), "what the function returns is taken"


def check_location_of_either(folder: Path, kind: str) -> None:
    loaded = MAKERS[kind]().load(saved(kind), default_map_location="cpu")
    assert_same(dict(loaded), tree())


def check_signature(folder: Path) -> None:
    for kind in (Checkpointer, SyncCheckpointer, AsyncCheckpointer):
        parameters = inspect.signature(kind.load).parameters
        assert list(parameters)[:5] == ["self", "path", "state_dict", "default_map_location", "strict"]
        assert parameters["strict"].default is False
    loaded = load(saved(), {"epoch": None}, default_map_location="cpu", strict=False)
    assert dict(loaded) == {"epoch": 10}


def check_into_a_module(folder: Path) -> None:
    module = nn.Linear(3, 2)
    weight = module.weight
    load(saved(), {"model": module.state_dict()})
    assert module.weight is weight
    assert_same(dict(module.state_dict()), tree()["model"])


def check_list_in_the_target(folder: Path) -> None:
    first = torch.zeros(2)
    target = {"lists": [first, [torch.zeros(1), torch.tensor(0)], {"deep": torch.zeros(2, dtype=torch.int64)}]}
    assert_same(load(saved(), target)["lists"], tree()["lists"])


def check_optimizer(folder: Path) -> None:
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


def check_other_layout(folder: Path) -> None:
    (folder / "other").mkdir()
    state = {"model": {"weight": torch.ones(2)}, "epoch": 3}
    torch.save(state, folder / "other" / "checkpoint_0.pt")
    assert_same(load(folder / "other"), state)


READER = "test_checkpoint_reader.py"
TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.bool, torch.complex64),
]
CLAIMS: list[Claim] = [
    *claims(
        f"{READER}: test_read_checkpoint",
        check_whole,
        {"a tree with lists of tensors comes back whole, and nothing is missing": ()},
    ),
    *claims(
        f"{READER}: test_read_checkpoint (of a file by torch.save)",
        check_other_layout,
        {"load reads a folder with checkpoint_0.pt as a state": ()},
    ),
    *claims(
        f"{READER}: test_read_with_map_location",
        check_location,
        {
            "the place of new tensors is a name": ("name",),
            "the place of new tensors is a device": ("device",),
            "the place of new tensors follows from a mapping": ("mapping",),
            "the place of new tensors follows from a function": ("function",),
            "the place of new tensors is the processor": ("cpu",),
        },
    ),
    *claims(
        f"{READER}: test_read_nonexistent_checkpoint",
        check_nothing_there,
        {"a path without a checkpoint raises FileNotFoundError": ()},
    ),
    *claims(
        f"{READER}: test_read_with_kwargs",
        check_further_arguments,
        {"further arguments of load reach the reader": ()},
    ),
    *claims(
        f"{READER}: test_partial_read",
        check_in_part,
        {"a target takes whole sub-trees for None, single tensors in place, and no other names": ()},
    ),
    *claims(
        f"{READER}: test_partial_read_missing_keys",
        check_missing,
        {
            "names that the checkpoint lacks are listed": (
                {"nonexistent_key": None, "another_missing_key": {"deep": None}, "epoch": None},
                ["nonexistent_key", "another_missing_key"],
            ),
            "a missing name within a sub-tree is listed": (
                {"model": {"weight": None, "scale": None}, "epoch": None},
                ["model/scale"],
            ),
        },
    ),
    *claims(
        f"{READER}: test_partial_read_different_dtypes",
        check_type,
        {f"a tensor of {str(dtype).removeprefix('torch.')} comes back bit for bit": (dtype,) for dtype in TYPES},
    ),
    *claims(
        f"{READER}: test_partial_read_different_dtypes",
        check_type_in_a_torch_file,
        {"a tensor of complex128 comes back bit for bit": (torch.complex128,)},
        difference="Safetensors has no name for it: the default format refuses it first, format='torch_file' holds it.",
    ),
    *claims(
        "checkpoint_reader.py: partial reads",
        check_shape,
        {
            "a tensor without dimensions is read in part": (torch.tensor(3.5),),
            "an empty tensor is read in part": (torch.zeros(0, 3),),
            "a tensor that is not contiguous is read in part": (torch.arange(6.0).reshape(2, 3).t(),),
        },
    ),
    *claims(
        "checkpoint_reader.py: targets",
        check_list_in_the_target,
        {"a list of tensors in the target is filled": ()},
    ),
    *claims(
        "checkpoint_reader.py: targets",
        check_into_a_module,
        {"a module's state_dict as the target changes the module": ()},
    ),
    *claims(
        "checkpointer.py: load",
        check_optimizer,
        {"the state of an optimizer, with numbers as keys, comes back for load_state_dict": ()},
    ),
    *claims(
        "checkpointer.py: load",
        check_signature,
        {"load takes the arguments of torch's own in its order, and is not strict by default": ()},
    ),
    *claims(
        "test_checkpointer.py: test_load_with_map_location",
        check_location_of_either,
        {
            "default_map_location is taken": ("sync",),
            "default_map_location is taken from a save in the background": ("async",),
        },
    ),
    *claims(
        "test_checkpointer.py: test_partial_load",
        check_target_is_filled,
        {
            "only the named keys are loaded, and the result is the given object": ("sync",),
            "only the named keys are loaded, and the result is the given object (async)": ("async",),
        },
        difference="The given dict is filled in place; the result is equal to it and also carries the missing names.",
    ),
    *claims(
        "test_checkpointer.py: test_load_strict_mode",
        check_strict,
        {
            "a missing key is a RuntimeError if strict, and else passed over": ("sync",),
            "a missing key is a RuntimeError if strict, and else passed over (async)": ("async",),
        },
    ),
    *claims(
        "test_checkpointer.py: test_nested_dict_partial_load",
        check_nested_in_part,
        {
            "nested names are loaded alone": ("sync",),
            "nested names are loaded alone (async)": ("async",),
        },
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
