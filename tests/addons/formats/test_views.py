"""Tensors that view one memory, in files for other programs: each in full, or sharing it as torch does."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from states import same

from trainer_cli.addons.formats.export import ExportFormat
from trainer_cli.addons.formats.export_run import export_one, strip
from trainer_cli.addons.formats.huggingface import HuggingFaceFormat
from trainer_cli.addons.formats.torch_file import TorchFileFormat
from trainer_cli.checkpoint.checkpointer import SyncCheckpointer, make_sync_checkpointer
from trainer_cli.commands.ckpt_inspect import compare, open_content


def flat(count: int = 20) -> torch.Tensor:
    return torch.arange(float(count))


def test_a_file_of_torch_holds_each_view_under_its_name(tmp_path: Path) -> None:
    whole = flat()
    SyncCheckpointer(format=TorchFileFormat()).save({"model": {"a": whole[:9], "b": whole[5:]}}, tmp_path / "step1")
    tensors = torch.load(tmp_path / "step1/rank0.pt", weights_only=True)["tensors"]
    assert torch.equal(tensors["model/b"], whole[5:])
    assert tensors["model/a"].untyped_storage().data_ptr() == tensors["model/b"].untyped_storage().data_ptr()


def test_a_file_for_from_pretrained_holds_each_weight_in_full(tmp_path: Path) -> None:
    matrix = flat().reshape(4, 5)
    SyncCheckpointer(format=HuggingFaceFormat()).save({"model": {"w": matrix, "t": matrix.t()}}, tmp_path / "step1")
    weights = safetensors.torch.load_file(tmp_path / "step1/model.safetensors")
    assert same(weights, {"w": matrix, "t": matrix.t()})


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    matrix = torch.randn(40, 50)
    model = {"a": matrix[:30], "b": matrix[20:], "t": matrix[:30].t()}
    path = tmp_path / "run/step1"
    make_sync_checkpointer().save({"model": model, "callbacks": {"whole": matrix.view(-1)[:1100]}}, path)
    return path, model


@pytest.mark.parametrize("format", ExportFormat)
def test_an_export_has_each_tensor_in_full(
    tmp_path: Path, checkpoint: tuple[Path, dict[str, torch.Tensor]], format: ExportFormat
) -> None:
    path, model = checkpoint
    output = export_one(path, format, tmp_path / "export").path
    if format is ExportFormat.torch:
        weights = torch.load(output, weights_only=True)
    else:
        weights = safetensors.torch.load_file(output if output.is_file() else output / "model.safetensors")
    assert same(dict(weights), model)
    for tensor in weights.values():
        assert tensor.is_contiguous()
        assert format is not ExportFormat.torch or tensor.untyped_storage().nbytes() == tensor.nbytes


def test_strip_and_diff_know_views(tmp_path: Path, checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, model = checkpoint
    slim = strip(path, tmp_path / "slim").path
    assert same(SyncCheckpointer().read(slim)["model"], model)
    other = {**copy.deepcopy(model), "t": model["t"].clone()}
    other["b"][0, 0] += 1  # Also in "a".
    make_sync_checkpointer().save({"model": other}, tmp_path / "run/step2")
    make_sync_checkpointer(format="torch_file").save({"model": model}, tmp_path / "run/step3")
    with open_content(path) as one, open_content(slim) as stripped, open_content(tmp_path / "run/step2") as two:
        assert (compare(one, stripped).same, compare(one, stripped).only_first) == (3, ["callbacks/whole"])
        difference = compare(stripped, two)
        assert ({change.name for change in difference.tensors}, difference.same) == ({"model/a", "model/b"}, 1)
        assert (difference.only_first, difference.only_second) == ([], [])
        assert set(one.views()) == {"model/a", "model/b", "model/t", "callbacks/whole"}
        with open_content(tmp_path / "run/step3") as of_torch:
            assert compare(stripped, of_torch).same == 3
