"""Checkpoints of other programs: known by content, their weights read bit for bit, nothing in them run."""

from __future__ import annotations

import argparse
import datetime
import json
import pickle
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from ranks import on_ranks
from states import same_tensors
from torch import nn
from torch.distributed.checkpoint._experimental.checkpoint_writer import CheckpointWriter, CheckpointWriterConfig
from torch.distributed.checkpoint._experimental.types import RankInfo
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict_saver import save

from trainer_cli.addons.formats.read import read_foreign
from trainer_cli.catalog.foreign_kind import ForeignKind
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
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
    assert same_tensors(read_foreign(tmp_path / "x.pt", allow_pickle=True).model, model.state_dict())


def _tensors() -> dict[str, torch.Tensor]:
    """As `safetensors` can save them: contiguous, and none shared."""
    return {name: value.contiguous().clone() for name, value in weights().items()}


def _sharded(path: Path, save: Callable[[dict[str, torch.Tensor], Path], object], stem: str, suffix: str) -> None:
    path.mkdir()
    tensors = _tensors()
    names = sorted(tensors)
    table: dict[str, str] = {}
    for number, own in enumerate((names[:3], names[3:]), 1):
        file = f"{stem}-{number:05}-of-00002.{suffix}"
        save({name: tensors[name] for name in own}, path / file)
        table |= dict.fromkeys(own, file)
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def _in_folder(path: Path, save: Callable[[dict[str, torch.Tensor], Path], object], name: str) -> None:
    path.mkdir()
    save(_tensors(), path / name)


def _dcp(path: Path, tree: dict[str, Any], form: str = "TORCH_SAVE") -> None:
    writer = FileSystemWriter(path, serialization_format=getattr(SerializationFormat, form))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a save without a process group.
        save(tree, storage_writer=writer, no_dist=True)


def _by_torchs_checkpointer(path: Path) -> None:
    writer = CheckpointWriter(CheckpointWriterConfig(), RankInfo(global_rank=0, global_world_size=1), None)
    writer.write(str(path), {"model": weights()})


save_file = safetensors.torch.save_file
MOMENTS = {"state": {0: {"exp_avg": torch.ones(4, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
WRITERS: dict[str, tuple[Callable[[Path], object], ForeignKind, str, int | None]] = {
    **{
        f"{name}, {form}": (
            partial(torch.save, saved, _use_new_zipfile_serialization=form == "zip"),
            *(ForeignKind.torch_file, program, step),
        )
        for name, (saved, program, step) in OBJECTS.items()
        for form in ("zip", "old format")
    },
    "safetensors": (lambda path: save_file(_tensors(), path), ForeignKind.safetensors, "safetensors file", None),
    **{
        f"Hugging Face, {name}": (write, ForeignKind.huggingface, "Hugging Face folder", None)
        for name, write in {
            "one file": lambda path: _in_folder(path, save_file, "model.safetensors"),
            "one pickle": lambda path: _in_folder(path, torch.save, "pytorch_model.bin"),
            "several files": lambda path: _sharded(path, save_file, "model", "safetensors"),
            "several pickles": lambda path: _sharded(path, torch.save, "pytorch_model", "bin"),
        }.items()
    },
    **{
        f"DCP, {name}": (write, ForeignKind.dcp, "DCP folder", None)
        for name, write in {
            "weights alone": lambda path: _dcp(path, weights()),
            "under model": lambda path: _dcp(path, {"model": weights(), "optimizer": MOMENTS, "step": 4}),
            "under app": lambda path: _dcp(path, {"app": {"model": weights(), "optim": MOMENTS}}),
            "in safetensors": lambda path: _dcp(path, {"model": _tensors()}, "SAFETENSORS"),
        }.items()
    },
    "torch's Checkpointer": (_by_torchs_checkpointer, ForeignKind.torch_checkpointer, "torch file", None),
}
"""What writes a checkpoint -> how it is called and which step it is of, as far as it says so."""


@pytest.mark.parametrize("name", WRITERS)
def test_the_weights_that_another_program_saved_are_read_bit_for_bit(tmp_path: Path, name: str) -> None:
    write, kind, program, step = WRITERS[name]
    write(tmp_path / "any.name")
    assert ForeignKind.of(tmp_path / "any.name") is kind
    found = read_foreign(tmp_path / "any.name")
    assert (found.program, found.step) == (program, step)
    assert same_tensors(found.model, weights())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda table: {**table, "fc.weight": "../secret.safetensors"}, "is not a plain name"),
        (lambda table: {**table, "fc.weight": "gone.safetensors"}, r"gone\.safetensors is missing"),
        (lambda table: {**table, "new": table["fc.weight"]}, "lacks 'new'"),
        (lambda table: 3, "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, damage: Callable[[Any], Any], said: str
) -> None:
    _sharded(tmp_path / "parts", save_file, "model", "safetensors")
    index = tmp_path / "parts/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": damage(json.loads(index.read_text())["weight_map"])}))
    with pytest.raises(CheckpointError, match=said):
        read_foreign(tmp_path / "parts")


def test_a_class_in_dcp_metadata_that_torch_does_not_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step/.metadata").write_bytes(pickle.dumps(Path.touch))
    with pytest.raises(CheckpointError, match=r"it names .*, which no metadata of torch has"):
        read_foreign(tmp_path / "step")


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
    ends = on_ranks(2, script, str(tmp_path / "step4"))
    assert [code for code, _ in ends] == [0, 0], ends
    assert same_tensors(read_foreign(tmp_path / "step4").model, torch.load(tmp_path / "step4.pt"))


def test_own_checkpoints_and_other_files_are_of_no_other_program(tmp_path: Path) -> None:
    make_sync_checkpointer().save({"model": weights()}, tmp_path / "step3")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    assert {ForeignKind.of(tmp_path / name) for name in ("step3", "text", "empty", "gone", ".")} == {None}
    with pytest.raises(CheckpointError, match="not a checkpoint of a known program"):
        read_foreign(tmp_path / "text")


_SETS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In the order of transformers."""


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_of_several_sets_of_weights_that_of_transformers_is_loaded_and_named(
    first: int, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = _SETS[first : first + count]
    for number, name in enumerate(chosen):
        weights = {"weight": torch.full((2,), float(number))}
        if name.endswith(".json"):
            part = f"part{number}.{'bin' if '.bin' in name else 'safetensors'}"
            (tmp_path / name).write_text(json.dumps({"weight_map": {"weight": part}}))
            name = part
        if name.endswith(".bin"):
            torch.save(weights, tmp_path / name)
        else:
            safetensors.torch.save_file(weights, tmp_path / name)
    assert read_foreign(tmp_path).model["weight"].tolist() == [0.0, 0.0]
    line = f"several sets of weights: {chosen[0]} is loaded, and not {', '.join(chosen[1:])}"
    assert [message.endswith(line) for message in caplog.messages] == [True] * (len(chosen) > 1)
