"""Checkpoints of other programs: told by content, their weights read bit for bit, nothing in them run."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint._experimental.checkpoint_writer import CheckpointWriter, CheckpointWriterConfig
from torch.distributed.checkpoint._experimental.types import RankInfo

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.checkpoint.foreign.kind import Kind, kind_of
from trainer_cli.checkpoint.foreign.read import read_foreign
from trainer_cli.errors import CheckpointError


def weights() -> dict[str, torch.Tensor]:
    """Tensors of every kind that a model may have; two are tied, one is a transposed view."""
    generator = torch.Generator().manual_seed(3)
    tied = torch.randn(4, 3, generator=generator)
    return {
        "emb.weight": tied,
        "head.weight": tied,
        "fc.weight": torch.randn(3, 5, generator=generator).t(),
        "fc.half": torch.randn(6, generator=generator).bfloat16(),
        "norm.count": torch.tensor(7),
        "norm.empty": torch.zeros(0, 3),
        "norm.mask": torch.tensor([True, False]),
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


LIGHTNING = {
    "epoch": 2,
    "global_step": 300,
    "pytorch-lightning_version": "2.6.6",
    "state_dict": OrderedDict(weights()),
    "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}],
    "hyper_parameters": {"lr": 0.1, "args": argparse.Namespace(width=3)},
}
COMPOSER = {
    "state": {
        "model": OrderedDict(weights()),
        "optimizers": {"Adam": {}},
        "timestamp": {"Timestamp": {"batch": {"value": 40, "unit": "ba"}, "total_wct": datetime.timedelta(1)}},
    },
    "rng": [{"numpy": ("MT19937", np.arange(624, dtype=np.uint32), 3, 0, 0.5), "torch": torch.zeros(8)}],
}
OBJECTS: dict[str, tuple[Any, str, int | None]] = {
    "a state dict": (OrderedDict(weights()), "torch file", None),
    "a state dict with extra state": ({**weights(), "norm._extra_state": {"seen": 3}}, "torch file", None),
    "under state_dict": ({"state_dict": weights(), "epoch": 3, "best_acc1": 0.5}, "torch file", None),
    "under model": ({"model": weights(), "optimizer": {"state": {}}, "step": 12}, "torch file", 12),
    "under model_state_dict": ({"model_state_dict": weights(), "global_step": 5, "loss": 0.25}, "torch file", 5),
    "beside plain objects": (
        {"model": weights(), "best": np.float64(0.3), "seen": defaultdict(dict, {1: {}}), "path": Path("x")},
        "torch file",
        None,
    ),
    "under another name": ({"net_g": weights(), "iter": 3}, "torch file", None),
    "of Lightning": (LIGHTNING, "Lightning checkpoint", 300),
    "of Composer": (COMPOSER, "Composer checkpoint", 40),
}


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old format"])
@pytest.mark.parametrize("name", OBJECTS)
def test_weights_in_a_torch_file_are_found(tmp_path: Path, name: str, old: bool) -> None:
    saved, program, step = OBJECTS[name]
    path = tmp_path / "any.name"
    torch.save(saved, path, _use_new_zipfile_serialization=not old)
    found = read_foreign(path)
    assert (kind_of(path), found.program, found.step) == (Kind.torch_file, program, step)
    assert same(found.model, weights())


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"generator": weights(), "discriminator": weights()}, "several sets of weights: generator, discriminator"),
        ({"model": weights(), "state_dict": weights()}, "several sets of weights: state_dict, model"),
        ({"epoch": 3, "lr": 0.1}, "no weights by name, but epoch, lr"),
        ([torch.zeros(2)], "holds a list"),
        ({}, "but nothing"),
        ({"a": torch.zeros(2).to_sparse()}, "more than dense tensors"),
    ],
)
def test_what_holds_no_weights_says_what_it_holds(tmp_path: Path, saved: Any, said: str) -> None:
    torch.save(saved, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=said):
        read_foreign(tmp_path / "x.pt")


def test_a_pickled_module_needs_the_flag(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    torch.save(model, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.container\.Sequential.*add --allow-pickle"):
        read_foreign(tmp_path / "x.pt")
    assert same(read_foreign(tmp_path / "x.pt", allow_pickle=True).model, model.state_dict())


def _tensors() -> dict[str, torch.Tensor]:
    """As `safetensors` can save them: contiguous, and none shared."""
    return {name: value.contiguous().clone() for name, value in weights().items()}


def _sharded(folder: Path, save: Callable[[dict[str, torch.Tensor], Path], object], stem: str, suffix: str) -> None:
    folder.mkdir()
    tensors = _tensors()
    names = sorted(tensors)
    table = {}
    for number, own in enumerate((names[:3], names[3:]), 1):
        file = f"{stem}-{number:05}-of-00002.{suffix}"
        save({name: tensors[name] for name in own}, folder / file)
        table |= dict.fromkeys(own, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def test_safetensors_files_and_folders_are_read(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    safetensors.torch.save_file(_tensors(), file, metadata={"format": "pt"})
    (tmp_path / "one").mkdir()
    safetensors.torch.save_file(_tensors(), tmp_path / "one/model.safetensors")
    (tmp_path / "bin").mkdir()
    torch.save(_tensors(), tmp_path / "bin/pytorch_model.bin")
    _sharded(tmp_path / "parts", safetensors.torch.save_file, "model", "safetensors")
    _sharded(tmp_path / "bins", torch.save, "pytorch_model", "bin")
    assert kind_of(file) is Kind.safetensors
    assert same(read_foreign(file).model, _tensors())
    for name in ("one", "bin", "parts", "bins"):
        assert kind_of(tmp_path / name) is Kind.huggingface
        assert same(read_foreign(tmp_path / name).model, _tensors()), name


SAVE_DCP = """
import sys, warnings
import torch
import torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(5, 3)).sum().backward()
optimizer.step()
trees = {
    "plain": model.state_dict(),
    "model": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4},
    "app": {"app": {"model": model.state_dict(), "optim": optimizer.state_dict()}},
}
for name, tree in trees.items():
    dcp.save(tree, checkpoint_id=f"{sys.argv[1]}/{name}")
