"""Digests differ for every bit, and include attributes of objects; what cannot be compared is left out."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainer_cli.addons.exact.digests import Digests
from trainer_cli.data.adapt import as_loader


def _nested(value: float, rows: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((length,), value) for length in rows], layout=torch.jagged)


PAIRS: dict[str, tuple[Any, Any]] = {
    "one bit of a tensor": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2**-22])),
    "its type": (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)),
    "its shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "the sign of zero": (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
    "a scalar": (torch.tensor(1.0), torch.tensor(1.0 + 2**-23)),
    "a sparse tensor": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    "a nested tensor": (_nested(1.0), _nested(2.0)),
    "the rows of a nested tensor": (_nested(1.0), _nested(1.0, rows=(3, 2))),
    "an array": (np.arange(3), np.arange(3) + 1),
    "a number": (1, 2),
    "true and one": (True, 1),
    "a text": ("a" * 200, "a" * 199 + "b"),
    "a list": ([1, 2], [2, 1]),
    "a mapping of tensors": ({"a": torch.zeros(3)}, {"a": torch.ones(3)}),
    "a generator of torch": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "a generator of python": (random.Random(1), random.Random(2)),
    "a generator of numpy": (np.random.default_rng(1), np.random.default_rng(2)),
    "an old generator of numpy": (np.random.RandomState(1), np.random.RandomState(2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_has_another_digest(name: str) -> None:
    digests = Digests()
    one, other = (digests.digest(value) for value in PAIRS[name])
    assert one is not None
    assert one != other
    assert one == digests.digest(PAIRS[name][0])


def test_a_set_has_one_digest_whatever_its_order() -> None:
    assert Digests().digest({"b", "a", "c"}) == Digests().digest({"c", "b", "a"})


@pytest.mark.parametrize("value", [len, nn.Linear, object(), [print]], ids=["function", "class", "object", "in a list"])
def test_what_has_no_value_has_no_digest(value: Any) -> None:
    assert Digests().digest(value) is None


def test_the_leaves_of_a_tree_have_names() -> None:
    tree = {"x": torch.zeros(2), "y": [1, (2, "three")]}
    assert list(dict(Digests().tree(tree, "batch"))) == ["batch.x", "batch.y[0]", "batch.y[1][0]", "batch.y[1][1]"]


def test_a_tensor_that_was_changed_in_place_is_read_again() -> None:
    model = nn.Linear(2, 2)
    model.running = torch.zeros(3)
    digests = Digests()
    before = dict(digests.of_model(model))
    assert dict(digests.of_model(model)) == before
    model.running[0] = 1
    after = dict(digests.of_model(model))
    assert [name for name in before if before[name] != after[name]] == ["model.running"]


def test_what_training_turns_on_and_off_is_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    before = dict(Digests().of_model(model))
    model[0].weight.requires_grad = False
    model[1].eval()
    after = dict(Digests().of_model(model))
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["model.1.training", "model.0.weight.requires_grad"]


def test_a_users_object_is_looked_into(users_module: Callable[[str], Any]) -> None:
    parts = users_module("class Noise:\n    def __init__(self):\n        self.count = 3\n        self.me = self\n")
    model = nn.Linear(1, 1)
    model.noise = parts.Noise()
    assert dict(Digests().of_model(model))["model.noise.count"] == "3"


def test_globals_of_a_users_module_are_seen(users_module: Callable[[str], Any]) -> None:
    parts = users_module("import os\nfetched = 1\ndef f(): pass\n")
    parts.fetched += 1
    assert dict(Digests().of_modules())[f"{parts.__name__}.fetched"] == "2"


@pytest.fixture
def users_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of the user's, with this code."""

    def make(code: str) -> Any:
        (tmp_path / "users_parts.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "users_parts", raising=False)
        return __import__("users_parts")

    return make


@pytest.mark.parametrize("makes", ["indexed", "stream", "DataLoader"])
def test_of_worker_processes_nothing_is_compared(makes: str) -> None:
    """A generator in a loader is the user's: torch's DataLoader has one if it is given."""
    data: Any = [torch.zeros(1)] * 4
    if makes == "stream":
        data = type("Stream", (IterableDataset,), {"__iter__": lambda self: iter([torch.zeros(1)])})()
    if makes == "DataLoader":
        data = DataLoader(data, generator=torch.Generator(), num_workers=1, persistent_workers=True)
    workers: dict[str, Any] = {} if makes == "DataLoader" else {"num_workers": 1, "persistent_workers": True}
    loader = as_loader(data, shuffle=False, seed=0, **workers)
    list(loader.iterate(0))
    names = {name for name, _ in Digests().of_data(loader, "data.val", set())}
    loader.close()
    assert names == ({"data.val.generator"} if makes == "DataLoader" else set())


def test_what_contains_itself_is_read_once() -> None:
    parent: dict[str, Any] = {"name": "root"}
    parent["child"] = {"parent": parent}
    loop: list[Any] = [1]
    loop.append(loop)
    keyed: dict[str, Any] = {}
    keyed["values"] = (keyed, 2)
    for value in (parent, loop, keyed):
        assert "contains itself" in str(Digests().digest(value))
        assert any("contains itself" in digest for _, digest in Digests().tree(value, "x"))
    parent["child"]["more"] = 1
    assert len(dict(Digests().tree(parent, "x"))) == 3


@pytest.mark.parametrize("make", [torch.zeros, np.zeros], ids=["tensor", "array"])
@pytest.mark.parametrize("size", [3, 300_000], ids=["small", "large"])
def test_another_object_in_the_memory_of_one_that_is_gone_is_read(make: Any, size: int) -> None:
    digests, holder = Digests(), type("Holder", (), {})()
    seen = []
    for number in range(20):
        # Freed memory is given to the next, with the same identity now and then.
        holder.value = make(size) + number
        seen.append(dict(digests.hidden(holder.value, "value", set())))
    assert len({str(values) for values in seen}) == 20


def test_small_tensors_are_read_each_time_whatever_changed_them() -> None:
    digests, value = Digests(), torch.zeros(3)
    first = dict(digests.hidden(value, "value", set()))
    value.data.add_(1)
    assert dict(digests.hidden(value, "value", set())) != first


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 3


class Kept:
    shared = random.Random(1)
    limit = 5

    def __init__(self) -> None:
        self.slotted = [Slotted()]
        self.table = {"a": Slotted()}
        count = 7
        self.closure = lambda: count
        self.partial = functools.partial(max, 2, key=Slotted())
        self.method = Slotted.__repr__


def test_class_attributes_slots_closures_and_containers_are_looked_into() -> None:
    names = dict(Digests().hidden(Kept(), "kept", set()))
    assert {name: digest for name, digest in names.items() if "shared" not in name} == {
        "kept.limit": "5",
        "kept.slotted[0].calls": "3",
        "kept.table['a'].calls": "3",
        "kept.closure.count": "7",
        "kept.partial[1]": "2",
        "kept.partial.key.calls": "3",
    }
    assert names["kept.shared"].startswith("generator ")


def test_packages_in_a_folder_that_pip_has_filled_are_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("mine", "target"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}_module.py").write_text("COUNT = 1\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    (tmp_path / "target" / "target_module-1.0.dist-info").mkdir()
    for name in ("mine_module", "target_module"):
        importlib.import_module(name)
    seen = dict(Digests().of_modules())
    assert "mine_module.COUNT" in seen
    assert "target_module.COUNT" not in seen