writer = dcp.FileSystemWriter(
    f"{sys.argv[1]}/safe", serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS
)
dcp.save({"model": model.state_dict()}, storage_writer=writer)
torch.save(model.state_dict(), f"{sys.argv[1]}/wanted.pt")
"""


@pytest.fixture(scope="module")
def dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that torch.distributed.checkpoint saved, and the weights that are in them."""
    folder = tmp_path_factory.mktemp("dcp")
    subprocess.run([sys.executable, "-c", SAVE_DCP, str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "model", "app", "safe"])
def test_a_dcp_folder_is_read_in_one_process(dcp: Path, name: str) -> None:
    assert kind_of(dcp / name) is Kind.dcp
    found = read_foreign(dcp / name)
    assert found.program == "DCP folder"
    assert same(found.model, torch.load(dcp / "wanted.pt"))


SHARDED = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
rows, columns, whole = torch.randn(5, 3), torch.randn(2, 7), torch.randn(4)
tree = {"model": {
    "rows": distribute_tensor(rows, mesh, [Shard(0)]),
    "columns": distribute_tensor(columns, mesh, [Shard(1)]),
    "whole": distribute_tensor(whole, mesh, [Replicate()]),
}}
dcp.save(tree, checkpoint_id=sys.argv[1])
if dist.get_rank() == 0:
    torch.save({"rows": rows, "columns": columns, "whole": whole}, sys.argv[1] + ".pt")
dist.barrier()
os._exit(0)  # gloo's own threads abort some processes in the ordinary end.
"""


@pytest.mark.slow
def test_the_shards_of_two_ranks_are_put_together(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launch, str(script), str(tmp_path / "step4")], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert same(read_foreign(tmp_path / "step4").model, torch.load(tmp_path / "step4.pt"))


def test_a_folder_of_torchs_own_checkpointer_is_read(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(global_rank=0, global_world_size=1), None)
    writer.write(str(tmp_path / "step3"), {"model": weights()})
    assert kind_of(tmp_path / "step3") is Kind.torch_checkpointer
    assert same(read_foreign(tmp_path / "step3").model, weights())


def test_own_checkpoints_and_other_files_are_of_no_other_program(tmp_path: Path) -> None:
    make_sync_checkpointer().save({"model": weights()}, tmp_path / "step3")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    assert {kind_of(tmp_path / name) for name in ("step3", "text", "empty", "gone", ".")} == {None}
    with pytest.raises(CheckpointError, match="no checkpoint of a known program"):
        read_foreign(tmp_path / "text")
